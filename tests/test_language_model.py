"""The language model as transformers' users meet it: load, generate, train, compile, export."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from conftest import make_tiny, relative_error
from tokenformer import TokenFormerConfig, TokenFormerForCausalLM, TokenFormerModel, grow, pattention_layers
from tokenformer.errors import BadRequestError
from tokenformer.models.text import byte_tokenizer


@pytest.fixture
def ids():
    return torch.randint(0, 256, (3, 12))


def test_auto_classes(tiny, ids, tmp_path):
    tiny.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TokenFormerConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), TokenFormerModel)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, TokenFormerForCausalLM)
    assert torch.equal(loaded(ids).logits, tiny(ids).logits)
    assert {f.suffix for f in tmp_path.iterdir()} == {".json", ".safetensors", ".md", ".py"}


def test_a_program_that_does_not_import_tokenformer_can_load_it(tiny, ids, tmp_path):
    tiny.save_pretrained(tmp_path / "model")
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM;"
        "assert not any(name.startswith('tokenformer') for name in sys.modules);"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True);"
        f"torch.save(model(torch.tensor({ids.tolist()})).logits, {str(tmp_path / 'logits.pt')!r});"
        f"model.save_pretrained({str(tmp_path / 'again')!r});"
        # As `transformers serve` finds it.
        "import transformers; assert getattr(transformers, model.config.architectures[0]) is type(model)"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # Close, not equal: another process may compute with other kernels.
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), tiny(ids).logits)
    folders = [{path.name for path in (tmp_path / name).iterdir()} for name in ("model", "again")]
    assert folders[0] == folders[1]


@pytest.mark.parametrize("method", ["zero", "split"])
def test_a_grown_model_saved_in_shards_computes_the_same(tiny, ids, tmp_path, method):
    grown = grow(tiny, num_tokens={"qkv": 100, "ffn": 768}, method=method)
    grown.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_tokens == {"qkv": 100, "out": 64, "ffn": 768}
    assert torch.equal(loaded(ids).logits, grown(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_low_precision_keeps_tau(tiny, ids, tmp_path, dtype):
    grown = grow(tiny, num_tokens={"qkv": 70}, method="random", exact=False)  # √70 is not a bf16 number
    grown.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for (_, ours), (_, theirs) in zip(pattention_layers(loaded), pattention_layers(grown), strict=True):
        assert ours.key_tokens.dtype == dtype
        assert ours.tau.dtype == torch.float32
        assert ours.tau == theirs.tau
    assert relative_error(loaded(ids).logits, grown(ids).logits) < 0.05
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_is_loading_in_that_dtype(tiny, ids, tmp_path, dtype):
    """Neither tau nor the rotary frequencies may be rounded on the way."""
    tiny.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(tiny.to(dtype)(ids).logits, loaded(ids).logits)


def test_embeddings_are_tied_and_can_be_untied(tiny):
    assert tiny.lm_head.weight is tiny.model.embed_tokens.weight
    untied = make_tiny(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert untied.num_parameters() == tiny.num_parameters() + 256 * 64


def test_initialisation():
    model = make_tiny(hidden_size=128, num_hidden_layers=3, qkv_tokens=256)
    for _, layer in pattention_layers(model):
        assert layer.key_tokens.std().item() == pytest.approx(128**-0.5, rel=0.03)
        assert layer.value_tokens.std().item() == pytest.approx(2 / (3 * 128**0.5), rel=0.03)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert model.model.layers[0].attention_norm.weight is None
    assert model.model.norm.weight is not None
    assert make_tiny(parametric_norm=True).model.layers[0].ffn_norm.weight is not None


def test_norms_of_blocks_are_layer_norms_without_weights():
    norm = make_tiny(layer_norm_eps=1e-3).model.layers[0].ffn_norm
    rows = torch.randn(5, 7, 64, dtype=torch.float64, requires_grad=True)
    expected = F.layer_norm(rows, (64,), eps=1e-3)
    assert torch.equal(norm(rows), expected)
    seed = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, rows, seed)[0] for out in (norm(rows), expected)]
    torch.testing.assert_close(*gradients)


def test_the_papers_initialisation_can_be_asked_for(tmp_path):
    model = make_tiny(initializer_range=0.02)
    assert model.model.layers[0].ffn.key_tokens.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.03)
    model.config.save_pretrained(tmp_path)
    assert TokenFormerConfig.from_pretrained(tmp_path).initializer_range == 0.02


def test_the_model_is_causal(tiny, ids):
    changed = ids.clone()
    changed[:, 7:] = 5
    a, b = tiny(ids).logits, tiny(changed).logits
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


def test_only_a_quarter_of_each_head_is_rotated(tiny):
    cos, _ = tiny.model.rotary_emb(torch.zeros(1, 4, 64), torch.arange(4)[None])
    assert cos.shape[-1] == 16 // 4
    assert TokenFormerConfig(rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": 1.0}).rope_parameters == {
        "rope_type": "default",
        "rope_theta": 5e4,
        "partial_rotary_factor": 1.0,
    }


@pytest.mark.parametrize("kind", ["gelu_l2", "softmax"])
def test_other_kinds_are_saved(kind, ids, tmp_path):
    model = make_tiny(pattention_kind=kind)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


NO_VECTORS = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
FLEX = pytest.param(
    "flex_attention",
    marks=[
        pytest.mark.slow,  # it compiles
        pytest.mark.skipif(NO_VECTORS, reason="torch's own kernel is written for CPUs with vectors"),
    ],
)


@pytest.mark.parametrize("attention", ["sdpa", "eager", FLEX])
def test_attention_implementations_agree(tiny, ids, attention):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = tiny(ids, attention_mask=mask).logits
    tiny.set_attn_implementation(attention)
    with torch.no_grad():
        out = tiny(ids, attention_mask=mask).logits
    assert relative_error(out[1:], expected[1:]) < 1e-5
    assert relative_error(out[0, 5:], expected[0, 5:]) < 1e-5


GENERATE = {"max_new_tokens": 8, "pad_token_id": 0}


def uncached(model, ids, steps, mask=None):
    """Greedy decoding the slow way: the whole sequence again for every token."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=1)
    return ids


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_greedy_generation_with_and_without_cache(tiny, ids, cache):
    expected = uncached(tiny, ids, 8)
    assert torch.equal(tiny.generate(ids, do_sample=False, **GENERATE, **cache), expected)


def test_sampling_beams_and_logits_to_keep(tiny, ids):
    torch.manual_seed(1)
    first = tiny.generate(ids, do_sample=True, temperature=0.8, top_p=0.9, **GENERATE)
    torch.manual_seed(1)
    assert torch.equal(first, tiny.generate(ids, do_sample=True, temperature=0.8, top_p=0.9, **GENERATE))
    beams = tiny.generate(ids, num_beams=3, num_return_sequences=2, do_sample=False, **GENERATE)
    assert beams.shape == (6, 20)
    torch.testing.assert_close(tiny(ids, logits_to_keep=2).logits, tiny(ids).logits[:, -2:])


def test_left_padding_does_not_change_what_is_generated(tiny):
    prompts = [torch.randint(0, 256, (1, n)) for n in (3, 9, 5)]
    batch = torch.cat([F.pad(p, (9 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (9 - p.shape[1], 0)) for p in prompts])
    out = tiny.generate(batch, attention_mask=mask, do_sample=False, **GENERATE)
    for row, prompt in zip(out, prompts, strict=True):
        alone = tiny.generate(prompt, do_sample=False, **GENERATE)
        assert torch.equal(row[9:], alone[0, prompt.shape[1] :])


def test_generation_after_growth_is_the_same(tiny, ids):
    for method in ("zero", "split"):
        grown = grow(tiny, 2, method=method)
        assert torch.equal(
            grown.generate(ids, do_sample=False, **GENERATE), tiny.generate(ids, do_sample=False, **GENERATE)
        )


def test_outputs(tiny, ids):
    tiny.set_attn_implementation("eager")
    out = tiny(ids, output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(3, 12, 64)] * 3
    assert [tuple(a.shape) for a in out.attentions] == [(3, 4, 12, 12)] * 2
    as_tuple = tiny(ids, return_dict=False)
    assert torch.equal(as_tuple[0], out.logits)
    embedded = tiny(inputs_embeds=tiny.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, out.logits)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        tiny()


@pytest.fixture(params=["torch's own", "before 2.13"])
def _chunks(request, monkeypatch):
    """The chunked loss as torch has it, if it does, and as it is without."""
    if request.param == "before 2.13":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("items", [None, 20])
def test_the_loss_is_cross_entropy_of_the_next_token(ids, chunked, items):
    model = make_tiny(chunked_loss=chunked)
    labels = ids.clone()
    labels[:, :3] = -100
    kwargs = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    out = model(ids, labels=labels, **kwargs)
    assert (out.logits is None) == chunked
    out.loss.backward()
    logits = model(ids).logits
    logits = logits[:, :-1].flatten(0, 1)
    reduction = "mean" if items is None else "sum"
    expected = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction=reduction) / (items or 1)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = model.model.layers[0].ffn.key_tokens.grad.clone()
    model.zero_grad()
    expected.backward()
    assert relative_error(gradient, model.model.layers[0].ffn.key_tokens.grad) < 1e-5


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("chunked", [False, True])
def test_the_chunked_loss_never_holds_the_logits(chunked):
    """By what the allocator hands out, so that memory inside an operator counts too."""
    tokens, vocabulary = 2048, 8192
    model = make_tiny(vocab_size=vocabulary, max_position_embeddings=tokens, chunked_loss=chunked)
    ids = torch.randint(0, vocabulary, (1, tokens))
    logits_bytes = tokens * vocabulary * 4
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(ids, labels=ids).loss.backward()
    largest = max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    if chunked:
        assert largest < logits_bytes / 4
    else:
        assert largest >= logits_bytes


def test_gradient_checkpointing_changes_nothing(ids):
    losses, gradients = [], []
    for checkpointing in (False, True):
        model = make_tiny().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.model.layers[0].attention.query.key_tokens.grad)
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)


def test_compiles_to_one_graph(tiny, ids):
    compiled = torch.compile(tiny, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(ids, use_cache=False).logits, tiny(ids).logits) < 1e-5


def test_exports_with_a_dynamic_length(tiny, ids):
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        tiny,
        (),
        {"input_ids": ids, "use_cache": False},
        dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
        strict=False,
    )
    longer = torch.randint(0, 256, (3, 30))
    exported = program.module()(input_ids=longer, use_cache=False).logits
    assert relative_error(exported, tiny(longer).logits) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "record",
    [
        lambda model, ids, path: torch.jit.trace(model, (ids,)),
        lambda model, ids, path: torch.onnx.export(model, (ids,), path, dynamo=False),
    ],
    ids=["trace", "onnx"],
)
def test_the_old_recorder_is_refused(tiny, ids, tmp_path, record):
    message = r"cannot record a Pattention; use torch\.export\.export or torch\.onnx\.export\(dynamo=True\)$"
    with pytest.raises(BadRequestError, match=message):
        record(tiny, ids, tmp_path / "model.onnx")


def test_drafts_by_the_first_layer(tiny, ids):
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    drafted = tiny.generate(ids[:1], assistant_early_exit=1, **settings)
    assert torch.equal(drafted, tiny.generate(ids[:1], **settings))
    assert tiny.config.num_hidden_layers == 2


@pytest.mark.parametrize("vocabulary", [256, 257])
def test_the_text_generation_pipeline(tmp_path, vocabulary):
    """A model of bytes is saved with its tokenizer, which pads batches; padding changes nothing."""
    make_tiny(vocab_size=vocabulary).save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), device="cpu")
    prompts, settings = ["def grow(", "x", "a longer one than both"], {"max_new_tokens": 5, "do_sample": False}
    one_by_one = [generate(prompt, **settings) for prompt in prompts]
    assert all(out["generated_text"].startswith(prompt) for (out,), prompt in zip(one_by_one, prompts, strict=True))
    assert generate(prompts, batch_size=3, **settings) == one_by_one


def test_a_tokenizer_that_is_there_is_kept(tiny, tmp_path):
    tokenizer = byte_tokenizer(256)
    tokenizer.pad_token = "!"
    tokenizer.save_pretrained(tmp_path)
    tiny.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "!"
    make_tiny(vocab_size=300).save_pretrained(tmp_path / "not_of_bytes")
    assert not list((tmp_path / "not_of_bytes").glob("tokenizer*"))


def test_the_trainer_trains_it(tmp_path):
    model = make_tiny(chunked_loss=True).train()
    data = [{"input_ids": torch.arange(i, i + 32) % 256, "labels": torch.arange(i, i + 32) % 256} for i in range(64)]
    arguments = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=20, learning_rate=1e-2, logging_steps=1, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 1


def test_the_trainer_smooths_labels_of_the_next_token(tiny, ids, tmp_path):
    """It knows by a list of transformers' own which models to shift labels for."""
    arguments = TrainingArguments(tmp_path, use_cpu=True, label_smoothing_factor=0.1, report_to="none")
    loss = Trainer(tiny, arguments).compute_loss(tiny, {"input_ids": ids, "labels": ids.clone()})
    logits = tiny(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_model_card_says_what_it_is_and_how_it_grew(tiny, tmp_path):
    grown = grow(grow(tiny, to="tiny-2x"), 2, method="split", seed=3)
    grown.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"| parameters | {grown.num_parameters():,} |" in card
    assert "256 / 256 / 1024" in card
    assert "1. rotate (seed 0): 64/64/256 -> 128/128/512" in card
    assert "2. split (seed 3): 128/128/512 -> 256/256/1024" in card
    (tmp_path / "README.md").write_text("# My own words\n")
    grown.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My own words\n"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_attention_heads", 7, "hidden_size=64 is not divisible by num_attention_heads=7"),
        ("ffn_tokens", 0, "ffn_tokens=0 was given; at least 1"),
        ("pattention_kind", "gelul2", "did you mean 'gelu_l2'"),
        ("qkv_tokens", "many", "qkv_tokens"),
    ],
)
def test_bad_configurations(field, value, message, tmp_path):
    with pytest.raises(Exception, match=message):
        TokenFormerConfig.preset("tiny", **{field: value})


def test_an_older_config_file_loads(tiny, tmp_path):
    """Fields that a file does not have take their defaults."""
    tiny.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["growth_history"], fields["chunked_loss"]
    path.write_text(json.dumps(fields))
    assert AutoConfig.from_pretrained(tmp_path).growth_history is None
