"""The Pattention layer: shapes, a tau that is kept through casts, copies and files, and errors that name the number."""

import copy
import math

import pytest
import torch
from torch import nn

from tokenformer import BadRequestError, Pattention, pattention_layers
from tokenformer.pattention import pattention


def test_is_the_function_with_its_own_tokens():
    layer = Pattention(6, 5, 11, kind="gelu_l2", tau=2.0)
    x = torch.randn(2, 3, 6)
    assert layer(x).shape == (2, 3, 5)
    torch.testing.assert_close(layer(x), pattention(x, layer.key_tokens, layer.value_tokens, 2.0, "gelu_l2"))
    assert (layer.d_in, layer.d_out, layer.num_tokens) == (6, 5, 11)
    assert "6, 5, num_tokens=11, kind='gelu_l2', tau=2" in repr(layer)


def test_biases_are_there_if_asked_for_and_start_at_zero():
    plain, layer = Pattention(6, 5, 11), Pattention(6, 5, 11, "l2_silu", key_bias=True, bias=True)
    assert list(plain.state_dict()) == ["key_tokens", "value_tokens", "tau"]
    assert list(layer.state_dict()) == ["key_tokens", "value_tokens", "key_bias", "bias", "tau"]
    assert (layer.key_bias.shape, layer.bias.shape) == ((11,), (5,))
    assert layer.key_bias.eq(0).all()
    assert layer.bias.eq(0).all()
    assert "tau=3.317, key_bias=True, bias=True" in repr(layer)
    x = torch.randn(2, 3, 6)
    for bias in (layer.key_bias, layer.bias):
        nn.init.normal_(bias)
    given = {"key_bias": layer.key_bias, "bias": layer.bias}
    expected = pattention(x, layer.key_tokens, layer.value_tokens, layer.tau, "l2_silu", **given)
    assert torch.equal(layer(x), expected)


def test_keys_at_birth_have_rows_of_unit_length():
    layer = Pattention(400, 4, 300)
    assert layer.key_tokens.norm(dim=1).mean().item() == pytest.approx(1, rel=0.01)
    layer.reset_parameters(key_std=0.02)
    assert layer.key_tokens.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(("kind", "tau"), [("l2_gelu", math.sqrt(12)), ("gelu_l2", math.sqrt(12)), ("softmax", 12)])
def test_tau_at_birth(kind, tau):
    assert Pattention(4, 4, 12, kind=kind).tau.item() == pytest.approx(tau, rel=1e-6)


def test_tau_is_part_of_the_saved_state(tmp_path):
    """A layer rebuilt at its grown size computes what was saved, not what √n of that size would give."""
    trained = Pattention(4, 4, 12, tau=math.sqrt(6))
    torch.save(trained.state_dict(), tmp_path / "layer.pt")
    reloaded = Pattention(4, 4, 12)
    reloaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    x = torch.randn(3, 4)
    assert torch.equal(reloaded(x), trained(x))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)])
def test_tau_is_not_rounded_when_the_model_is_cast_down(cast):
    """√2140 = 46.26 would become 46.25 in bf16."""
    layer = nn.Sequential(Pattention(4, 4, 2140))
    tau = layer[0].tau.item()
    cast(layer)
    assert layer[0].key_tokens.dtype.itemsize == 2
    assert layer[0].tau.dtype == torch.float32
    assert layer[0].tau.item() == tau


def test_tau_widens_with_the_model():
    layer = Pattention(4, 4, 3, dtype=torch.float64)
    assert layer.tau.item() == math.sqrt(3)
    assert Pattention(4, 4, 3).double().tau.dtype == torch.float64


def test_meta_device_and_to_empty():
    with torch.device("meta"):
        layer = Pattention(4, 6, 12)
    assert layer(torch.empty(2, 4, device="meta")).shape == (2, 6)
    assert "tau=meta" in repr(layer)
    source = Pattention(4, 6, 12, tau=1.5)
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), source(x))


def test_outputs_of_a_new_layer_have_a_sane_scale():
    out = Pattention(64, 64, 256)(torch.randn(512, 64))
    assert 0.5 < out.std() < 0.8  # √0.425


def test_layers_are_found_once_each():
    shared = Pattention(4, 4, 3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(4, 4), Pattention(4, 4, 5)), "c": shared})
    assert [name for name, _ in pattention_layers(model)] == ["a", "b.1"]
    assert [name for name, _ in pattention_layers(copy.deepcopy(model))] == ["a", "b.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, r"num_tokens=0 was given; at least 1"),
        ({"d_in": -3}, r"d_in=-3 was given"),
        ({"kind": "l2gelu"}, r"kind='l2gelu' is not known; did you mean 'l2_gelu'\?"),
        ({"tau": 0.0}, r"tau=0.0 was given; a positive number"),
        ({"tau": math.nan}, r"tau=nan was given"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(BadRequestError, match=message):
        Pattention(**{"d_in": 4, "d_out": 4, "num_tokens": 3, **arguments})
