"""Quantised models grow, take groups and learn beside their integers, and no integer ever changes."""

import copy

import pytest
import torch

from conftest import make_tiny, relative_error, train_step
from hosts import make_host
from tokenformer import (
    BadRequestError,
    add_tokens,
    adopt,
    dequantize,
    grow,
    grow_optimizer,
    merge_tokens,
    parameter_groups,
    quantize,
    rank_tokens,
    remove_tokens,
    shrink,
    sort_tokens,
    ungrow,
    use_tokens,
)
from tokenformer.pattention.quantised import BITS
from tokenformer.pattention.quantised_linear import plainly

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "qkv_tokens": 32, "out_tokens": 32, "ffn_tokens": 64}


def make_small(bits="int8", **changes):
    return quantize(make_tiny(**{**SMALL, **changes}), bits)


def integers(model):
    """Everything that must never change, copied."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if ".quantised." in name}


def unchanged(model, before):
    after = integers(model)
    return before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def logits(model):
    """As the specification computes them: growth is exact to the rounding of fp32."""
    with torch.no_grad(), plainly(model):
        return model(IDS).logits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2"])
@pytest.mark.parametrize("method", [None, "zero"])
def test_growth_keeps_the_function_and_the_integers(bits, kind, method):
    model = make_small(bits, pattention_kind=kind)
    before, old = integers(model), logits(model)
    assert before
    for factor in (2, 1.5):
        grow(model, factor, method=method, inplace=True)
        assert relative_error(logits(model), old) < 1e-5
    assert unchanged(model, before)
    assert model.config.num_tokens == {"qkv": 96, "out": 96, "ffn": 192}
    layer = model.model.layers[0].ffn
    assert (layer.num_tokens, layer.num_quantised, len(layer.key_tokens)) == (192, 64, 128)
    (first, second) = model.config.growth_history
    assert first["method"] == second["method"] == (method or ("zero" if kind == "gelu_l2" else "rotate"))


def test_what_would_round_again_is_refused():
    model = make_small()
    before = integers(model)
    for change, words in (
        (lambda: grow(model, 2, method="split"), "split changes old tokens; use method='zero'"),
        (lambda: grow(model, depth=4), "grow in depth first"),
        (lambda: shrink(model, 0.5, data=[IDS]), "shrink first, then quantize"),
        (lambda: rank_tokens(model, [IDS]), "shrink first, then quantize"),
        (lambda: sort_tokens(model, {}), "sort first, then quantize"),
        (lambda: grow(make_small(pattention_kind="softmax"), 2), "as_group|split"),
    ):
        with pytest.raises(BadRequestError, match=words):
            change()
    assert unchanged(model, before)


def test_tokens_that_were_added_are_taken_back_and_quantised_ones_are_not():
    model = make_tiny(**SMALL)
    model = quantize(grow(model, 2))
    with pytest.raises(BadRequestError, match="quantised since"):
        ungrow(model)
    old, grown = logits(model), grow(model, 2)
    back = ungrow(grown)
    assert torch.equal(logits(back), old)
    assert unchanged(back, integers(model))


@pytest.mark.parametrize("bits", BITS)
def test_new_tokens_learn_beside_integers(bits):
    """Their gradients are those of the dequantised model, and the optimizer follows growth."""
    model = grow(make_small(bits), 2).double()
    twin = dequantize(copy.deepcopy(model))
    for each in (model, twin):
        each(IDS, labels=IDS).loss.backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        torch.testing.assert_close(parameter.grad, expected[len(expected) - len(parameter) :])
    model = model.to(torch.float32)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2))
    before = integers(model)
    losses = [train_step(model, optimizer, IDS) for _ in range(8)]
    assert losses[-1] < losses[0]
    old = logits(model)
    grow(model, 2, inplace=True, optimizer=optimizer)
    assert relative_error(logits(model), old) < 1e-5
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters() if p in optimizer.state)
    train_step(model, optimizer, IDS)
    bigger = grow(model, 2)
    grow_optimizer(optimizer, model, bigger).step()
    assert unchanged(model, before)
    assert unchanged(bigger, before)


@pytest.mark.parametrize("norm", ["own", "shared"])
def test_token_groups_on_a_quantised_base(norm):
    model = make_small()
    before, old = integers(model), logits(model)
    add_tokens(model, "law", 8, where="all", norm=norm)
    assert relative_error(logits(model), old) < 1e-5
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 2 * 5 * 8 * 64
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = [train_step(model, optimizer, IDS) for _ in range(6)]
    assert losses[-1] < losses[0]
    taught = logits(model)
    use_tokens(model)
    assert torch.equal(logits(model), old)
    use_tokens(model, "law")
    merge_tokens(model, "law")
    assert relative_error(logits(model), taught) < 1e-5
    assert unchanged(model, before)
    assert model.model.layers[0].ffn.num_tokens == 64 + 8 * (norm == "shared")
    add_tokens(model, "medicine", 4)
    remove_tokens(model, "medicine")
    assert relative_error(logits(model), taught) < 1e-5


def test_growth_as_a_group():
    model = make_small()
    before, old = integers(model), logits(model)
    grown = grow(model, 2, as_group="more")
    assert torch.equal(logits(grown), old)
    assert unchanged(grown, before)


def test_an_adopted_model_grows_beside_integers():
    model = quantize(adopt(make_host("gpt2")).eval())
    before, old = integers(model), logits(model)
    grow(model, 2, inplace=True)
    assert relative_error(logits(model), old) < 1e-4
    assert unchanged(model, before)
    assert dequantize(model).config.adopted.growth
