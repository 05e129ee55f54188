"""Models for inference: the same outputs by faster layers, taken back by one call, never saved; and drafts."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hosts
from command import ended, run
from conftest import ODD_SHAPES, make_tiny, relative_error, train_step
from tokenformer import (
    Pattention,
    TokenFormerForCausalLM,
    add_tokens,
    adopt,
    for_inference,
    for_training,
    grow,
    record_token_weights,
    tokens_by_row,
    use_tokens,
)
from tokenformer.models.inference import InferenceAttention, while_inferring
from tokenformer.pattention import pattention
from tokenformer.pattention.fused import IN_PLACE
from tokenformer.pattention.inference import InferencePattention, attend, product

# Sums of at most 1024 products in another order: each rounds by 2^-24 of what it adds, and few add up.
ROUNDING = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _small_products_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenformer.pattention.inference.LEAST_WORK", 0)
        yield


def ids(model, rows=2, length=9):
    return torch.randint(0, model.config.vocab_size, (rows, length))


@torch.no_grad()
def logits(model, x):
    return model(x).logits


@given(**ODD_SHAPES, transposed=st.booleans(), biased=st.booleans())
def test_a_product_of_odd_shapes(shape, d_in, d_out, n, transposed, biased):
    rows = torch.randn(*shape, d_in)
    weight = torch.randn(d_in, d_out).mT if transposed else torch.randn(d_out, d_in)
    bias = torch.randn(d_out) if biased else None
    expected = nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product(rows, weight, bias).double(), expected, atol=ROUNDING, rtol=ROUNDING)


@given(**ODD_SHAPES, kind=st.sampled_from(sorted(IN_PLACE)), biases=st.booleans(), size=st.sampled_from([1e-3, 1, 1e6]))
def test_a_layer_for_inference_computes_the_same(shape, d_in, d_out, n, kind, biases, size):
    layer = Pattention(d_in, d_out, n, kind, key_bias=biases, bias=biases)
    x = size * torch.randn(*shape, d_in)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        expected = layer(x)
        found = for_inference(layer)(x)
    assert type(layer) is InferencePattention
    torch.testing.assert_close(found, expected, atol=ROUNDING * d_out**0.5, rtol=ROUNDING)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_rows_that_need_care_are_left_to_the_ordinary_form(value):
    layer = Pattention(8, 8, 16)
    x = torch.full((3, 8), value)
    assert attend(x, layer.key_tokens, [layer.value_tokens], layer.tau, "l2_gelu") is None
    with torch.no_grad():
        torch.testing.assert_close(for_inference(copy.deepcopy(layer))(x), layer(x), equal_nan=True)


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_layers_side_by_side(rows):
    layers, x = [Pattention(24, 24, 2**14) for _ in range(3)], torch.randn(rows, 24)  # 300 rows are taken in parts
    with torch.no_grad():
        expected = [pattention(x, each.key_tokens, each.value_tokens, each.tau) for each in layers]
        keys, tau = torch.cat([each.key_tokens for each in layers]), torch.stack([each.tau for each in layers])
        found = attend(x, keys, [each.value_tokens for each in layers], tau, "l2_gelu")
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < ROUNDING


@pytest.mark.parametrize(
    "changes",
    [{}, {"parametric_norm": True}, {"pattention_kind": "gelu_l2"}, {"pattention_form": "reference"}, {"bf16": True}],
    ids=str,
)
def test_a_model_for_inference_computes_the_same(changes):
    bf16 = changes.pop("bf16", False)
    model = make_tiny(**changes).to(torch.bfloat16 if bf16 else torch.float32)
    x, before = ids(model), copy.deepcopy(model.state_dict())
    expected = logits(model, x)
    assert for_inference(model) is model
    # bf16 keeps eight bits, and products in another order round differently.
    assert relative_error(logits(model, x), expected) < (2.0**-5 if bf16 else ROUNDING)
    assert for_training(model) is model
    assert torch.equal(logits(model, x), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_keys_of_an_attention_lie_side_by_side_and_memory_does_not_double(tiny):
    def held():
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tiny.parameters()}
        return sum(storages.values())

    before, names = held(), list(tiny.state_dict())
    for_inference(for_inference(tiny))
    attention = tiny.model.layers[0].attention
    first, second = attention.query.key_tokens, attention.key.key_tokens
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (held(), list(tiny.state_dict())) == (before, names)
    for_training(tiny)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert (held(), type(attention.query), type(tiny.lm_head)) == (before, Pattention, nn.Linear)


def test_nothing_of_it_is_saved(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "before")
    for_inference(tiny).save_pretrained(tmp_path / "on")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "on" / path.name).read_bytes(), path.name
    x, again = ids(tiny), TokenFormerForCausalLM.from_pretrained(tmp_path / "on")
    assert torch.equal(logits(again.eval(), x), logits(for_training(tiny), x))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_stand_on_their_own(tiny, copied):
    x = ids(tiny)
    twin, expected = copied(for_inference(tiny)), logits(tiny, x)
    with torch.no_grad():
        tiny.model.layers[0].attention.key.key_tokens.zero_()
    assert relative_error(logits(twin, x), expected) < ROUNDING
    with torch.no_grad():
        twin.model.layers[0].attention.key.key_tokens.zero_()
    assert relative_error(logits(twin, x), logits(tiny, x)) < ROUNDING


def test_it_trains_and_grows_as_before(tiny):
    x, twin = ids(tiny), copy.deepcopy(tiny)
    for model in (for_inference(tiny), twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.gradient_checkpointing_enable()
        losses = [train_step(model.train(), optimizer, x) for _ in range(2)]
        model.eval()
        assert losses[0] != losses[1]
    assert relative_error(logits(tiny, x), logits(twin, x)) < ROUNDING
    expected = logits(tiny, x)
    grown = grow(tiny, factor=2)
    assert relative_error(logits(grown, x), expected) < ROUNDING
    assert relative_error(logits(for_inference(grown), x), expected) < ROUNDING
    grown.to(torch.bfloat16)
    assert relative_error(logits(grown, x), logits(for_training(grown), x)) < 2.0**-5


def test_frozen_tokens_and_hooks_are_seen(tiny):
    x = ids(tiny)
    with record_token_weights(tiny) as expected:
        logits(tiny, x)
    for_inference(tiny)
    tiny.model.layers[0].attention.query.frozen_tokens = 4
    with record_token_weights(tiny) as found:
        logits(tiny, x)
    assert found.keys() == expected.keys()
    for name, (weights,) in expected.items():
        assert relative_error(found[name][0], weights) < ROUNDING


@pytest.mark.parametrize("norm", ["own", "shared"])
@pytest.mark.parametrize("where", ["ffn", "attention"])
def test_token_groups(tiny, where, norm):
    x = ids(tiny)
    for name in ("one", "two"):
        add_tokens(tiny, name, num_tokens=4, where=where, norm=norm)
    with torch.no_grad():
        for parameter_name, parameter in tiny.named_parameters():
            if "token_groups" in parameter_name:
                parameter.normal_()
    twin = for_inference(copy.deepcopy(tiny))
    outputs = []
    for names in ([], ["one"], ["one", "two"]):
        for model in (tiny, twin):
            use_tokens(model, names)
        outputs.append(logits(tiny, x))
        assert relative_error(logits(twin, x), outputs[-1]) < ROUNDING
    assert relative_error(outputs[1], outputs[0]) > 0.01
    with tokens_by_row(tiny, ["one", "__base__"]), tokens_by_row(twin, ["one", "__base__"]):
        assert relative_error(logits(twin, x), logits(tiny, x)) < ROUNDING


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "vit"])
def test_adopted_models(family):
    model = adopt(hosts.make_host(family))
    vision = model.main_input_name == "pixel_values"
    x = torch.randn(2, 3, 16, 16) if vision else ids(model)
    expected = logits(model, x)
    assert relative_error(logits(for_inference(model), x), expected) < ROUNDING
    assert torch.equal(logits(for_training(model), x), expected)
    if not vision:
        text = model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(for_inference(model).generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0), text)


def test_generate_uses_it_by_itself_and_leaves_no_trace(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr("tokenformer.models.inference.attend", lambda *given: asked.append(len(given[2])))
    prompt = ids(tiny)
    with torch.no_grad():
        text = tiny.generate(prompt, max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 13)
    assert {type(module) for module in tiny.modules()}.isdisjoint({InferencePattention, InferenceAttention})
    assert asked == []  # keys that nobody moved are not side by side
    for_inference(tiny).generate(prompt, max_new_tokens=4, do_sample=False)
    assert set(asked) == {3}
    assert type(tiny.lm_head) is not nn.Linear


def test_threads_may_share_a_model(tiny):
    """One takes the classes back while a layer of the other runs."""
    layer, x = tiny.model.layers[0].ffn, torch.zeros(1, tiny.config.hidden_size)
    with torch.no_grad(), while_inferring(tiny):
        method = layer.forward
        for_training(tiny)
        assert torch.equal(method(x), layer(x))


def test_a_compiled_model(tiny):
    x = ids(tiny)
    expected = logits(tiny, x)
    compiled = torch.compile(for_inference(tiny), backend="eager")
    assert relative_error(logits(compiled, x), expected) < ROUNDING


@pytest.fixture
def small_and_large(tiny):
    """A model and what became of it: grown, and each of the new layers a little different."""
    large = grow(copy.deepcopy(tiny), factor=2)
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    return tiny, large


def test_a_draft_changes_nothing_but_the_number_of_passes(small_and_large):
    small, large = small_and_large
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    prompt, passes = ids(large, rows=1), []
    hook = large.register_forward_pre_hook(lambda *given: passes.append(1))
    plain = large.generate(prompt, **settings)
    assert len(passes) == 24
    passes.clear()
    for draft in (small, for_inference(small)):
        assert torch.equal(large.generate(prompt, assistant_model=draft, **settings), plain)
    assert len(passes) < 2 * 24
    hook.remove()
    unrelated = make_tiny(hidden_size=32)
    with torch.no_grad():
        for parameter in unrelated.parameters():
            parameter.normal_()
    assert torch.equal(large.generate(prompt, assistant_model=unrelated, **settings), plain)


def test_the_command_with_a_draft(small_and_large, tmp_path):
    for name, model in zip(("small", "large"), small_and_large, strict=True):
        model.save_pretrained(tmp_path / name)
    make_tiny(vocab_size=257).save_pretrained(tmp_path / "vocabulary")
    make_tiny(max_position_embeddings=16).save_pretrained(tmp_path / "short")
    options = ("generate", tmp_path / "large", "Once", "--max-new-tokens", 20, "--temperature", 0)
    plain = run(*options)
    drafted = run(*options, "--draft", tmp_path / "small")
    assert (drafted.exit_code, drafted.stdout, drafted.stderr) == (0, plain.stdout, "")
    sampled = run(*options[:-2], "--seed", 1, "--draft", tmp_path / "small")
    assert sampled.exit_code == 0
    ended(run(*options, "--draft", tmp_path / "vocabulary"), 2, "has a vocabulary of 257, and")
    ended(run(*options, "--draft", tmp_path / "short"), 2, "has a context of 16, and")
    ended(run(*options, "--draft", tmp_path / "nowhere"), 2, "does not exist")
    ended(run(*options, "--draft", tmp_path / "small", "--no-cache"), 2, "exclude each other")
