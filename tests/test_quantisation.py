"""Tokens as integers: the products are within their bounds, and the layer computes what its rounded tokens say."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_tiny, make_tiny_vision, relative_error
from hosts import make_host
from tokenformer import (
    KINDS,
    BadRequestError,
    Pattention,
    TokenFormerConfig,
    adopt,
    dequantize,
    for_inference,
    pattention_layers,
    quantize,
)
from tokenformer.pattention import integer_products as products
from tokenformer.pattention.functional import reference
from tokenformer.pattention.quantised import BITS, QuantisedPattention, quantise_layer
from tokenformer.pattention.quantised_linear import plainly
from tokenformer.training.nested import check_nested

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(bits, n, d, seed=0):
    largest = 127 if bits == "int8" else 7
    codes = torch.randint(-largest, largest + 1, (n, d), generator=torch.Generator().manual_seed(seed))
    return codes.to(torch.int8) if bits == "int8" else products.pack_nibbles(codes.to(torch.int8))


@given(st.integers(1, 9), st.integers(1, 70))
def test_integers_of_four_bits_stand_in_pairs(n, d):
    codes = torch.randint(-7, 8, (n, d), dtype=torch.int8)
    packed = products.pack_nibbles(codes)
    assert packed.shape == (n, (d + 1) // 2)
    assert torch.equal(products.unpacked(packed, d), codes)


@pytest.mark.parametrize("bits", BITS)
@given(st.integers(1, 6), st.integers(1, 70), st.integers(1, 40), st.integers(0, 99))
def test_the_plain_product_is_that_of_the_integers(bits, rows, d, n, seed):
    x, codes = numbers(seed, rows, d).double(), codes_of(bits, n, d, seed)
    torch.testing.assert_close(products.plain_product(x, codes), x @ products.unpacked(codes, d).double().mT)


@pytest.mark.parametrize("bits", BITS)
@given(st.integers(1, 9), st.integers(2, 70), st.integers(1, 40), st.sampled_from([1e-30, 1.0, 1e30]))
def test_the_exact_product_rounds_a_row_to_one_in_64000(bits, rows, d, n, size):
    if not products.integers_are_exact():
        return  # this CPU clips sums, and never takes this form: see below
    x, codes = numbers(0, rows, d) * size, codes_of(bits, n, d)
    integers = products.unpacked(codes, d).double()
    error = (products.exact_product(x, codes).double() - x.double() @ integers.mT).abs()
    # Half a unit of the low part for each entry; besides, what fp32 does to the entries and to two sums.
    bound = x.double().abs().amax(1, keepdim=True) * integers.abs().sum(1) * (1 / (2 * 127 * 254) + 4 * 2**-23)
    assert (error <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("d", "n"), [(32, 16), (64, 48), (96, 66), (33, 16), (128, 5), (16, 1), (256, 64)])
def test_products_of_few_rows_are_rounded_to_bf16_and_no_further(bits, d, n):
    x, codes = numbers(1, 2, d), codes_of(bits, n, d)
    integers = products.unpacked(codes, d).double()
    packed = products.pack_for_cpu(codes, d)
    assert (packed is None) == (bits == "int8" or d % 32 > 0 or n % 16 > 0)
    exact = x.double() @ integers.mT
    error = (products.product(x, codes, packed).double() - exact).abs()
    # Entries and results are rounded to eight bits; sums in fp32 are far below that.
    assert (error <= 2**-8 * (x.double().abs() @ integers.abs().mT + exact.abs())).all()


def test_a_row_of_one_number():
    x, codes = numbers(0, 20, 1), codes_of("int8", 7, 1)
    torch.testing.assert_close(products.product(x, codes), products.plain_product(x, codes))


def test_products_that_are_clipped_are_not_used(monkeypatch):
    """As on CPUs without VNNI, where sums of two products stay within 16 bits."""
    monkeypatch.setattr(products, "integers_are_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", lambda *_: pytest.fail("not on such a CPU"))
    x, codes = numbers(0, 40, 30), codes_of("int8", 20, 30)
    torch.testing.assert_close(products.product(x, codes), products.plain_product(x, codes))


def quantised_layer(bits, kind="l2_gelu", biased=False, d_in=33, d_out=18, n=41):
    layer = Pattention(d_in, d_out, n, kind, key_bias=biased, bias=biased)
    for bias in (layer.key_bias, layer.bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    quantise_layer(layer, bits)
    return layer


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_computes_what_its_rounded_tokens_say(bits, kind, biased):
    """Outputs and gradients, in every form, also with tokens that it got later."""
    layer = quantised_layer(bits, kind, biased)
    keys, values, key_bias = layer.all_tokens()
    assert isinstance(layer, QuantisedPattention)
    for rows in (1, 3, 40):
        x = numbers(rows, rows, 33)
        expected = reference(x, keys, values, layer.tau, kind, key_bias=key_bias, bias=layer.bias)
        with torch.no_grad(), plainly(layer):
            assert relative_error(layer(x), expected) < 1e-5
        with torch.no_grad():
            # A softmax makes a factor of an error of its scores.
            assert relative_error(layer(x), expected) < (0.05 if rows < 9 else 1e-3)
    layer.double()
    x = numbers(0, 2, 5, 33).double().requires_grad_()
    twin = dequantize(copy.deepcopy(layer))
    twin_x = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    twin(twin_x).square().sum().backward()
    torch.testing.assert_close(x.grad, twin_x.grad)
    torch.testing.assert_close(layer.token_weights(x), twin.token_weights(x))


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_to_the_nearest_and_zeros_stay(bits):
    layer = Pattention(33, 18, 41)
    with torch.no_grad():
        layer.key_tokens[3] = 0
        layer.value_tokens[5] = 0
    before = [tokens.detach().clone() for tokens in (layer.key_tokens, layer.value_tokens)]
    quantise_layer(layer, bits)
    largest = 127 if bits == "int8" else 7
    for old, new in zip(before, layer.all_tokens()[:2], strict=True):
        scales = old.abs().amax(1, keepdim=True) / largest
        assert ((new - old).abs() <= scales * (0.5 + 1e-5)).all()
    assert layer.all_tokens()[0][3].eq(0).all()
    assert layer.all_tokens()[1][5].eq(0).all()


@pytest.mark.parametrize("bits", BITS)
def test_quantising_again_rounds_new_tokens_only(bits):
    layer = quantised_layer(bits)
    old = [tokens.clone() for tokens in layer.all_tokens()[:2]]
    layer.key_tokens = torch.nn.Parameter(numbers(1, 3, 33))
    layer.value_tokens = torch.nn.Parameter(numbers(2, 3, 18))
    quantise_layer(layer, bits)
    assert (layer.num_tokens, layer.num_quantised, len(layer.key_tokens)) == (44, 44, 0)
    for before, after in zip(old, layer.all_tokens()[:2], strict=True):
        assert torch.equal(after[:41], before)


@pytest.mark.parametrize("make", [make_tiny, make_tiny_vision, lambda: adopt(make_host("gpt2"))])
@pytest.mark.parametrize("bits", BITS)
def test_a_model_is_quantised_and_made_whole_again(make, bits):
    model = make().eval()
    parameters, names = model.num_parameters(), [name for name, _ in model.named_parameters()]
    name = model.main_input_name
    inputs = {name: IDS if name == "input_ids" else numbers(0, 2, *(model.config.num_channels, 32, 32))}
    if name == "pixel_values":
        inputs[name] = inputs[name][..., : model.config.image_size, : model.config.image_size]
    assert quantize(model, bits) is model
    assert model.num_parameters() == parameters
    assert model.is_quantized
    with torch.no_grad(), plainly(model):
        rounded = model(**inputs).logits
    dequantize(model)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(names)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        assert relative_error(model(**inputs).logits, rounded) < 1e-4


def test_an_adopted_model_moves_little_in_eight_bits():
    """Its keys are an identity, which integers hold; the norm's ballast and the host's matrices are rounded."""
    model = adopt(make_host("gpt2")).eval()
    with torch.no_grad():
        before = model(IDS).logits
        quantize(model, "int8")
        assert relative_error(model(IDS).logits, before) < 0.02


def test_one_line_for_what_cannot_be_quantised():
    with pytest.raises(BadRequestError, match="int8"):
        quantize(make_tiny(), "int7")
    with pytest.raises(BadRequestError, match="no Pattention"):
        quantize(torch.nn.Linear(2, 2))
    with pytest.raises(BadRequestError, match=r"no token that tokenformer\.quantize"):
        dequantize(make_tiny())
    model = quantize(make_tiny())
    with pytest.raises(BadRequestError, match="nothing is left to do"):
        quantize(model)
    with pytest.raises(BadRequestError, match="would round it again"):
        quantize(model, "int4")
    broken = make_tiny()
    layer = next(layer for _, layer in pattention_layers(broken))
    with torch.no_grad():
        layer.key_tokens[0, 0] = float("nan")
    with pytest.raises(BadRequestError, match=r"key_tokens has NaN"):
        quantize(broken)
    assert not any(layer.num_quantised for _, layer in pattention_layers(broken))


def test_bf16_and_copies():
    model = make_tiny().to(torch.bfloat16).eval()
    quantize(model)
    layer = next(layer for _, layer in pattention_layers(model))
    assert layer.quantised.key_scales.dtype == torch.float32
    with torch.no_grad():
        out = model(IDS).logits
        assert out.dtype == torch.bfloat16
        assert out.isfinite().all()
        assert torch.equal(copy.deepcopy(model)(IDS).logits, out)


@torch.no_grad()
def test_the_heaviest_tokens_alone_and_the_layers_of_inference():
    model, plain = (make_tiny().eval() for _ in range(2))
    quantize(model)
    dequantize(quantize(plain))
    for one in (model, plain):
        for block in one.model.layers:
            block.ffn.top_k = 5
    with plainly(model):  # so that the same tokens are the heaviest
        before = model(IDS).logits
        assert relative_error(before, plain(IDS).logits) < 1e-5
        assert relative_error(for_inference(model)(IDS).logits, before) < 1e-5


def test_prefixes_of_integers_are_not_trained(tmp_path):
    folder = tmp_path / "integers"
    quantize(make_tiny()).save_pretrained(folder)
    config = TokenFormerConfig.from_pretrained(folder)
    settings = SimpleNamespace(nested=[0.5, 1.0])
    recipe = SimpleNamespace(path="a.yaml", training=settings, growth=None, batch_per_process=lambda processes: 8)
    with pytest.raises(BadRequestError, match=r"a.yaml: training.nested trains the first tokens .* are quantised"):
        check_nested(recipe, config, 1)
