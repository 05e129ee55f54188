"""Products of rows with small integers, which are never held as floating-point numbers all at once.

Enters: rows x [rows, d], and codes: int8 [n, d], or uint8 [n, (d + 1) / 2] with two integers from -7 to 7 in a byte,
the first half of a row in the lower four bits. Leaves: x · codesᵀ [rows, n] in fp32 or wider. Three forms:

    plain    a tile of codes at a time is cast and multiplied: the specification; everywhere, and in compiled code
    exact    every row as two rows of int8, 256 · larger + left, multiplied and added up in integers, on CPUs
    packed   torch's products of bf16 rows with packed integers, on CPUs, for few rows and without gradients: of int4,
             and of int8 where integers are clipped

`packed` rounds rows and results to bf16, which is 1 in 256. `exact` rounds a row to 1 in 65,000 of its largest entry.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .functional import wide

# So many codes are cast at a time: as fp32 they stay in the cache. What is not cast is multiplied in larger parts; of
# the largest matrices torch's product of integers would make a copy that does not stay there.
TILE = 2**18
UNCAST_TILE = 2**22
# The packed product reads codes once for every few rows, the exact one once for all. Measured in
# benchmarks/quantised_decoding.py.
FEW_ROWS = {torch.int8: 4, torch.uint8: 8}
# So many rows of int8 are multiplied one by one, by codes that the first has brought into the cache.
FEWEST_TOGETHER = 4
LARGEST = {torch.int8: 127, torch.uint8: 7}
# Sums of products of two int8 stay below 2³¹.
LONGEST_EXACT = 2**17
# A row's largest entry, as two numbers of int8 hold it.
FINEST = 127 * 256
# The packed product of int8 reads whole vectors: past the end of a row whose length is no multiple of this.
VECTOR = 16
# Of int4: so many rows of codes belong together, and what the lengths of groups of columns may be.
ROWS_OF_A_PACK = 16
GROUPS = (256, 128, 64, 32)


class Packed(NamedTuple):
    """Codes of four bits in the layout of this CPU; its scales, all of them 1; columns in a group."""

    codes: Tensor
    scales: Tensor
    group: int


def product(x: Tensor, codes: Tensor, packed: Packed | None = None, *, plain: bool = False) -> Tensor:
    """x · codesᵀ in the form that is fastest here, or in the `plain` one. Gradients go to x."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Product.apply(x, codes, plain)
    return _product(x, codes, packed, plain, rounded=True)


def _product(x: Tensor, codes: Tensor, packed: Packed | None, plain: bool, rounded: bool) -> Tensor:
    plain |= x.device.type != "cpu" or x.dtype == torch.float64 or torch.compiler.is_compiling()
    if plain or not x.numel() or not codes.numel():
        return plain_product(x, codes)
    few = rounded and x.shape[0] <= FEW_ROWS[codes.dtype]
    if few and packed is not None:
        rows = x.to(torch.bfloat16)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed.codes, packed.group, packed.scales).float()
    if can_be_exact(x):
        return exact_product(x, codes)
    if few and codes.dtype == torch.int8 and codes.shape[1] % VECTOR == 0:
        rows = x.to(torch.bfloat16)
        return torch.ops.aten._weight_int8pack_mm(rows, codes, rows.new_ones(len(codes))).float()
    return plain_product(x, codes)


def can_be_exact(x: Tensor) -> bool:
    """Whether this machine multiplies rows like these in integers without an error."""
    # torch misreads a matrix of one column that is transposed.
    return 1 < x.shape[-1] <= LONGEST_EXACT and integers_are_exact()


def plain_product(x: Tensor, codes: Tensor) -> Tensor:
    """The specification."""
    rows, columns = x.to(wide(x.dtype)), x.shape[1]
    return torch.cat([rows @ unpacked(tile, columns).to(rows.dtype).mT for tile in _tiles(codes)], dim=1)


def exact_product(x: Tensor, codes: Tensor) -> Tensor:
    """Two integer products in one."""
    both, unit = in_two(x.float())
    return of_two(both, codes).mul_(unit)


def in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., rows, d] of fp32 in int8 [..., 2 · rows, d]: what is left of each of them, then the larger parts.

    And the unit [..., rows, 1]: x = (256 · larger + left) · unit.
    """
    unit = x.abs().amax(-1, keepdim=True).div_(FINEST).clamp_(min=torch.finfo(torch.float32).tiny)
    # From -128 to 127 is left, so that the larger part is rounded to the nearest. The lower byte then has 128 too many.
    both = (x / unit).round_().to(torch.int16).add_(128).bitwise_xor_(128)
    halves = both.unsqueeze(-1).view(torch.int8).movedim(-1, -3)  # [..., 2, rows, d]
    return halves.reshape(*x.shape[:-2], -1, x.shape[-1]), unit


def of_two(both: Tensor, codes: Tensor) -> Tensor:
    """[2 · rows, d] and codes to [rows, n], in units of the rows."""
    # A single row is multiplied as it stands; for several the codes are brought into another order first.
    parts = both.split(1) if len(both) <= FEWEST_TOGETHER else (both,)
    sums = []
    for tile in _tiles(codes, UNCAST_TILE):
        numbers = unpacked(tile, both.shape[1]).mT
        of_parts = [torch._int_mm(part, numbers) for part in parts]
        sums.append(of_parts[0] if len(parts) == 1 else torch.cat(of_parts))
    left, larger = (sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)).float().chunk(2)
    return torch.add(left, larger, alpha=256)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, codes: Tensor, plain: bool) -> Tensor:
        return _product(x, codes, None, plain, rounded=False)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        x, codes, *_ = inputs
        ctx.save_for_backward(codes)
        ctx.shape, ctx.dtype = x.shape, x.dtype  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (codes,) = ctx.saved_tensors  # type: ignore[attr-defined]
        out, begin = grad.new_zeros(ctx.shape), 0  # type: ignore[attr-defined]
        for tile in _tiles(codes):
            numbers = unpacked(tile, out.shape[1]).to(grad.dtype)
            out = out + grad[:, begin : begin + len(tile)] @ numbers
            begin += len(tile)
        return out.to(ctx.dtype), None, None  # type: ignore[attr-defined]


def _tiles(codes: Tensor, uncast: int = TILE) -> tuple[Tensor, ...]:
    """Some rows of codes at a time, more of them where int8 stay as they are; all at once in an exported program."""
    if torch.compiler.is_exporting():
        return (codes,)
    size = uncast if codes.dtype == torch.int8 else TILE
    return codes.split(max(1, size // max(1, codes.shape[1])))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Integers from -7 to 7, int8 [n, d], two to a byte."""
    half = (codes.shape[1] + 1) // 2
    padded = F.pad(codes, (0, 2 * half - codes.shape[1]))
    low, high = (padded + 8).to(torch.uint8).split(half, dim=1)
    return low | (high << 4)


def unpacked(codes: Tensor, columns: int) -> Tensor:
    """The integers [n, columns] as int8."""
    if codes.dtype == torch.int8:
        return codes
    both = torch.cat([codes & 15, codes >> 4], dim=1).to(torch.int8) - 8
    return both[:, :columns]


def pack_for_cpu(codes: Tensor, columns: int) -> Packed | None:
    """Codes of four bits as this CPU's product wants them; None where it cannot take them."""
    group = next((size for size in GROUPS if columns % size == 0), None)
    unfit = codes.dtype != torch.uint8 or codes.device.type != "cpu" or len(codes) % ROWS_OF_A_PACK
    if group is None or unfit or not codes.numel():
        return None
    numbers = unpacked(codes, columns).int() + 8
    scales = torch.zeros(columns // group, len(codes), 2, dtype=torch.bfloat16)
    scales[..., 0] = 1
    return Packed(torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1), scales, group)


@cache
def integers_are_exact() -> bool:
    """Whether this machine's product of int8 is right for the largest numbers: CPUs without VNNI clip sums of two."""
    largest = torch.full((64, 256), 127, dtype=torch.int8)
    in_order = in_two(torch.ones(1, 2))[0].tolist() == [[0, 0], [127, 127]]  # the lower byte comes first
    return in_order and bool((of_two(largest[:4], largest) == 257 * 127 * 127 * 256).all())
