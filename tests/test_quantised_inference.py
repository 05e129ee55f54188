"""Quantised models for inference: what quantised layers compute, several together; and output layers of integers."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM

from command import ended, run
from conftest import ODD_SHAPES, make_small, make_tiny_vision, relative_error, train_step
from tokenformer import (
    BadRequestError,
    Pattention,
    TokenFormerQuantConfig,
    add_tokens,
    dequantize,
    for_inference,
    for_training,
    grow,
    quantize,
)
from tokenformer.pattention import integer_products as products
from tokenformer.pattention import quantised_inference
from tokenformer.pattention.fused import IN_PLACE
from tokenformer.pattention.inference import InferenceLinear
from tokenformer.pattention.quantised import QuantisedPattention, quantise_layer
from tokenformer.pattention.quantised_inference import InferenceQuantisedPattention
from tokenformer.pattention.quantised_linear import IntegerLinear, plainly

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
# The same integer sums; what is done to them in fp32 comes in another order.
ROUNDING = 1e-5
exact = pytest.mark.skipif(not products.integers_are_exact(), reason="this CPU clips sums of integer products")


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40), st.sampled_from([1e-30, 1.0, 1e30]))
def test_a_row_is_two_rows_of_integers(layers, rows, d, size):
    x = size * torch.randn(layers, rows, d)
    x[0, 0] = 0
    both, unit = products.in_two(x)
    left, larger = both.double().view(layers, 2, rows, d).unbind(1)
    # Half a unit, and what fp32 rounds: an entry has up to 2^15 units.
    assert ((256 * larger + left) * unit.double() - x).abs().le(unit * (0.5 + 2.0**-7)).all()
    assert not both.view(layers, 2, rows, d)[0, :, 0].any()


@exact
@given(**ODD_SHAPES, kind=st.sampled_from(sorted(IN_PLACE)), size=st.sampled_from([1e-3, 1, 1e6]))
def test_a_layer_for_inference_computes_the_same(shape, d_in, d_out, n, kind, size):
    layer = Pattention(d_in, d_out, n, kind)
    quantise_layer(layer, "int8")
    x = size * torch.randn(*shape, d_in)
    with torch.no_grad():
        expected = layer(x)
        found = for_inference(layer)(x)
    assert type(layer) is InferenceQuantisedPattention
    # A weight that lies between two units may be rounded the other way.
    assert (found - expected).abs().max() <= expected.abs().max() * ROUNDING + (n + 1) * layer.tau * 2.0**-15


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_rows_that_need_care_are_left_to_the_ordinary_form(value):
    layer = Pattention(8, 8, 16)
    quantise_layer(layer, "int8")
    x = torch.full((3, 8), value)
    with torch.no_grad():
        torch.testing.assert_close(for_inference(copy.deepcopy(layer))(x), layer(x), equal_nan=True)


@exact
@pytest.mark.parametrize("rows", [1, 16])
def test_a_model_computes_its_layers_together(rows, monkeypatch):
    model, ids = quantize(make_small()), torch.randint(0, 64, (rows, 5))
    expected, state = logits(model, ids), copy.deepcopy(model.state_dict())
    calls, attend = [], quantised_inference._attend
    monkeypatch.setattr(quantised_inference, "_attend", lambda *args: calls.append(len(args[1][3])) or attend(*args))
    found = logits(for_inference(model), ids)
    assert calls == [3, 1, 1] * len(model.model.layers)
    assert relative_error(found, expected) < 1e-3  # weights between two units add up over the blocks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert relative_error(logits(for_training(model), ids), expected) == 0


def test_nothing_is_held_twice_or_saved(tmp_path):
    def held(model):
        tensors = [*model.parameters(), *model.buffers()]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    def place(layer):
        return layer.quantised.key_codes.untyped_storage().data_ptr()

    model = quantize(make_small())
    before = held(model)
    model.save_pretrained(tmp_path / "before")
    for_inference(model).save_pretrained(tmp_path / "on")
    query, key = model.model.layers[0].attention.query, model.model.layers[0].attention.key
    assert place(query) == place(key)
    assert held(model) == before
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "on" / path.name).read_bytes(), path.name
    for_training(model)
    assert (held(model), type(query)) == (before, QuantisedPattention)
    assert place(query) != place(key)


def test_what_came_later_is_computed_too():
    model = for_inference(quantize(make_small()))
    add_tokens(model, "law", 3)
    grow(model, 2, inplace=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value_tokens" in name:
                parameter.normal_()
    found = logits(model)
    assert relative_error(found, logits(for_training(model))) < 1e-3


@exact
@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("inference", [False, True])
def test_an_output_layer_of_integers(to, inference):
    model = quantize(make_small(), to)
    expected, weight = logits(model), model.lm_head.weight
    more = quantize(make_small(), to, output_layer=True)
    if inference:
        for_inference(more)
    assert type(more.lm_head) is IntegerLinear
    assert more.lm_head.weight is more.get_input_embeddings().weight
    found = logits(more)
    assert 0 < relative_error(found, expected) < 2e-2  # each weight is rounded to one in 254 of its row's largest
    with plainly(more), plainly(model):
        assert torch.equal(logits(more), logits(model))
    assert torch.equal(more.lm_head.weight, weight)
    assert more.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(copy.deepcopy(more)), found)


@exact
def test_its_weight_trains_and_is_rounded_anew():
    model = quantize(make_small(), output_layer=True)
    before, (old, _) = logits(model), model.lm_head.integers()
    assert model.lm_head.integers()[0] is old
    train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), IDS)
    codes, scales = model.lm_head.integers()
    assert not torch.equal(codes, old)
    assert not torch.equal(logits(model), before)
    numbers = model.lm_head.weight.detach()
    assert ((codes * scales[:, None] - numbers).abs() <= scales[:, None] * (0.5 + 2.0**-15)).all()


def test_it_is_saved_as_a_word_and_loaded(tmp_path):
    model = quantize(make_small(), output_layer=True)
    make_small().save_pretrained(tmp_path / "fp32")
    config = TokenFormerQuantConfig("int8", output_layer=True)
    for at_load in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", quantization_config=config)):
        at_load.save_pretrained(tmp_path / "int8")
        assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]["output_layer"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
        assert type(loaded.lm_head) is IntegerLinear
        assert torch.equal(logits(loaded), logits(model))
    AutoModel.from_pretrained(tmp_path / "int8")
    grow(loaded, 2, inplace=True)
    quantize(loaded)  # the new tokens: what the output layer is stays
    assert loaded.config.quantization_config.output_layer
    assert type(dequantize(loaded).lm_head) is torch.nn.Linear
    run("quantize", tmp_path / "fp32", tmp_path / "out", "--output-layer")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head) is IntegerLinear


def test_models_without_an_output_layer(tmp_path):
    for model in (make_tiny_vision(), make_small().model):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(BadRequestError, match="has no output layer that is a linear layer"):
            quantize(model, output_layer=True)
        assert model.state_dict().keys() == before.keys()
    make_tiny_vision().save_pretrained(tmp_path / "images")
    command = ("quantize", tmp_path / "images", tmp_path / "out", "--output-layer")
    ended(run(*command), 2, "has no output layer")
    assert not (tmp_path / "out").exists()


def test_heaviest_tokens_by_the_products_of_inference():
    """`top_k` for inference: gathered for a few rows, masked for many."""
    layer = Pattention(24, 16, 96).eval()
    for rows in (1, 40):
        x = torch.randn(rows, 24)
        layer.top_k = 8
        with torch.no_grad():
            expected = for_training(layer)(x)
            assert relative_error(for_inference(layer)(x), expected) < ROUNDING
    assert type(for_inference(torch.nn.Linear(2, 2))) is InferenceLinear
