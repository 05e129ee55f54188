"""Token groups in memory: exact at birth, the base bit for bit without them, stacked, by row, merged, on any model."""

import copy
import pickle

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from conftest import make_tiny, make_tiny_vision, relative_error, train_step
from tokenformer import (
    BadRequestError,
    Pattention,
    add_tokens,
    adopt,
    choose_tokens,
    merge_tokens,
    remove_tokens,
    token_groups,
    tokens_by_row,
    train_tokens,
    use_tokens,
)
from tokenformer.pattention.functional import reference
from tokenformer.pattention.groups import layers_with_groups

IDS = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, eos_token_id=2)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT)),
    "bert": lambda: BertForMaskedLM(BertConfig(**TEXT)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=16, patch_size=4)),
    "tokenformer": make_tiny,
    "tokenformer_vision": lambda: make_tiny_vision(image_size=16),
    "adopted": lambda: adopt(GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT))),
}


def make(family):
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def logits(model, rows=slice(None), **kwargs):
    inputs = PIXELS.to(model.dtype) if model.main_input_name == "pixel_values" else IDS
    with torch.no_grad():
        return model(**{model.main_input_name: inputs[rows]}, **kwargs).logits


def learnt(model, name, seed=0):
    """The group as if it had learnt something."""
    generator = torch.Generator().manual_seed(seed)
    for _, groups in layers_with_groups(model):
        if name in groups:
            for parameter in groups[name].parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("where", ["mlp", "attention", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_is_exact_at_birth_and_the_base_is_there_bit_for_bit(family, where):
    model = make(family)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    add_tokens(model, "law", 4, where=where)
    assert torch.equal(logits(model), before)
    learnt(model, "law")
    assert relative_error(logits(model), before) > 1e-4
    assert torch.equal(logits(use_tokens(model)), before)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    remove_tokens(model, "law")
    assert list(model.state_dict()) == list(weights)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_group_learns(family):
    model = make(family)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    add_tokens(model, "law", 4)
    inputs = PIXELS if model.main_input_name == "pixel_values" else IDS
    model(**{model.main_input_name: inputs}).logits.square().mean().backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if ".token_groups.law." in name}
    values = [p.grad for name, p in model.named_parameters() if name.endswith("law.value_tokens")]
    assert values
    assert all(grad.any() for grad in values)
    remove_tokens(model, "law")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_has_its_own_groups(family):
    model = make(family).double()
    for seed, name in enumerate(("law", "fr")):
        learnt(add_tokens(model, name, 4 + seed, where="all"), name, seed)
    alone = {name: logits(use_tokens(model, names)) for name, names in {"law": ["law"], "fr": ["fr"], "": []}.items()}
    mixed = logits(model, adapter_names=["law", "__base__", "fr"])
    for row, name in enumerate(("law", "", "fr")):
        assert relative_error(mixed[row], alone[name][row]) < 1e-6
    assert torch.equal(logits(model), alone[""])  # all are off, as before
    both = logits(use_tokens(model, ["law", "fr"]))
    with tokens_by_row(model, [["fr", "law"], "law", ["law", "fr"]]):
        mixed = logits(model)
    assert relative_error(mixed[0], both[0]) < 1e-6
    assert relative_error(mixed[1], alone["law"][1]) < 1e-6


@pytest.mark.parametrize("norm", ["own", "shared"])
def test_sequences_end_to_end_have_their_own_groups(norm):
    """As continuous batching lays them: positions and mask say where each begins, lengths say which groups it has."""
    model = make_tiny()
    for name in ("law", "fr"):
        add_tokens(model, name, 4, where="all", norm=norm)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names, lengths = ["law", "__base__", ["law", "fr"], "fr"], [3, 1, 5, 2]
    ids = torch.randint(0, 64, (1, sum(lengths)))
    owner = torch.repeat_interleave(torch.tensor(lengths))
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril() & (owner[:, None] == owner)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        with tokens_by_row(model, names, lengths):
            together = model(ids, attention_mask=causal[None, None], position_ids=positions).logits.split(
                lengths, dim=1
            )
            with pytest.raises(BadRequestError, match="9 positions in a row"):
                model(ids[:, :9])
        for name, part, logits in zip(names, ids.split(lengths, dim=1), together, strict=True):
            assert relative_error(logits, model(part, adapter_names=[name]).logits) < 1e-5
    with pytest.raises(BadRequestError, match="4 names and 1 lengths"), tokens_by_row(model, names, [11]):
        pass


def test_a_layer_adds_what_the_specification_does():
    layer = nn.Sequential(Pattention(6, 5, 7))
    x = torch.randn(4, 6)
    expected = layer(x)
    for seed, (name, count) in enumerate((("a", 3), ("b", 3), ("c", 5))):
        learnt(add_tokens(layer, name, count, where="0"), name, seed)
        group = layer[0].token_groups[name]
        expected = expected + reference(x, group.key_tokens, group.value_tokens, group.tau)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


class TestSharedNormaliser:
    def test_it_is_exact_at_birth_and_merging_is_concatenation(self):
        model = make_tiny()
        before = logits(model)
        add_tokens(model, "law", 8, where="all", norm="shared")
        assert relative_error(logits(model), before) < 1e-6
        learnt(model, "law")
        with_group = logits(model)
        assert torch.equal(logits(use_tokens(model)), before)
        old = copy.deepcopy(model.state_dict())
        merge_tokens(use_tokens(model, "law"), "law")
        assert relative_error(logits(model), with_group) < 1e-6
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor[: len(old[name])] if tensor.dim() else tensor, old[name])
        assert model.config.ffn_tokens == 256 + 8
        assert not token_groups(model)

    def test_rows_that_have_it_and_rows_that_have_not(self):
        model = make_tiny()
        base = logits(model)
        learnt(add_tokens(model, "law", 8, where="all", norm="shared"), "law")
        on = logits(model)
        mixed = logits(model, adapter_names=["law", "__base__", "law"])
        assert relative_error(mixed[1], base[1]) < 1e-6
        assert relative_error(mixed[[0, 2]], on[[0, 2]]) < 1e-6

    def test_it_learns_and_nothing_else(self):
        model = make_tiny()
        add_tokens(model, "law", 8, norm="shared")
        model(IDS, labels=IDS).loss.backward()
        touched = {name for name, p in model.named_parameters() if p.grad is not None}
        assert touched == {name for name, p in model.named_parameters() if ".law." in name}
        assert model.model.layers[0].ffn.token_groups["law"].key_tokens.grad.any()

    def test_a_model_with_biases(self):
        model = adopt(GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT)).eval())
        before = logits(model)
        add_tokens(model, "law", 8, where="*.dense_h_to_4h", norm="shared")
        assert relative_error(logits(model), before) < 1e-6
        after = logits(learnt(model, "law"))
        merge_tokens(model, "law")
        assert relative_error(logits(model), after) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_base_of_another_dtype(dtype):
    model = make("llama").to(dtype)
    before = logits(model)
    learnt(add_tokens(model, "law", 4), "law")
    own = torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for name, p in model.named_parameters() if ".law." in name} == {own}
    after = logits(model)
    assert after.dtype == dtype
    assert not torch.equal(after, before)
    assert logits(model, adapter_names=["law", "__base__", "law"]).dtype == dtype


class TestCallsByRow:
    """`adapter_names` holds for one call, whoever put a forward of their own before the model's."""

    @pytest.fixture
    def model(self):
        return use_tokens(learnt(add_tokens(make("llama"), "law", 4), "law"))

    def test_beneath_the_hooks_of_accelerate(self, model):
        expected = logits(model, adapter_names=["law", "__base__", "law"])
        add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
        assert torch.equal(logits(model, adapter_names=["law", "__base__", "law"]), expected)
        assert relative_error(expected, logits(model)) > 1e-4
        remove_tokens(model, "law")
        assert torch.equal(logits(model), logits(make("llama")))

    def test_it_is_over_with_the_call(self, model):
        base = model.model(IDS).last_hidden_state
        logits(model, adapter_names=["law"] * 3)
        assert torch.equal(model.model(IDS).last_hidden_state, base)
        with pytest.raises(IndexError):
            model(IDS + 64, adapter_names=["law"] * 3)
        assert torch.equal(model.model(IDS).last_hidden_state, base)

    def test_a_call_inside_a_while(self, model):
        with tokens_by_row(model, ["law", "__base__", "__base__"]):
            before = logits(model)
            logits(model, adapter_names=["__base__"] * 3)
            assert torch.equal(logits(model), before)

    def test_groups_of_a_part_and_of_the_whole(self):
        model = make("llama")
        learnt(add_tokens(model.model, "a", 4, where="layers.0.mlp"), "a")
        learnt(add_tokens(model, "b", 4), "b", 1)
        alone = logits(use_tokens(model, "a"))
        use_tokens(model)
        assert relative_error(logits(model, adapter_names=["a"] * 3), alone) < 1e-6

    @pytest.mark.parametrize("names", [["__base__"], ["law"], ["law", "__base__"], ["law"] * 6])
    def test_as_many_names_as_rows(self, model, names):
        for call in (model, model.generate):
            with pytest.raises(BadRequestError, match=f"the batch has 3 rows, .* given for {len(names)}; give"):
                call(IDS, adapter_names=names)
        assert torch.equal(logits(model), logits(make("llama")))

    def test_an_encoder_whose_decoder_has_beams(self):
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        model = T5ForConditionalGeneration(config).eval()
        learnt(add_tokens(model, "law", 4, where=["*.wo"]), "law")
        options = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
        alone = {name: use_tokens(model, name).generate(IDS, **options) for name in ("law", ())}
        mixed = model.generate(IDS, adapter_names=["law", "__base__", "law"], **options)
        assert torch.equal(mixed[1], alone[()][1])
        assert torch.equal(mixed[[0, 2]], alone["law"][[0, 2]])


class TestChosenByThePrompt:
    @pytest.fixture
    def model(self):
        """Each of two groups has learnt a text."""
        model = make_tiny()
        for seed, name in enumerate(("law", "fr")):
            add_tokens(model, name, 8, where="all", seed=seed)
            use_tokens(model, name)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
            for _ in range(20):
                train_step(model, optimizer, IDS[[seed]])
        return use_tokens(model)

    def test_the_likeliest(self, model):
        assert choose_tokens(model, IDS)[:2] == ["law", "fr"]
        assert choose_tokens(model, IDS, ["fr"]) == ["fr"] * 3
        padded = torch.cat([torch.full((3, 4), 7), IDS], dim=1)
        mask = torch.cat([torch.zeros(3, 4, dtype=torch.long), torch.ones_like(IDS)], dim=1)
        assert choose_tokens(model, padded, attention_mask=mask)[:2] == ["law", "fr"]

    def test_in_generation(self, model):
        options = {"max_new_tokens": 6, "do_sample": False}
        chosen = model.generate(IDS, adapter_names="auto", **options)
        assert torch.equal(chosen, model.generate(IDS, adapter_names=choose_tokens(model, IDS), **options))

    def test_mistakes(self, model):
        with pytest.raises(BadRequestError, match=r"names is empty; give names of groups, or __base__"):
            choose_tokens(model, IDS, [])
        with pytest.raises(BadRequestError, match=r"input_ids have shape \(9,\); \[prompts, at least 2 positions\]"):
            choose_tokens(model, IDS[0])
        with pytest.raises(BadRequestError, match="adapter_names='law' was given; give a list with a name for every"):
            model.generate(IDS, adapter_names="law")
        with pytest.raises(BadRequestError, match="no token group 'lwa'; did you mean 'law'"):
            choose_tokens(model, IDS, ["lwa"])


def test_a_second_group_learns_alone():
    model = add_tokens(add_tokens(make("llama"), "law", 4), "fr", 4)
    train_tokens(model, "law")
    assert {name.split(".token_groups.")[1][:3] for name, p in model.named_parameters() if p.requires_grad} == {"law"}
    model.set_adapter("fr")
    assert [facts.name for facts in token_groups(model) if facts.trains] == ["fr"]


@pytest.mark.parametrize("name", ["train", "forward", "training", "switch", "names", "d_in"])
def test_names_that_modules_use(name):
    model = make("llama")
    with pytest.raises(BadRequestError, match=f"a token group cannot be called '{name}', a word that torch uses"):
        add_tokens(model, name, 4)
    assert list(model.state_dict()) == list(make("llama").state_dict())


def test_generation_by_row():
    model = make("llama")
    learnt(add_tokens(model, "law", 4), "law")
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = {name: use_tokens(model, name).generate(IDS, **options) for name in ("law", ())}
    mixed = model.generate(IDS, adapter_names=["__base__", "law", "law"], **options)
    assert torch.equal(mixed[0], alone[()][0])
    assert torch.equal(mixed[1:], alone["law"][1:])
    beams = model.generate(IDS, adapter_names=["__base__", "law", "law"], num_beams=2, **options)
    assert beams.shape[0] == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    def gradient(model):
        learnt(add_tokens(model.train(), "law", 4), "law")
        model(IDS, labels=IDS).loss.backward()
        return model.model.layers[0].mlp.token_groups["law"].key_tokens.grad

    plain, checkpointed = make("llama"), make("llama")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    assert relative_error(gradient(checkpointed), gradient(plain)) < 1e-6
    with pytest.raises(BadRequestError, match="gradient checkpointing, which computes blocks again later, does not"):
        checkpointed(IDS, adapter_names=["law", "__base__", "law"])
    assert logits(checkpointed.eval(), adapter_names=["law", "__base__", "law"]).isfinite().all()


def test_rows_learn_each_with_its_group():
    model = make("llama").double().train()
    learnt(add_tokens(learnt(add_tokens(model, "fr", 3), "fr"), "law", 4), "law", 1)
    tokens = model.model.layers[0].mlp.token_groups["law"].key_tokens
    model(IDS, adapter_names=["law", "fr", "law"], labels=IDS).loss.backward()
    by_row = tokens.grad.clone()
    tokens.grad = None
    use_tokens(model, "law")(IDS[[0, 2]], labels=IDS[[0, 2]]).loss.mul(2 / 3).backward()
    assert relative_error(by_row, tokens.grad) < 1e-6


def test_compiled_and_exported():
    model = learnt(add_tokens(make("tokenformer"), "law", 4, where="all"), "law")
    expected = logits(model)
    torch.compiler.reset()
    assert relative_error(torch.compile(model, backend="aot_eager")(IDS).logits, expected) < 1e-5
    program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
    assert relative_error(program.module()(IDS, use_cache=False).logits, expected) < 1e-5


def test_copied_and_pickled():
    model = learnt(add_tokens(make("llama"), "law", 4), "law")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), logits(model))
        assert torch.equal(logits(use_tokens(other)), logits(make("llama")))
        assert token_groups(model)[0].on
        assert type(remove_tokens(other, "law")) is LlamaForCausalLM


def test_peft_s_names():
    model = add_tokens(add_tokens(make("llama"), "law", 4), "fr", 4)
    assert model.active_adapters() == ["law", "fr"]
    model.disable_adapters()
    assert model.active_adapters() == []
    model.enable_adapters()
    model.set_adapter("fr")
    assert model.active_adapters() == ["fr"]
    assert set(model.get_adapter_state_dict()) == {name for name in model.state_dict() if ".fr." in name}
    model.disable_adapters()
    use_tokens(model)
    model.enable_adapters()
    assert model.active_adapters() == []
    use_tokens(model, ["fr", "law"])
    model.disable_adapters()
    model.delete_adapter("law")
    model.enable_adapters()
    add_tokens(model, "law", 4)
    assert model.active_adapters() == ["fr", "law"]
    model.delete_adapter(["fr", "law"])
    assert type(model) is LlamaForCausalLM


def test_what_is_there_is_listed():
    model = add_tokens(make_tiny(), "law", {"ffn": 4, "out": 2})
    (facts,) = token_groups(add_tokens(model, "fr", 3, norm="shared"))[:1]
    assert (facts.name, facts.norm, facts.on, facts.trains) == ("law", "own", True, False)
    assert facts.layers["model.layers.1.attention.out"] == 2
    assert facts.parameters == 2 * (4 + 2) * 2 * 64


def test_an_unknown_family_by_pattern():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    x = torch.randn(4, 6)
    before = model(x)
    add_tokens(model, "law", 3, where=["0", "2"])
    assert torch.equal(model(x), before)
    assert relative_error(learnt(model, "law")(x), before) > 1e-3
    with tokens_by_row(model, ["__base__", "law", "law", "__base__"]):
        assert torch.equal(model(x)[[0, 3]], before[[0, 3]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("law", 4), "the model has a token group 'law' already; choose another name"),
        (("a.b", 4), "a token group cannot be called 'a.b'; use letters, digits"),
        (("__base__", 4), "cannot be called '__base__'"),
        (("fr", 0), "num_tokens=0 was given; a whole number of at least 1 is needed"),
        (("fr", 2.5), "num_tokens=2.5 was given"),
        (("fr", {}), "num_tokens is empty; give a number, or numbers by layer"),
        (("fr", 4, []), "where=.* was given; give one of"),
        (("fr", 4, 3), "where=3 was given; give one of"),
        (("fr", 4, "mlp", "own", "bfloat16"), "dtype='bfloat16' was given; a floating-point one is needed"),
        (("fr", 4, "mpl"), "no module is called 'mpl'; did you mean 'mlp'"),
        (("fr", {"mlp": 2}, "mlp"), "num_tokens names layers, and where is given too"),
        (("fr", 4, "mlp", "shard"), "norm='shard' is not known; did you mean 'shared'"),
        (
            ("fr", 4, "mlp", "shared"),
            "norm='shared' needs a Pattention with an L2 norm, and 'model.layers.0.mlp' is",
        ),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(arguments, message):
    model = add_tokens(make("llama"), "law", 4)
    names = list(model.state_dict())
    with pytest.raises(BadRequestError, match=message) as error:
        add_tokens(model, *arguments[:2], **dict(zip(("where", "norm", "dtype"), arguments[2:], strict=False)))
    assert "\n" not in str(error.value)
    assert list(model.state_dict()) == names


def test_mistakes_in_use():
    model = add_tokens(make("llama"), "law", 4)
    with pytest.raises(BadRequestError, match="the model has no token group 'lwa'; did you mean 'law'"):
        use_tokens(model, "lwa")
    with pytest.raises(BadRequestError, match=r"the batch has 3 rows, and names of token groups were given for 2"):
        logits(model, adapter_names=["law", "law"])
    with pytest.raises(
        BadRequestError, match="merge_tokens needs a TokenFormer, whose configuration says which groups"
    ):
        merge_tokens(model, "law")
    with pytest.raises(BadRequestError, match="add_adapter: token groups and peft's adapters do not go together"):
        model.add_adapter(None)
    with pytest.raises(BadRequestError, match="no token group 'law'; it has none"):
        use_tokens(make("llama"), "law")
