"""The scores of query, key and value by one matrix product against three, bare.

    python benchmarks/joint_scores.py [--quick] [--repeats N] [--out FOLDER]

All three read the same rows, so that one product over 3n key tokens gives the same numbers. Leaves: how much faster
one product is, forward and backward, with the tokens stored together and when they have to be joined at every step;
for training (4096 rows) and decoding (1 row); benchmarks/results/joint_scores.json.
"""

from collections.abc import Callable

import torch
from suite import Figure, Options, figure, run
from timing import in_turns

SHAPES = [(4096, 256), (4096, 768), (1, 256), (1, 768)]  # rows, width and tokens of each
QUICK_SHAPES = [(16, 8), (1, 8)]
FEW_ROWS_RUNS = 200  # a product of one row is too short for the clock


def products(rows: int, width: int) -> dict[str, Callable[[], object]]:
    """Forward and, with more rows than one, backward, into arrays that are there before."""
    x = torch.randn(rows, width)
    keys = [torch.randn(width, width) for _ in "qkv"]
    joined = torch.cat(keys)  # [3n, d]
    scores, joint_scores = [torch.randn(rows, width) for _ in "qkv"], torch.randn(rows, 3 * width)
    grad_x = torch.empty(rows, width)
    grad_keys, grad_joined = [torch.empty(width, width) for _ in "qkv"], torch.empty(3 * width, width)
    gradients, joint_gradients = [torch.randn(rows, width) for _ in "qkv"], torch.randn(rows, 3 * width)
    train = rows > 1

    def three() -> None:
        for key, out in zip(keys, scores, strict=True):
            torch.mm(x, key.T, out=out)
        if train:
            torch.mm(gradients[0], keys[0], out=grad_x)
            for gradient, key in zip(gradients[1:], keys[1:], strict=True):
                grad_x.addmm_(gradient, key)
            for gradient, out in zip(gradients, grad_keys, strict=True):
                torch.mm(gradient.T, x, out=out)

    def one() -> None:
        torch.mm(x, joined.T, out=joint_scores)
        if train:
            torch.mm(joint_gradients, joined, out=grad_x)
            torch.mm(joint_gradients.T, x, out=grad_joined)

    def join_and_one() -> None:
        torch.cat(keys, out=joined)
        one()

    return {"three": three, "one": one, "join, one": join_and_one}


def many(call: Callable[[], object], runs: int) -> Callable[[], None]:
    """The call, `runs` times."""

    def work() -> None:
        for _ in range(runs):
            call()

    return work


def measure(options: Options) -> list[Figure]:
    """One against three at every shape."""
    figures = []
    for rows, width in QUICK_SHAPES if options.quick else SHAPES:
        runs = FEW_ROWS_RUNS if rows == 1 else 1
        times = in_turns({k: many(call, runs) for k, call in products(rows, width).items()}, options.repeats)
        details = {"shape": {"rows": rows, "width": width, "tokens": width}, "runs": runs}
        details["median_seconds"] = times.medians
        direction = "forward" if rows == 1 else "forward and backward"
        at = f"q, k, v scores in one matmul, rows {rows}, d {width}, {direction}"
        figures += [
            figure(f"{at}: times as fast as three", times.speedup("one", over="three"), **details),
            figure(f"{at}, tokens joined first: times as fast", times.speedup("join, one", over="three"), **details),
        ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=15)
