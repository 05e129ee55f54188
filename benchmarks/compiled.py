"""What torch.compile would make of Pattention's plain form, against the fused form, which is not compiled.

    python benchmarks/compiled.py [--quick] [--repeats N] [--out FOLDER]

Needs a C++ compiler; not part of `make bench`. Leaves: how many times as fast the compiled plain form is, and what its
first step costs, without and with Inductor's cache; benchmarks/results/compiled.json.
"""

import os
import subprocess
import sys
import tempfile

import torch
from pattention import steps
from suite import Figure, Options, figure, run
from timing import in_turns, seconds

from tokenformer import Pattention
from tokenformer.pattention.functional import reference

SHAPES = [(4096, 256, 1024), (4096, 768, 768)]  # rows, width, tokens
QUICK_SHAPES = [(64, 16, 32)]
FIRST_STEP = "from compiled import first_step; print(first_step())"


def compiled_step(layer: Pattention, x: torch.Tensor) -> object:
    """Forward and backward of the plain form, compiled when first called."""
    compiled = torch.compile(reference, dynamic=False)
    wanted, gradient = (x, layer.key_tokens, layer.value_tokens), torch.randn(*x.shape[:-1], layer.d_out)
    return lambda: torch.autograd.grad(compiled(*wanted, layer.tau, layer.kind), wanted, gradient)


def first_step() -> float:
    """Seconds of the first step of a process."""
    return seconds(compiled_step(Pattention(64, 64, 64), torch.randn(64, 64, requires_grad=True)))


def measure(options: Options) -> list[Figure]:
    """Steps in turns, and first steps in fresh processes that share a cache."""
    figures = []
    for rows, width, tokens in QUICK_SHAPES if options.quick else SHAPES:
        layer, x = Pattention(width, width, tokens), torch.randn(rows, width, requires_grad=True)
        work = {"fused": steps(layer, x)["automatic"], "compiled": compiled_step(layer, x)}
        times = in_turns(work, options.repeats)
        figures.append(
            figure(
                f"plain form compiled, rows {rows}, d {width}, n {tokens}, against fused: times as fast",
                times.speedup("compiled", over="fused"),
                median_seconds=times.medians,
            )
        )
    with tempfile.TemporaryDirectory() as cache:
        for which in ("empty", "filled"):
            command, environment = [sys.executable, "-c", FIRST_STEP], os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            folder = os.path.dirname(__file__)
            out = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=True
            ).stdout
            figures.append(figure(f"first step, compiled, {which} cache: seconds", float(out)))
    return figures


if __name__ == "__main__":
    run(measure, __doc__, repeats=11)
