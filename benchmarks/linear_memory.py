"""How the memory of one Pattention layer rises with its tokens n and with the rows it is given.

    python benchmarks/linear_memory.py [--quick] [--repeats N] [--out FOLDER]

Leaves: a line fitted to the bytes kept for backward and to the peak of resident memory of forward and backward, with
its slope in bytes a row and token, R² and the largest residual (linear means under 5 %);
benchmarks/results/linear_memory.json.
"""

import statistics
from functools import partial

import torch
from memory import RETURN_FREED_MEMORY, in_fresh_process, kept_for_backward, peak_of
from suite import Figure, Options, figure, run
from torch import Tensor

from tokenformer import Pattention

WIDTH, ROWS, TOKENS = 256, 4096, 1024
# From where the layer's own arrays outweigh what it holds of a part of the rows at a time.
SWEEP_TOKENS = [1024, 1536, 2048, 3072, 4096, 6144]
SWEEP_ROWS = [4096, 6144, 8192, 10240, 12288, 16384]
QUICK_SWEEP = [256, 512, 768, 1024, 1280]


def step_of(layer: Pattention, x: Tensor) -> None:
    """Forward and backward; the gradients stay, as they do until the optimizer has used them."""
    layer(x).square().mean().backward()


def measure_all(points: list[tuple[int, int]], seed: int) -> list[tuple[int, int]]:
    """Bytes kept and peak of resident memory at every (rows, tokens)."""
    torch.manual_seed(seed)
    # What a first step loads is not the layer's memory.
    step_of(Pattention(WIDTH, WIDTH, 16), torch.randn(16, WIDTH, requires_grad=True))
    return [measure_one(rows, tokens) for rows, tokens in points]


def measure_one(rows: int, tokens: int) -> tuple[int, int]:
    """Bytes kept and peak of resident memory, over the layer and its input."""
    layer, x = Pattention(WIDTH, WIDTH, tokens), torch.randn(rows, WIDTH, requires_grad=True)
    kept = kept_for_backward(lambda: layer(x), [x, *layer.parameters()])
    _, peak = peak_of(lambda: lambda: step_of(layer, x))
    return kept, peak


def line(at: list[int], measured: list[float]) -> dict[str, float]:
    """A straight line by least squares, and how well it fits."""
    slope, intercept = statistics.linear_regression(at, measured)
    residual = max(abs(slope * x + intercept - y) / y for x, y in zip(at, measured, strict=True))
    r2 = statistics.correlation(at, measured) ** 2
    return {"slope": slope, "intercept": intercept, "r2": r2, "largest_residual": residual}


def measure(options: Options) -> list[Figure]:
    """One sweep over tokens, one over rows."""
    tokens, rows = (QUICK_SWEEP, QUICK_SWEEP) if options.quick else (SWEEP_TOKENS, SWEEP_ROWS)
    fixed_rows, fixed_tokens = (512, 512) if options.quick else (ROWS, TOKENS)
    sweeps = {
        "n": (tokens, [(fixed_rows, n) for n in tokens], fixed_rows, f"{fixed_rows} rows"),
        "rows": (rows, [(r, fixed_tokens) for r in rows], fixed_tokens, f"n {fixed_tokens}"),
    }
    points = [point for _, sweep, _, _ in sweeps.values() for point in sweep]
    alone = partial(in_fresh_process, measure_all, variables=RETURN_FREED_MEMORY)
    of_point = dict(zip(points, (measure_all if options.quick else alone)(points, options.seed), strict=True))
    figures = []
    for name, (at, sweep, other, fixed) in sweeps.items():
        measured = [of_point[point] for point in sweep]
        for what, values in zip(("kept for backward", "peak"), zip(*measured, strict=True), strict=True):
            fit = line(at, values)
            details = {"at": at, "bytes": values, "fit": fit, "shape": {"width": WIDTH, "fixed": fixed}}
            memory = f"memory {what} against {name} ({fixed}, d {WIDTH})"
            figures += [
                # Per row and token: 4 is one array of [rows, n] in fp32.
                figure(f"{memory}: slope, bytes a row and token", fit["slope"] / other, **details),
                figure(f"{memory}: R²", fit["r2"], **details),
                figure(f"{memory}: largest residual", fit["largest_residual"], at_most=0.05, **details),
            ]
    return figures


if __name__ == "__main__":
    run(measure, __doc__)
