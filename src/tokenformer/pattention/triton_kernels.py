"""Pattention on a GPU as Triton kernels that stream over parameter tokens: no [rows, n] array is ever in memory.

Enters: rows x [rows, d_in], key tokens [n, d_in], value tokens [n, d_out] in fp32, fp16 or bf16, tau (fp32, 0-dim).
Leaves: the output [rows, d_out] in the tokens' dtype, stats [rows, 3] fp32 for backward, and the gradients.
Tested in Triton's interpreter only (TRITON_INTERPRET=1); compiled for sm_80 and sm_90, not yet run or timed on a GPU.

    TRITON_INTERPRET=1 python -m pytest tests/triton_cases.py

stats: the power of two the row was divided by; 1 / rms of its scores (softmax: their logsumexp); how strongly the
normaliser pulls at the gradient: 1 / tau² (softmax: 1), or 0 where SMALLEST_RMS took the norm's place.

The cost. One unit is 2·n·d FLOPs per row: one product of the rows with all keys or all values (d_in = d_out = d). What
is accumulated, [rows, d], does not fit in registers, so it is cut into R = ⌈d / tile⌉ tiles over the grid, and each
tile computes the scores (in backward: and grad · Vᵀ) again. These kernels save memory; time at small R, if at all.

    forward     l2_gelu 2 + R, others 1 + R                               plain torch 2
    backward    products 2, x 1 + 2R, keys 1 + 2R, values 1 + R: 5 + 5R    plain torch 4, with [rows, n] arrays kept
    d = 768, bf16, R = 3: forward 5, backward 20. d = 256, R = 1: forward 3, backward 10.

l2_gelu needs its norm before the GeLU, so forward takes one more pass over the tokens: 2nd per row. By the Gram
matrix, ‖K·x‖² = xᵀ(KᵀK)x, it would be 2d² per row and 2nd² once: nothing saved at n = d, and at n = 4d three quarters
of one unit of five (d = 768). But its rounding error is relative to ‖x‖²‖K‖², not to ‖K·x‖²: with the Gram matrix
in bf16, a row whose scores are 1/16 of what its length allows loses eight bits, all there are. So: a pass.

Backward needs the row's sum of (normalised score · its gradient) first. For gelu_l2 and softmax that is grad · out,
but to keep `out` costs memory and to compute it again 1 + R; the pass `row_products` costs 2, for every kind.

Tiles. 16 bits: [64 rows, 64 tokens] of scores and 256 columns, the inner dimension in steps of 64, 8 warps. A thread
holds 64 · 256 / 256 = 64 registers of what is accumulated and 16 of scores (32 in backward: and their gradients).
Shared memory holds 2 · (64 + 64) · 64 · 2 B = 32 kB of x and keys forward, and what passes through it of a [64, 256]
block of values (32 kB), of 164 kB (A100) or 228 kB (H100). fp32 (no tensor cores, "ieee"): 64, 32, 128, steps of 32.
Compiled by Triton 3.9 in bf16: at most 219 registers forward and 255 backward, spills of no more than 24 B, and at most
40 kB of shared memory for sm_80, 64 kB for sm_90. Sizes and stages were chosen by that, not by time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..errors import BadRequestError
from . import triton_device as device
from .functional import SMALLEST_RMS, row_scale

INTERPRETED: bool = triton.knobs.runtime.interpret
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_KINDS = ("l2_gelu", "gelu_l2", "softmax")

# Sums over tokens (a row's) or over rows (a token's) are split until this many programs run, and the parts added up
# by torch: always in the same order, unlike atomics. Two for each of an A100's 108 processors.
WANTED_PROGRAMS = 216


class Tiles(NamedTuple):
    """Block sizes of one launch. The smallest size of a matrix product is 16."""

    rows: int
    tokens: int
    inner: int
    outer: int
    stages: int


def tile_sizes(dtype: torch.dtype, forward: bool) -> Tiles:
    """The block sizes that the docstring accounts for. Backward is at the limit of registers: it has a stage less."""
    stages = 3 if forward else 2
    return Tiles(64, 32, 32, 128, stages) if dtype == torch.float32 else Tiles(64, 64, 64, 256, stages)


def available() -> bool:
    """Can the kernels run here: on a GPU, or in the interpreter?"""
    return INTERPRETED or torch.cuda.is_available()


def forward(x: Tensor, key_tokens: Tensor, value_tokens: Tensor, tau: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The output [rows, d_out] and stats [rows, 3]."""
    x, key_tokens, value_tokens = _ready(x, key_tokens, value_tokens)
    sizes = num_rows, num_tokens, d_in, d_out = *x.shape[:1], *key_tokens.shape, value_tokens.shape[1]
    out = torch.empty(num_rows, d_out, dtype=value_tokens.dtype, device=x.device)
    stats = torch.empty(num_rows, 3, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, stats
    stats[:, :1] = row_scale(x)
    tiles = tile_sizes(key_tokens.dtype, forward=True)
    row_blocks = triton.cdiv(num_rows, tiles.rows)
    squares = stats  # is read for l2_gelu only
    if kind == "l2_gelu":
        splits, tokens_a_split = _split(num_tokens, tiles.tokens, row_blocks)
        sums = torch.empty(splits, num_rows, dtype=torch.float32, device=x.device)
        _launch(
            device.sum_of_squares, (row_blocks, splits),
            x, key_tokens, stats, sums, num_rows, num_tokens, d_in, tokens_a_split, **_options(tiles),
        )  # fmt: skip
        squares = sums.sum(0)
    outer = _outer(tiles, d_out)
    _launch(
        device.attend, (row_blocks, triton.cdiv(d_out, outer)),
        x, key_tokens, value_tokens, tau, stats, squares, out, *sizes,
        KIND=kind, FLOOR=SMALLEST_RMS, BLOCK_OUTER=outer, **_options(tiles),
    )  # fmt: skip
    return out, stats


def backward(
    grad: Tensor,
    x: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    tau: Tensor,
    kind: str,
    stats: Tensor,
    frozen: int,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, keys and values, each if `needs` says so; the first `frozen` tokens get zeros at no cost."""
    x, key_tokens, value_tokens = _ready(x, key_tokens, value_tokens)
    grad = grad.to(value_tokens.dtype).contiguous()
    sizes = num_rows, num_tokens, d_in, _ = *x.shape[:1], *key_tokens.shape, value_tokens.shape[1]
    if num_rows == 0:
        grad_x, grad_keys, grad_values = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((x, key_tokens, value_tokens), needs, strict=True)
        )
        return grad_x, grad_keys, grad_values
    grad_x = grad_keys = grad_values = None
    tiles = tile_sizes(key_tokens.dtype, forward=False)
    row_blocks = triton.cdiv(num_rows, tiles.rows)
    options = {"KIND": kind, **_options(tiles)}
    if needs[0] or needs[1]:
        splits, tokens_a_split = _split(num_tokens, tiles.tokens, row_blocks)
        sums = torch.empty(splits, num_rows, dtype=torch.float32, device=x.device)
        _launch(
            device.row_products, (row_blocks, splits),
            grad, x, key_tokens, value_tokens, stats, sums, *sizes, tokens_a_split, **options,
        )  # fmt: skip
        pulls = sums.sum(0) * stats[:, 2]  # [rows]
        inputs: tuple[Tensor, ...] = (grad, x, key_tokens, value_tokens, tau, stats, pulls)
        if needs[0]:
            grad_x = torch.empty_like(x)
            outer = _outer(tiles, d_in)
            largest = torch.finfo(x.dtype).max
            _launch(
                device.row_gradient, (row_blocks, triton.cdiv(d_in, outer)),
                *inputs, grad_x, *sizes, LARGEST=largest, BLOCK_OUTER=outer, **options,
            )  # fmt: skip
        if needs[1]:
            grad_keys = _token_gradient(device.key_gradient, inputs, key_tokens, sizes, frozen, tiles, options)
    if needs[2]:
        inputs = (grad, x, key_tokens, tau, stats)
        grad_values = _token_gradient(device.value_gradient, inputs, value_tokens, sizes, frozen, tiles, options)
    return grad_x, grad_keys, grad_values


def _token_gradient(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    tokens: Tensor,
    sizes: tuple[int, ...],
    frozen: int,
    tiles: Tiles,
    options: dict[str, Any],
) -> Tensor:
    """A gradient of the shape of `tokens`, summed over splits of the rows."""
    (num_tokens, width), num_rows = tokens.shape, sizes[0]
    gradient = torch.empty_like(tokens)
    gradient[:frozen] = 0
    trained = num_tokens - frozen
    if trained > 0:
        outer = _outer(tiles, width)
        grid = triton.cdiv(trained, tiles.tokens), triton.cdiv(width, outer)
        splits, rows_a_split = _split(num_rows, tiles.rows, grid[0] * grid[1])
        sums = torch.empty(splits, trained, width, dtype=torch.float32, device=tokens.device)
        _launch(kernel, (*grid, splits), *inputs, sums, *sizes, frozen, rows_a_split, BLOCK_OUTER=outer, **options)
        gradient[frozen:] = sums.sum(0)
    return gradient


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Triton launches on the current device; the tensors may be on another."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)


def _split(length: int, block: int, programs: int) -> tuple[int, int]:
    """Into how many parts a sum over `length` is cut so that enough programs run, and the length of a part."""
    blocks = triton.cdiv(length, block)
    wanted = min(blocks, triton.cdiv(WANTED_PROGRAMS, programs))
    blocks_per_part = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, blocks_per_part), blocks_per_part * block


def _outer(tiles: Tiles, width: int) -> int:
    """The columns a program accumulates: fewer than the tile's if there are fewer."""
    return min(tiles.outer, max(16, triton.next_power_of_2(width)))


def _options(tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_TOKENS": tiles.tokens,
        "BLOCK_INNER": tiles.inner,
        # The interpreter's product of two bf16 blocks is wrong.
        "UPCAST": INTERPRETED,
        "num_warps": 8,
        "num_stages": tiles.stages,
    }


def _ready(x: Tensor, key_tokens: Tensor, value_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three, contiguous; an error if the kernels cannot take them."""
    given = [tensor.dtype for tensor in (x, key_tokens, value_tokens)]
    if key_tokens.dtype != value_tokens.dtype or not all(dtype in DTYPES for dtype in given):
        raise BadRequestError(
            f"the triton form was given dtypes {', '.join(map(str, given))}; it takes fp32, fp16 or bf16, one for both "
            "keys and values; cast them, or choose the form reference"
        )
    if not (INTERPRETED or x.is_cuda):
        raise BadRequestError(
            f"the triton form was given tensors on {x.device}; it runs on a CUDA device, or anywhere if "
            "TRITON_INTERPRET=1 is set before the start; move them, or choose the form fused"
        )
    return x.contiguous(), key_tokens.contiguous(), value_tokens.contiguous()
