"""The Triton kernels against the specification, in Triton's interpreter: outputs, gradients, odd shapes, extreme rows.

    TRITON_INTERPRET=1 python -m pytest tests/triton_cases.py

Not collected by itself: the variable must be set before triton is imported, and most test modules import it (through
transformers). test_pattention_triton.py runs this file in a process of its own.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import relative_error
from tokenformer.errors import BadRequestError
from tokenformer.pattention import pattention, triton_kernels
from tokenformer.pattention.functional import reference

# fp32: sums of some dozen terms, a few ulps of 1.2e-7 each. 16 bits: inputs are exact, and weights, gradients of scores
# and results are rounded once each: two ulps (fp16 9.8e-4, bf16 7.8e-3) of the largest entry, and half an ulp.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
ALL = (True, True, True)
# Scores beyond fp32's range become infinite in the kernels and are clamped next; numpy, under the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
SHAPE = (19, 21, 40, 35)  # rows, n, d_in, d_out: with the tiles below two blocks of each, the second not full


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that make small shapes take several blocks in every direction."""
    tiles = triton_kernels.Tiles(16, 16, 32, 32, stages=2)
    monkeypatch.setattr(triton_kernels, "tile_sizes", lambda dtype, forward: tiles)


def draw(rows, n, d_in, d_out, dtype=torch.float32, key_std=0.3):
    """x, keys, values and the gradient of the output."""
    x, keys = torch.randn(rows, d_in), torch.randn(n, d_in) * key_std
    return [tensor.to(dtype) for tensor in (x, keys, torch.randn(n, d_out), torch.randn(rows, d_out))]


def run(x, keys, values, grad, tau, kind, frozen=0, needs=ALL):
    """The kernels' output and gradients."""
    tau = torch.tensor(tau)
    out, stats = triton_kernels.forward(x, keys, values, tau, kind)
    assert stats.shape == (x.shape[0], 3)
    assert stats.dtype == torch.float32
    return out, *triton_kernels.backward(grad, x, keys, values, tau, kind, stats, frozen, needs)


def specified(x, keys, values, grad, tau, kind):
    """The same by the specification and autograd, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, keys, values)]
    out = reference(*leaves, tau, kind)
    out.backward(grad.double())
    return out.detach(), *(leaf.grad for leaf in leaves)


def check(ours, theirs, tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert relative_error(mine, other) < tolerance


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_and_gradients(kind, dtype, small_tiles):
    given = draw(*SHAPE, dtype)
    ours = run(*given, 5.0, kind)
    assert all(tensor.dtype == dtype for tensor in ours)
    check(ours, specified(*given, 5.0, kind), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (3, 50, 5, 2), (2, 17, 33, 100), (33, 16, 2, 16), (17, 3, 65, 1)], ids=str
)
def test_odd_shapes(kind, shape, small_tiles):
    given = draw(*shape)
    theirs = specified(*given, 2.5, kind)
    ours = run(*given, 2.5, kind)
    # With one token the norm or the softmax takes the whole gradient away, and what is left is rounding: so errors are
    # measured against the entries that the gradients are summed from.
    size = max(tensor.double().abs().max() for tensor in (*given, *theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert (mine.double() - other).abs().max() < 4e-6 * size


@pytest.mark.parametrize(
    ("kind", "dtype", "widths"),
    [
        ("l2_gelu", torch.bfloat16, (768, 33)),
        ("gelu_l2", torch.float32, (33, 300)),
        ("softmax", torch.float16, (70, 1000)),
    ],
)
def test_real_tiles_at_widths_that_are_no_powers_of_two(kind, dtype, widths):
    given = draw(3, 70, *widths, dtype, key_std=0.05)
    check(run(*given, 8.0, kind), specified(*given, 8.0, kind), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
def test_no_rows(kind):
    out, *gradients = run(*draw(0, 5, 4, 3), 2.0, kind)
    assert out.shape == (0, 3)
    assert gradients[0].shape == (0, 4)
    assert gradients[1].eq(0).all()
    assert gradients[2].eq(0).all()


EXTREMES = {
    torch.float32: [0.0, 1e30, 1e-30, 1e-8],
    torch.float16: [0.0, 2e4, 6e-8, 1e-4],
    torch.bfloat16: [0.0, 1e30, 1e-30, 1e-8],
}


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_extreme_rows(kind, dtype):
    """Row by row, as one row's gradient can be 10³⁰ times another's."""
    x, keys, values, grad = draw(4, 24, 16, 8, dtype)
    x = (x.float().clamp(-3, 3) * torch.tensor(EXTREMES[dtype])[:, None]).to(dtype)
    largest = torch.finfo(dtype).max
    for row in range(4):
        given = x[row : row + 1], keys, values, grad[row : row + 1]
        ours, theirs = run(*given, 5.0, kind), specified(*given, 5.0, kind)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.isfinite().all()
            # The gradient of a tiny row saturates. One that has underflowed in the specification must be as small here.
            size = other.abs().max().clamp(torch.finfo(dtype).tiny, largest)
            assert (mine.double() - other.clamp(-largest, largest)).abs().max() <= 2 * TOLERANCE[dtype] * size


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_finite_at_the_end_of_the_range(kind, dtype):
    _, keys, values, grad = draw(2, 24, 16, 8, dtype, key_std=0.02)
    x = torch.full((2, 16), torch.finfo(dtype).max, dtype=dtype) * torch.tensor([[1], [-1]], dtype=dtype)
    assert all(tensor.isfinite().all() for tensor in run(x, keys, values, grad, 5.0, kind))


@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2"])
def test_a_floored_row_passes_no_gradient_through_the_norm(kind):
    """Keys so small that the floor holds: the layer is then linear in front of its GeLU."""
    x, keys, values, grad = draw(4, 24, 16, 8, key_std=1e-6)
    _, stats = triton_kernels.forward(x, keys, values, torch.tensor(5.0), kind)
    assert stats[:, 2].eq(0).all()
    given = x, keys, values, grad
    check(run(*given, 5.0, kind), specified(*given, 5.0, kind), TOLERANCE[torch.float32])


@pytest.mark.parametrize("frozen", [5, 21])
def test_frozen_tokens_get_zeros(frozen, small_tiles):
    given = draw(*SHAPE)
    ours, theirs = run(*given, 5.0, "l2_gelu", frozen), specified(*given, 5.0, "l2_gelu")
    for gradient in theirs[2:]:
        gradient[:frozen] = 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.double().sub(other).abs().max() <= TOLERANCE[torch.float32] * other.abs().max()


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_what_is_needed(needs):
    given = draw(3, 20, 8, 5)
    _, *ours = run(*given, 5.0, "l2_gelu", needs=needs)
    _, *theirs = specified(*given, 5.0, "l2_gelu")
    for need, mine, other in zip(needs, ours, theirs, strict=True):
        assert (mine is not None) == need
        assert mine is None or relative_error(mine, other) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
def test_every_buffer_is_written(kind, small_tiles, monkeypatch):
    """Memory comes full of NaN; whatever was not written would show."""
    given = draw(*SHAPE)
    poisoned = []
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poison(*args, _original=original, **options):
            poisoned.append(_original)
            return _original(*args, **options).fill_(float("nan"))

        monkeypatch.setattr(torch, name, poison)
    ours = run(*given, 5.0, kind, frozen=3)
    monkeypatch.undo()
    assert poisoned
    theirs = specified(*given, 5.0, kind)
    for gradient in theirs[2:]:
        gradient[:3] = 0
    check(ours, theirs, TOLERANCE[torch.float32])


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation gives back, in bytes: the interpreter copies arrays as bytes."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor):
                self.nbytes = max(self.nbytes, result.nbytes)
        return results


@pytest.mark.parametrize("kind", ["l2_gelu", "softmax"])
def test_no_array_of_rows_times_tokens(kind):
    given = draw(128, 256, 4, 6)
    with LargestTensor() as largest:
        run(*given, 5.0, kind)
    # Two parts of the values' gradient in fp32; an array of scores would take ten times as much.
    assert largest.nbytes == 2 * 256 * 6 * 4


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
def test_rows_in_fp32_over_tokens_in_16_bits(kind):
    """As under autocast: rows are cast after they are scaled."""
    x, keys, values, grad = draw(6, 24, 16, 8, torch.float16)
    x = x.float() * 1e6
    ours = run(x, keys, values, grad, 5.0, kind)
    assert [tensor.dtype for tensor in ours] == [torch.float16, torch.float32, torch.float16, torch.float16]
    theirs = specified(x, keys, values, grad, 5.0, kind)
    # Softmax is at its limit here: its gradients are zeros.
    compared = 1 if kind == "softmax" else 4
    check(ours[:compared], theirs[:compared], TOLERANCE[torch.float16])
    assert all(tensor.isfinite().all() for tensor in ours)


@pytest.mark.parametrize("kind", triton_kernels.TRITON_KINDS)
def test_through_the_public_function(kind):
    x, keys, values, grad = draw(6, 24, 16, 8)
    leaves = [tensor.clone().requires_grad_() for tensor in (x.view(2, 3, 16), keys.T.contiguous().T, values)]
    out = pattention(*leaves, 5.0, kind, form="triton")
    out.backward(grad.view(2, 3, 8))
    ours = out.view(6, 8), leaves[0].grad.view(6, 16), leaves[1].grad, leaves[2].grad
    check(ours, specified(x, keys, values, grad, 5.0, kind), TOLERANCE[torch.float32])


def test_it_is_available_and_refuses_other_dtypes():
    assert triton_kernels.available()
    with pytest.raises(BadRequestError, match="it takes fp32, fp16 or bf16"):
        run(*draw(2, 3, 4, 5, torch.float64), 5.0, "l2_gelu")
