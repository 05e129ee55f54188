"""Tokens in segments, each with a normaliser of its own, and rows that attend to some tokens only."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import ODD_SHAPES, relative_error
from test_pattention_forms import TOLERANCE, called, leaves, run, sizes
from tokenformer import KINDS, BadRequestError
from tokenformer.pattention import fused, pattention
from tokenformer.pattention.functional import default_tau, reference

SEGMENTS = (3, 3, 1, 4)
TAUS = torch.tensor([1.5, 2.0, 0.75, 3.0])


def in_segments(n, cuts):
    """Sizes that add up to n."""
    places = sorted({0, n, *(1 + cut % max(1, n - 1) for cut in cuts)})
    return tuple(b - a for a, b in pairwise(places))


def in_double(*arguments):
    """The same tensors as leaves in fp64."""
    return [tensor.detach().double().requires_grad_() for tensor in arguments]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_layers_that_are_added(kind, biased):
    inputs = leaves((2, 5), 6, 4, sum(SEGMENTS), torch.float64, biased=biased)
    x, keys, values, *biases = inputs
    key_bias, bias = biases or (None, None)
    apart, begin = torch.zeros(2, 5, 4, dtype=torch.float64) + (0 if bias is None else bias), 0
    for size, tau in zip(SEGMENTS, TAUS, strict=True):
        own = slice(begin, begin + size)
        own_key_bias = None if key_bias is None else key_bias[own]
        apart = apart + reference(x, keys[own], values[own], tau, kind, key_bias=own_key_bias)
        begin += size
    for form in ("reference", "fused"):
        together = called(pattention, inputs, TAUS, kind, form=form, segments=SEGMENTS)
        assert relative_error(together, apart) < 1e-12


@pytest.mark.parametrize("segments", [(), SEGMENTS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_computes_as_if_the_tokens_it_does_not_attend_to_were_not_there(kind, biased, segments):
    inputs = leaves((8,), 6, 4, sum(SEGMENTS), torch.float64, biased=biased)
    mask = torch.rand(8, sum(SEGMENTS)) < 0.6
    mask[0], mask[1], mask[2, :6] = True, False, False
    tau = TAUS if segments else 2.0
    together = [
        called(pattention, inputs, tau, kind, form=f, segments=segments, mask=mask) for f in ("fused", "reference")
    ]
    x, keys, values, *biases = inputs
    for row, seen in enumerate(mask):
        counts = [int(part.sum()) for part in seen.split(segments or len(seen))]
        if not any(counts):
            expected = biases[1] if biases else torch.zeros(4)
        else:
            own_tau = torch.stack([own for own, count in zip(TAUS, counts, strict=False) if count]) if segments else 2.0
            own = [x[row], keys[seen], values[seen], *([biases[0][seen], biases[1]] if biases else [])]
            expected = called(reference, own, own_tau, kind, segments=[c for c in counts if c] if segments else ())
        for out in together:
            assert (out[row] - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@given(
    **ODD_SHAPES,
    cuts=st.lists(st.integers(0, 40), max_size=4),
    dtype=st.sampled_from(list(TOLERANCE)),
    masked=st.booleans(),
    recompute=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_outputs_and_gradients_are_the_specifications(
    kind, shape, d_in, d_out, n, cuts, dtype, masked, recompute, biased, seed
):
    torch.manual_seed(seed)
    segments = in_segments(n, cuts)
    inputs = leaves(shape, d_in, d_out, n, dtype, biased=biased)
    grad = torch.randn(*shape, d_out, dtype=torch.float64)
    tau_dtype = torch.promote_types(dtype, torch.float32)
    tau = torch.tensor([default_tau(size, kind) for size in segments], dtype=tau_dtype)
    how = {"segments": segments, "mask": torch.rand(*shape, n) < 0.5 if masked else None}
    found = run(pattention, inputs, grad, tau, kind, form="fused", recompute=recompute, **how)
    exact = in_double(*inputs)
    expected = run(reference, exact, grad.to(dtype).double(), tau.double(), kind, **how)
    # Every segment is measured as if it were all there is: its rounding errors are those of a layer of its size.
    largest = [0.0] * len(found)
    for begin, size in zip([sum(segments[:i]) for i in range(len(segments))], segments, strict=True):
        own = [exact[0], *(each[begin : begin + size] for each in exact[1:3])]
        own += [exact[3][begin : begin + size], exact[4]] if biased else []
        for seen in each_subset(how["mask"], begin, size):
            if seen.any():
                part = [own[0], own[1][seen], own[2][seen], *([own[3][seen], own[4]] if biased else [])]
                scale = sizes(part, grad, default_tau(size, kind), kind)
                largest = [max(a, float(b)) for a, b in zip(largest, scale, strict=True)]
    for given_, true, size in zip(found, expected, largest, strict=True):
        assert given_.dtype == dtype
        true = true.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        assert (given_.double() - true).norm() <= len(segments) * TOLERANCE[dtype] * size + 1e-12


def each_subset(mask, begin, size):
    """Which of a segment's tokens rows attend to, each way once."""
    if mask is None:
        return torch.ones(1, size, dtype=torch.bool)
    return mask.reshape(-1, mask.shape[-1])[:, begin : begin + size].unique(dim=0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_taken_in_parts_and_frozen_tokens_held(kind, recompute, monkeypatch):
    monkeypatch.setattr(fused, "NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr(fused, "FEWEST_ROWS", 4)
    inputs = leaves((11,), 6, 5, sum(SEGMENTS), torch.float64, biased=True)
    grad = torch.randn(11, 5, dtype=torch.float64)
    inputs[0].data[5] *= 1e60  # its part is scaled, the others are not
    inputs[0].data[9] *= 1e-9
    how = {"frozen": 4, "segments": SEGMENTS, "mask": torch.rand(11, sum(SEGMENTS)) < 0.7}
    parts = run(pattention, inputs, grad, TAUS, kind, form="fused", recompute=recompute, **how)
    expected = run(pattention, inputs, grad, TAUS, kind, form="reference", **how)
    for given_, plain in zip(parts, expected, strict=True):
        assert relative_error(given_, plain) < 1e-12
    with torch.no_grad():
        alone = called(pattention, inputs, TAUS, kind, form="fused", segments=SEGMENTS, mask=how["mask"])
        assert relative_error(alone, expected[0]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [True, False])
def test_the_operator_passes_torchs_own_checks(kind, keep):
    inputs = leaves((7,), 6, 5, sum(SEGMENTS), biased=True)
    mask = torch.rand(7, sum(SEGMENTS)) < 0.7
    arguments = (*inputs, TAUS, kind, "fused", keep, 3, list(SEGMENTS), mask)
    torch.library.opcheck(torch.ops.tokenformer.pattention, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_one_graph_with_the_same_gradients(kind):
    inputs, grad = leaves((2, 5), 16, 8, sum(SEGMENTS), biased=True), torch.randn(2, 5, 8)
    how = {"segments": SEGMENTS, "mask": torch.rand(2, 1, sum(SEGMENTS)) < 0.7}
    expected = run(pattention, inputs, grad, TAUS, kind, **how)
    torch.compiler.reset()  # of one function only so many forms are compiled
    compiled = torch.compile(pattention, fullgraph=True, backend="aot_eager")
    for given_, plain in zip(run(compiled, inputs, grad, TAUS, kind, **how), expected, strict=True):
        assert relative_error(given_, plain) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_as_for_plain_products(kind, dtype):
    inputs, grad = leaves((6,), 16, 8, sum(SEGMENTS)), torch.randn(6, 8)
    how = {"segments": SEGMENTS, "mask": torch.rand(6, sum(SEGMENTS)) < 0.9}
    with torch.autocast("cpu", dtype=dtype):
        fast, plain = (run(pattention, inputs, grad, TAUS, kind, form=form, **how) for form in ("fused", "reference"))
    for given_, expected in zip(fast, plain, strict=True):
        assert given_.dtype == expected.dtype
        assert relative_error(given_, expected) < TOLERANCE[dtype]


def test_the_gradient_of_a_gradient():
    inputs = leaves((3,), 4, 3, sum(SEGMENTS), torch.float64)
    mask = torch.rand(3, sum(SEGMENTS)) < 0.7

    def form(*tensors):
        return pattention(*tensors, TAUS.double(), segments=SEGMENTS, mask=mask)

    assert torch.autograd.gradgradcheck(form, inputs)


def test_what_does_not_fit_is_refused():
    inputs = leaves((3,), 4, 3, sum(SEGMENTS))
    with pytest.raises(ValueError, match=r"segments=\[3, 4\] must be positive and add up to 11 tokens"):
        pattention(*inputs, TAUS, segments=(3, 4))
    with pytest.raises(ValueError, match="tau must be a tensor with 4 numbers, one for every segment"):
        pattention(*inputs, 2.0, segments=SEGMENTS)
    pytest.importorskip("triton")
    with pytest.raises(BadRequestError, match="was asked for kind='l2_gelu' with segments; it knows"):
        pattention(*inputs, TAUS, segments=SEGMENTS, form="triton")
