"""The Pattention function: right against float64, finite for every finite input, one normaliser over groups."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ODD_SHAPES, relative_error, whole_floats
from tokenformer import KINDS
from tokenformer.pattention import pattention
from tokenformer.pattention.functional import (
    default_tau,
    normaliser,
    rectify,
    token_scores,
    weigh,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Two matmuls and a normalisation, each rounding to the dtype: a few ulps of it.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def gelu(u):
    return u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))


ACTIVATIONS = {
    "l2_gelu": gelu,
    "l2_gelu_tanh": lambda u: u * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
    "l2_silu": lambda u: u / (1 + torch.exp(-u)),
    "l2_relu": lambda u: u * (u > 0),
}


def paper_formula(x, keys, values, tau, kind, key_bias=0.0, bias=0.0):
    """Word for word from the paper, with nothing against overflow or zeros."""
    scores = x @ keys.T + key_bias
    if kind == "softmax":
        weights = torch.softmax(scores, -1) * tau
    elif kind in ACTIVATIONS:
        weights = ACTIVATIONS[kind](scores * tau / scores.norm(dim=-1, keepdim=True))
    else:
        scores = gelu(scores)
        weights = scores * tau / scores.norm(dim=-1, keepdim=True)
    return weights @ values + bias


def tokens(d_in, d_out, n, dtype=torch.float64, std=0.5):
    """Keys and values."""
    keys = torch.randn(n, d_in, dtype=torch.float64) * std
    return keys.to(dtype), torch.randn(n, d_out, dtype=torch.float64).to(dtype)


def biases(d_out, n, dtype=torch.float64):
    """A key bias and a bias."""
    return {"key_bias": torch.randn(n).to(dtype), "bias": torch.randn(d_out).to(dtype)}


def biased(*tensors, tau, kind):
    """The function, of x, keys, values and, if given, biases."""
    return pattention(*tensors[:3], tau, kind, **dict(zip(("key_bias", "bias"), tensors[3:], strict=False)))


@pytest.mark.parametrize("kind", KINDS)
@given(
    **ODD_SHAPES,
    dtype=st.sampled_from(DTYPES),
    tau=st.sampled_from([None, 0.3, 7.0]),
    with_biases=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_the_papers_formula(kind, shape, d_in, d_out, n, dtype, tau, with_biases, seed):
    torch.manual_seed(seed)
    x = torch.randn(*shape, d_in, dtype=torch.float64).to(dtype)
    keys, values = tokens(d_in, d_out, n, dtype)
    tau = tau or default_tau(n, kind)
    more = biases(d_out, n, dtype) if with_biases else {}
    out = pattention(x, keys, values, tau, kind, **more)
    assert out.shape == (*shape, d_out)
    assert out.dtype == dtype
    wide = {name: tensor.double() for name, tensor in more.items()}
    expected = paper_formula(x.double(), keys.double(), values.double(), tau, kind, **wide)
    # A row that GeLU all but silences is not normalised back to full size by us: see SMALLEST_RMS.
    scores = x.double() @ keys.double().T + wide.get("key_bias", 0)
    heard = (gelu(scores).norm(dim=-1) > 1e-2) | (kind != "gelu_l2")
    # Sums of values of both signs can cancel, so the error is measured against their size; scores with a bias too.
    cancelled = 1 + (wide["key_bias"].norm() / scores.norm(dim=-1).min() if with_biases else 0)
    size = tau * values.double().abs().max() * math.sqrt(n) * cancelled
    assert ((out.double() - expected)[heard].abs() <= TOLERANCE[dtype] * size).all()


@pytest.mark.parametrize("with_biases", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_gradcheck(kind, with_biases):
    keys, values = tokens(4, 3, 6)
    more = biases(3, 6).values() if with_biases else ()
    inputs = [t.requires_grad_() for t in (torch.randn(2, 2, 4, dtype=torch.float64), keys, values, *more)]
    assert torch.autograd.gradcheck(lambda *args: biased(*args, tau=2.5, kind=kind), inputs)
    assert torch.autograd.gradgradcheck(lambda *args: biased(*args, tau=2.5, kind=kind), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_where_rows_are_scaled_down(kind):
    """Rows beyond LARGEST_ENTRY take the other path through the scores."""
    keys, values = tokens(4, 3, 6, std=1e-3)
    x = torch.randn(5, 4, dtype=torch.float64) * 300
    inputs = [t.requires_grad_() for t in (x, keys, values, *biases(3, 6).values())]
    assert torch.autograd.gradcheck(lambda *args: biased(*args[:3], tau=2.5, kind=kind), inputs[:3], eps=1e-6)
    assert torch.autograd.gradcheck(lambda *args: biased(*args, tau=2.5, kind=kind), inputs, eps=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(exponent=whole_floats(-46, 38.5), zero_rows=st.booleans(), with_biases=st.booleans(), seed=st.integers(0, 2**16))
def test_finite_in_value_and_gradient_for_every_finite_input(kind, dtype, exponent, zero_rows, with_biases, seed):
    torch.manual_seed(seed)
    largest = torch.finfo(dtype).max
    x = (torch.randn(4, 16, dtype=torch.float64).clamp(-2, 2) * 10.0**exponent).clamp(-largest, largest).to(dtype)
    if zero_rows:
        x[::2] = 0
    keys, values = tokens(16, 8, 24, dtype, std=0.02)
    more = biases(8, 24, dtype).values() if with_biases else ()
    leaves = [t.requires_grad_() for t in (x, keys, values, *more)]
    out = biased(*leaves, tau=default_tau(24, kind), kind=kind)
    out.sum().backward()
    for tensor in (out, *(leaf.grad for leaf in leaves)):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_at_1e4_are_right_not_only_finite(kind, dtype):
    """The naive form overflows in fp16 here: a score of 1e4 · 0.5 · 16 squared is beyond 65504."""
    x = (torch.randn(8, 16) * 1e4).clamp(-6e4, 6e4).to(dtype)
    keys, values = tokens(16, 8, 24, dtype)
    tau = default_tau(24, kind)
    expected = paper_formula(x.double(), keys.double(), values.double(), tau, kind)
    assert relative_error(pattention(x, keys, values, tau, kind), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_normaliser_is_computed_in_fp32(dtype):
    x, (keys, _) = torch.randn(3, 16).to(dtype), tokens(16, 8, 4096, dtype)
    scores, scale = token_scores(x, keys)
    norm = normaliser(rectify(scores, scale, "l2_gelu"), "l2_gelu")
    assert norm.dtype == torch.float32
    # A sum of 4096 squares in 8 bits of mantissa would stop growing long before its end.
    assert relative_error(norm, (scores.double() ** 2).sum(-1, keepdim=True)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, dtype):
    x, (keys, values), more = torch.randn(6, 16) * 1e4, tokens(16, 8, 24, torch.float32), biases(8, 24, torch.float32)
    leaves = [t.requires_grad_() for t in (x, keys, values, *more.values())]
    tau = default_tau(24, kind)
    with torch.autocast("cpu", dtype=dtype):
        out = biased(*leaves, tau=tau, kind=kind)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    wide = {name: tensor.double() for name, tensor in more.items()}
    expected = paper_formula(x.double(), keys.double(), values.double(), tau, kind, **wide)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "softmax"])
def test_a_zero_row_gives_zero(kind):
    keys, values = tokens(4, 3, 6)
    assert pattention(torch.zeros(2, 4, dtype=torch.float64), keys, values, 2.5, kind).eq(0).all()


def test_l2_gelu_does_not_feel_the_scale_of_its_input():
    """Until a row is tiny; then its output fades to zero instead of dividing zero by zero."""
    keys, values = tokens(16, 8, 24)
    x = torch.randn(5, 16, dtype=torch.float64)
    out = pattention(x, keys, values, 4.0)
    for scale in (1e-5, 1e3, 1e12):
        assert relative_error(pattention(x * scale, keys, values, 4.0), out) < 1e-12
    assert pattention(x * 1e-12, keys, values, 4.0).abs().max() < out.abs().max() * 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_tokens_share_one_normaliser(kind):
    """A layer may hold its tokens in several groups: join the normalisers, add the outputs."""
    keys, values = tokens(16, 8, 24)
    key_bias = torch.randn(24, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    groups = [slice(0, 10), slice(10, 24)]
    rectified, norms = [], []
    for group in groups:
        scores, scale = token_scores(x, keys[group], key_bias[group])
        rectified.append(rectify(scores, scale, kind))
        norms.append(normaliser(rectified[-1], kind))
    joined = torch.logaddexp(*norms) if kind == "softmax" else sum(norms)
    out = sum(weigh(scores, joined, 3.0, kind) @ values[group] for scores, group in zip(rectified, groups, strict=True))
    assert relative_error(out, pattention(x, keys, values, 3.0, kind, key_bias=key_bias)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind):
    keys, values = tokens(16, 8, 24, torch.float32)
    x = torch.randn(5, 16)
    expected = pattention(x, keys, values, 4.0, kind)
    compiled = torch.compile(lambda *args: pattention(*args, 4.0, kind), fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(x, keys, values), expected) < 1e-6


def test_an_unknown_kind_is_named():
    keys, values = tokens(4, 3, 6)
    with pytest.raises(ValueError, match=r"kind='l1' is not known; choose one of l2_gelu, gelu_l2, softmax"):
        pattention(torch.zeros(1, 4, dtype=torch.float64), keys, values, 1.0, "l1")
