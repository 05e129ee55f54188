"""One Pattention layer, forward and backward: the library's choice, its plain twin and the authors' formula.

    python benchmarks/pattention.py [--quick] [--repeats N] [--out FOLDER]

Leaves: how much faster the library's choice is, and what share of the memory it keeps for the backward pass, at
several shapes; how fast a layer could be at best, if its six matrix products were all; and the same layer with other
numbers of rows at once; benchmarks/results/pattention.json.
"""

import math
import os
from collections.abc import Callable

import torch
from memory import kept_for_backward
from products import one_after_the_other, with_gradients
from suite import FORM, Figure, Options, figure, run
from timing import in_turns
from torch import Tensor
from torch.nn import functional as F

from tokenformer import Pattention
from tokenformer.pattention import fused

SHAPES = [(4096, 256, 256), (4096, 256, 1024), (4096, 768, 768), (4096, 768, 3072)]  # rows, width, tokens
QUICK_SHAPES = [(64, 16, 32)]
ROWS_AT_ONCE = [256, 512, 1024, 2048, 4096]


def authors_formula(x: Tensor, key_tokens: Tensor, value_tokens: Tensor) -> Tensor:
    """As the paper's authors compute it: every step an array of its own, and a mask of ones over the scores."""
    tau = math.sqrt(key_tokens.shape[0])
    scores = x @ key_tokens.T  # [rows, n]
    scores = scores * torch.ones(scores.shape, dtype=x.dtype, device=x.device)
    weights = F.gelu(scores / torch.norm(scores, p=2, dim=-1, keepdim=True) * tau)
    return F.dropout(weights, p=0.0) @ value_tokens


def in_form(form: str | None, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A forward pass with the form forced, or chosen by the library for None."""
    before = os.environ.pop(FORM, None)
    if form is not None:
        os.environ[FORM] = form
    try:
        return forward(x)
    finally:
        os.environ.pop(FORM, None)
        if before is not None:
            os.environ[FORM] = before


def forms(layer: Pattention, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The three forward passes of one layer, by name."""
    return {
        "automatic": lambda: in_form(None, layer, x),
        "reference": lambda: in_form("reference", layer, x),
        "authors": lambda: authors_formula(x, layer.key_tokens, layer.value_tokens),
    }


def steps(layer: Pattention, x: Tensor) -> dict[str, Callable[[], object]]:
    """Forward and backward of the three, by name."""
    gradient = torch.randn(*x.shape[:-1], layer.d_out)
    wanted = (x, layer.key_tokens, layer.value_tokens)
    return {
        name: lambda forward=forward: torch.autograd.grad(forward(), wanted, gradient)
        for name, forward in forms(layer, x).items()
    }


def measure(options: Options) -> list[Figure]:
    """Time and kept memory at every shape."""
    figures = []
    for rows, width, tokens in QUICK_SHAPES if options.quick else SHAPES:
        layer, x = Pattention(width, width, tokens), torch.randn(rows, width, requires_grad=True)
        outputs = {name: forward().detach() for name, forward in forms(layer, x).items()}
        for output in outputs.values():
            torch.testing.assert_close(output, outputs["authors"], rtol=1e-3, atol=1e-4)
        kept = {name: kept_for_backward(call, [x, *layer.parameters()]) for name, call in forms(layer, x).items()}
        products = with_gradients(x.detach(), layer.key_tokens.detach().T)
        products += with_gradients(torch.randn(rows, tokens), layer.value_tokens.detach())
        times = in_turns(steps(layer, x) | {"products": one_after_the_other(products)}, options.repeats)
        shape = {"rows": rows, "width": width, "tokens": tokens}
        at = f"rows {rows}, d {width}, n {tokens}"
        speed = {"shape": shape, "median_seconds": times.medians}
        figures += [
            figure(
                f"Pattention against the authors' formula, {at}: times as fast",
                times.speedup("automatic", over="authors"),
                at_least=1.4,
                **speed,
            ),
            figure(
                f"Pattention against its plain twin, {at}: times as fast",
                times.speedup("automatic", over="reference"),
                **speed,
            ),
            figure(
                f"Pattention's matrix products alone against the authors' formula, {at}: times as fast",
                times.speedup("products", over="authors"),
                **speed,
            ),
            figure(
                f"Pattention against the authors' formula, {at}: share of memory kept for backward",
                kept["automatic"] / kept["authors"],
                at_most=0.25,
                shape=shape,
                kept_bytes=kept,
                # The mask of ones is one of the authors' arrays.
                kept_arrays_of_scores={name: bytes_ / (4 * rows * tokens) for name, bytes_ in kept.items()},
            ),
        ]
        figures += other_parts(layer, x, at, options.repeats)
    return figures


def other_parts(layer: Pattention, x: Tensor, at: str, repeats: int) -> list[Figure]:
    """The layer with other numbers of rows at once, against all of them at once."""
    step, chosen = steps(layer, x)["automatic"], fused.NUMBERS_AT_ONCE

    def with_parts(rows: int) -> None:
        fused.NUMBERS_AT_ONCE = rows * layer.num_tokens
        step()

    try:
        times = in_turns({str(rows): lambda rows=rows: with_parts(rows) for rows in ROWS_AT_ONCE}, repeats)
    finally:
        fused.NUMBERS_AT_ONCE = chosen
    whole = str(ROWS_AT_ONCE[-1])
    return [
        figure(f"Pattention, {at}, {rows} rows at once against {whole}: times as fast", times.speedup(rows, over=whole))
        for rows in map(str, ROWS_AT_ONCE[:-1])
    ]


if __name__ == "__main__":
    run(measure, __doc__, repeats=11)
