"""Quantisation by torchao, quanto and bitsandbytes: one warning for what is left, float8 where tokens are named."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from conftest import make_tiny, relative_error
from hosts import make_host
from tokenformer import adopt, grow, pattention_layers

quantization = pytest.importorskip("torchao.quantization")

LEFT = r" quantises linear layers only: it left (\d+) of \1 tensors of parameter tokens "
BOTH = pytest.mark.parametrize("make", [make_tiny, lambda: adopt(make_host("gpt2"))], ids=["native", "adopted"])
FLOAT8_TOKENS = quantization.FqnToConfig({r"re:.*\.(key|value)_tokens": quantization.Float8WeightOnlyConfig()})


def told_once(told):
    return sum("parameter tokens" in str(warning.message) for warning in told) == 1


@BOTH
def test_quantize_says_what_it_left(make):
    with pytest.warns(UserWarning, match=f"^torchao's quantize_{LEFT}") as told:
        quantization.quantize_(make(), quantization.Int8WeightOnlyConfig())
    assert told_once(told)


@BOTH
@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("torchao", lambda: TorchAoConfig(quantization.Int8WeightOnlyConfig())),
        ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
        ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True)),
    ],
    ids=["torchao", "quanto", "bitsandbytes"],
)
def test_loading_quantised_says_what_was_left(tmp_path, make, package, settings):
    pytest.importorskip(package)
    make().save_pretrained(tmp_path)
    quantised = settings()
    with pytest.warns(UserWarning, match=f"^{type(quantised).__name__}{LEFT}") as told:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised)
    assert told_once(told)


@BOTH
def test_functions_that_quantise_in_place_say_what_they_left(make):
    quanto = pytest.importorskip("optimum.quanto")
    with pytest.warns(UserWarning, match=f"^quanto's quantize{LEFT}") as told:
        quanto.quantize(make(), weights=quanto.qint8)
    assert told_once(told)
    float8 = pytest.importorskip("torchao.float8")
    with pytest.warns(UserWarning, match=f"^torchao's convert_to_float8_training{LEFT}") as told:
        float8.convert_to_float8_training(make())
    assert told_once(told)


def test_zeros_that_float8_makes_nan_of(recwarn):
    """New tokens have values of zero, and a row of zeros has no scale."""
    quantization.quantize_(grow(make_tiny(), 2), FLOAT8_TOKENS, filter_fn=None)
    assert any("made NaN of zeros in 1 of 2 tensors of parameter tokens" in str(told.message) for told in recwarn)


@torch.no_grad()
def test_tokens_in_float8(tmp_path, recwarn):
    """Named one by one they are reached: a model computes about the same, is saved and loads again."""
    model = make_tiny()
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=TorchAoConfig(FLOAT8_TOKENS))
    assert not any("parameter tokens" in str(warning.message) for warning in recwarn)
    assert {type(layer.value_tokens).__name__ for _, layer in pattention_layers(loaded)} == {"Float8Tensor"}
    ids = torch.randint(256, (2, 12))
    # A number keeps 4 bits, so that products are off by up to 1/16; here they add up over two layers.
    assert 1e-4 < relative_error(loaded(ids).logits, model(ids).logits) < 0.2
    in_place = copy.deepcopy(model)
    quantization.quantize_(in_place, FLOAT8_TOKENS, filter_fn=None)
    assert torch.equal(in_place(ids).logits, loaded(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, loaded(ids).logits)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("again", "model")]
    assert sizes[0] < 0.5 * sizes[1]
