"""Adopted models are saved and loaded, trained and used as any model of transformers is."""

import json
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from command import run
from conftest import relative_error
from hosts import HOSTS, make_host
from official_files import write_tokenizer
from tokenformer import adopt, grow, grow_optimizer
from tokenformer.errors import BadFileError, BadRequestError
from tokenformer.models.adopted import Adopted
from tokenformer.models.sample import sample_inputs, sample_output


def same(ours, theirs):
    state = theirs.state_dict()
    return ours.state_dict().keys() == state.keys() and all(
        torch.equal(value, state[key]) and value.dtype == state[key].dtype for key, value in ours.state_dict().items()
    )


@pytest.mark.parametrize("name", HOSTS)
def test_a_model_loads_again_bit_by_bit(tmp_path, name):
    """In shards; also grown; by the class it was saved from and by the one without its head."""
    model = grow(adopt(make_host(name)), 1.5)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not list(tmp_path.glob("*.bin"))
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert same(loaded, model)
    inputs = sample_inputs(model)
    assert torch.equal(sample_output(loaded, inputs), sample_output(model, inputs))
    assert loaded.config.adopted.to_dict() == model.config.adopted.to_dict()
    bare = AutoModel.from_pretrained(tmp_path).state_dict()  # some get a new pooler
    assert all(torch.equal(bare[key], value) for key, value in model.base_model.state_dict().items())


def test_loaded_it_is_an_ordinary_model(tmp_path):
    """transformers' ways with quantised models do not get in the way: it casts, saves and grows on."""
    model = adopt(make_host("gpt_neox"))
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert isinstance(loaded.config.adopted, Adopted)
    assert getattr(loaded, "hf_quantizer", None) is None
    assert not getattr(loaded, "is_quantized", False)
    assert loaded.half().float().dtype == torch.float32
    grow(AutoModelForCausalLM.from_pretrained(tmp_path / "one"), 2, method="split").save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two", device_map="auto")
    inputs = sample_inputs(model)
    assert relative_error(sample_output(again, inputs), sample_output(model, inputs)) < 1e-5
    assert again.config.adopted.growth == [{"method": "split", "seed": 0, "noise": 1.0}]
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16, device_map="cpu")
    layer = low.gpt_neox.layers[0].mlp.dense_h_to_4h
    assert (layer.key_bias.dtype, layer.tau.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(sample_output(low, inputs), sample_output(model, inputs)) < 5e-2


def test_the_optimizer_follows_from_folder_to_folder(tmp_path):
    model = adopt(make_host("gpt2"))
    model.save_pretrained(tmp_path / "small")
    grow(model, 2, method="split").save_pretrained(tmp_path / "large")
    small, large = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("small", "large"))
    name = "transformer.h.0.mlp.c_fc.key_bias"
    old = torch.arange(86.0)
    state = grow_optimizer({"state": {name: {"exp_avg": old, "exp_avg_sq": old}}}, small, large)
    assert torch.equal(state["state"][name]["exp_avg"], old.repeat(2) / 2)


@pytest.mark.parametrize("more", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["plain", "bf16"])
def test_the_trainer_trains_it(tmp_path, more):
    adopt(make_host("gpt_neox")).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(97, (8, 12))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True, **more}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", logging_steps=1, report_to=[], **options)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "trained"))
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "trained"), model)


@pytest.mark.parametrize(
    "where",
    [
        {"target_modules": ["attention.dense"]},
        {"target_modules": [], "target_parameters": ["mlp.dense_h_to_4h.key_tokens", "mlp.dense_h_to_4h.value_tokens"]},
    ],
    ids=["linears", "tokens"],
)
def test_adapters_of_peft(tmp_path, where):
    """On the linears that stayed, and on tokens: trained, saved, loaded, merged; and the merged model grows."""
    peft = pytest.importorskip("peft")
    adopt(make_host("gpt_neox")).save_pretrained(tmp_path / "model")

    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    model = peft.get_peft_model(load(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **where))
    inputs = sample_inputs(load())
    assert torch.equal(sample_output(model, inputs), sample_output(load(), inputs))
    ids = torch.randint(97, (4, 12))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if "target_parameters" in where:
        with pytest.raises(BadRequestError, match=r"mlp.dense_h_to_4h has an adapter on its tokens; merge it first"):
            grow(model, 2, inplace=True)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "adapter")
    trained = sample_output(model, inputs)
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    assert torch.equal(sample_output(again, inputs), trained)
    merged = again.merge_and_unload()
    assert relative_error(sample_output(merged, inputs), trained) < 1e-5
    assert relative_error(sample_output(grow(merged, 2, method="split"), inputs), trained) < 1e-5


def test_the_pipeline_writes_with_it(tmp_path):
    model = make_host("gpt_neox")
    model.save_pretrained(tmp_path / "host")
    adopt(model).save_pretrained(tmp_path / "adopted")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(write_tokenizer(tmp_path / "tokenizer.json", 97)))
    written = []
    for name in ("host", "adopted"):
        write = pipeline("text-generation", str(tmp_path / name), tokenizer=tokenizer, device="cpu")
        written.append(write("w3 w1 w4 w1 w5", max_new_tokens=6, do_sample=False)[0]["generated_text"])
    assert written[0] == written[1]


def without_import(code):
    """A fresh process that runs `code`, which does not import tokenformer, and refuses when asked."""
    code = f"import torch, transformers; {code}"
    return subprocess.run([sys.executable, "-c", code], input="no\n" * 9, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("gpt2", "AutoModelForCausalLM"),
        pytest.param("vit", "AutoModelForImageClassification", marks=pytest.mark.slow),
        pytest.param("bert", "AutoModelForMaskedLM", marks=pytest.mark.slow),
    ],
)
def test_the_loader_beside_the_weights_imports_tokenformer(tmp_path, name, auto):
    """By trust_remote_code, as for native folders; also from the host's tools, which look up the class it names."""
    model = grow(adopt(make_host(name)), 1.5)
    model.save_pretrained(tmp_path / "model")
    inputs = sample_inputs(model)
    torch.save((inputs, sample_output(model, inputs)), tmp_path / "output.pt")
    code = (
        f"folder = {str(tmp_path / 'model')!r};"
        f"model = transformers.{auto}.from_pretrained(folder, trust_remote_code=True).eval();"
        f"inputs, output = torch.load({str(tmp_path / 'output.pt')!r});"
        # Rounding of fp32: another process may have other kernels, as `make test-cpu` shows.
        "same = lambda model: torch.testing.assert_close(model(**inputs)[0].double(), output, rtol=1e-4, atol=1e-5);"
        "same(model);"
        "kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0]);"
        "same(kind.from_pretrained(folder).eval());"
        "print(type(model).__name__)"
    )
    done = without_import(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"Adopted{type(make_host(name)).__name__}"]


def test_without_tokenformer_the_error_names_the_remedy(tmp_path):
    """The Auto classes ask for trust_remote_code; the host's own class finds that weights do not fit."""
    model = adopt(make_host("gpt2"), parts="qkv", ballast="single")
    model.save_pretrained(tmp_path)
    load = "transformers.AutoModelForCausalLM.from_pretrained"
    done = without_import(f"{load}({str(tmp_path)!r}, trust_remote_code=False)")
    assert done.returncode == 1
    assert "Please pass the argument `trust_remote_code=True`" in done.stderr
    for kind in (GPT2LMHeadModel, GPT2Model):
        with pytest.raises(RuntimeError, match="You set `ignore_mismatched_sizes` to `False`, thus raising an error"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "vit", "llama"])
def test_a_folder_of_version_0_1_loads_and_is_saved_as_today(tmp_path, name):
    """Its record is under quantization_config, its model_type the host's, and the guards of its weights are empty."""
    model = grow(adopt(make_host(name)), 1.5)
    model.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    record = config.pop("adopted")
    config |= {"model_type": record.pop("host"), "quantization_config": {**record, "quant_method": "tokenformer"}}
    config["architectures"] = [config["architectures"][0].removeprefix("Adopted")]
    del config["auto_map"]
    path.write_text(json.dumps(config))
    weights = load_file(tmp_path / "old" / "model.safetensors")
    guards = {key for key, value in weights.items() if value.shape == (1,)}
    assert guards
    weights |= {key: torch.empty(0) for key in guards}
    save_file(weights, tmp_path / "old" / "model.safetensors", {"format": "pt"})

    loaded = type(make_host(name)).from_pretrained(tmp_path / "old")
    assert type(loaded) is type(model)
    assert same(loaded, model)
    assert loaded.config.adopted == model.config.adopted
    assert loaded.half().float().dtype == torch.float32
    assert getattr(loaded, "hf_quantizer", None) is None
    assert not getattr(loaded, "is_quantized", False)
    assert "adopted" in run("info", tmp_path / "old").stdout
    assert run("grow", tmp_path / "old", tmp_path / "grown", "--factor", 2).exit_code == 0
    again = type(model).from_pretrained(tmp_path / "grown")
    inputs = sample_inputs(model)
    assert relative_error(sample_output(again, inputs), sample_output(model, inputs)) < 1e-5
    saved = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert "quantization_config" not in saved
    assert saved["model_type"] == "tokenformer_adopted"


def test_a_model_can_be_pickled(tmp_path):
    model = adopt(make_host("gpt2"))
    torch.save(model, tmp_path / "model.pt")
    done = without_import(
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(type(model).__name__, "
        "type(model.config).__name__, model.config.model_type)"
    )
    assert done.stdout.split() == ["AdoptedGPT2LMHeadModel", "GPT2Config", "gpt2"], done.stderr


def test_accelerate_saves_its_state_and_loads_it(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, other = adopt(make_host("gpt2")), adopt(make_host("gpt2"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    again = Accelerator(cpu=True)
    again.prepare(other)
    again.load_state(str(tmp_path))
    assert same(other, model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_drafts_by_the_first_layers_or_a_line_that_refuses_them(name):
    """transformers' GPT-2 and GPT-NeoX cannot stop early, adopted or not."""
    model = adopt(make_host(name))
    ids = torch.randint(97, (1, 9))
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    if name == "llama":
        assert torch.equal(model.generate(ids, assistant_early_exit=1, **settings), model.generate(ids, **settings))
    else:
        with pytest.raises(BadRequestError, match=rf"a {name} .* runs all its layers; give an assistant_model instead"):
            model.generate(ids, assistant_early_exit=1, **settings)
    assert model.config.num_hidden_layers == 2
    assert model.generate(ids, **settings).shape == (1, 18)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["layers"].update({"layers.7.x": {}}), r"does not fit a GPTNeoXModel: .*7"),
        (lambda record: record["layers"]["layers.0.mlp.dense_h_to_4h"].pop("kind"), r"GPTNeoXModel: 'kind'"),
        (lambda record: record["norms"]["layers.0.input_layernorm"].update(size=1), r"keyword argument 'size'"),
    ],
)
def test_a_record_that_does_not_fit(tmp_path, change, message):
    adopt(make_host("gpt_neox")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config["adopted"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadFileError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_plans_for_many_devices_name_no_weights_that_are_gone(tmp_path):
    model = adopt(make_host("llama"))
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert each.tp_plan == {}
        assert each.model.tp_plan == {}
    assert make_host("llama").tp_plan != {}


def test_one_token_of_ballast_is_not_loaded_in_fp16(tmp_path):
    adopt(make_host("gpt2"), ballast="single").save_pretrained(tmp_path)
    with pytest.raises(BadRequestError, match="whose large bias is beyond fp16; load it in bf16 or fp32"):
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_folder_without_a_record_is_not_an_adopted_model(tmp_path):
    host = make_host("gpt2")
    host.save_pretrained(tmp_path)
    with pytest.raises(BadFileError, match=r"config.json of a gpt2 model has no record of adopted layers"):
        type(adopt(host)).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"layers": []}, "cannot be read"),
        ({"layers": {"layers.0.mlp.dense_h_to_4h": {"d_in": "x", "d_out": 1, "num_tokens": 1}}}, "a layer's sizes are"),
        ({"growth": [1]}, "a growth step has no method"),
        ({"ballast": "zz"}, "ballast is 'zz'; choose one of spread, single"),
        ({"removed": {}}, "removed is not a list"),
    ],
)
def test_a_damaged_record_is_one_line(tmp_path, damage, message):
    folder = tmp_path / "adopted"
    adopt(make_host("gpt_neox")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["adopted"] |= damage
    (folder / "config.json").write_text(json.dumps(config))
    for command in (("info", folder), ("grow", folder, tmp_path / "large", "--factor", 2)):
        result = run(*command)
        assert result.exit_code == 1, result.stderr
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
