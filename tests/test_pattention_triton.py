"""The Triton kernels: right in the interpreter (triton_cases.py), compiled for GPUs, and their benchmark's dry run.

Each in a process of its own, as TRITON_INTERPRET is read when triton is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton exists for Linux only; install tokenformer[triton]")

ROOT = Path(__file__).parent.parent


def run_python(*arguments, interpreted, **environment):
    """Run Python in the repository; what it printed."""
    environment = {**os.environ, **environment, "TRITON_INTERPRET": "1" if interpreted else "0"}
    # The plugin of `pytest -n` would take the process for one of its own.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_in_the_interpreter():
    printed = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_cases.py", interpreted=True)
    assert " passed" in printed
    assert "skipped" not in printed


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from tokenformer.pattention import triton_device
from tokenformer.pattention.functional import SMALLEST_RMS
from tokenformer.pattention.triton_kernels import tile_sizes

TOKENS = {"x", "keys", "values", "grad", "out", "grad_x"}
NUMBERS = {"tau", "stats", "squares", "sums", "pulls"}
kernels = [(80, "sum_of_squares", "l2_gelu"), (80, "attend", "l2_gelu"), (80, "row_products", "l2_gelu")]
kernels += [(80, "row_gradient", "softmax"), (80, "key_gradient", "gelu_l2"), (80, "value_gradient", "l2_gelu")]
kernels += [(90, "attend", "softmax"), (90, "key_gradient", "gelu_l2")]
for architecture, name, kind in kernels:
    kernel = getattr(triton_device, name)
    tiles = tile_sizes(torch.bfloat16, forward=name in ("sum_of_squares", "attend"))
    known = dict(KIND=kind, FLOOR=SMALLEST_RMS, LARGEST=3e38, UPCAST=False)
    known |= dict(BLOCK_ROWS=tiles.rows, BLOCK_TOKENS=tiles.tokens, BLOCK_INNER=tiles.inner, BLOCK_OUTER=tiles.outer)
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    types = {"constexpr": known, "*bf16": TOKENS, "*fp32": NUMBERS}
    types = {arg: name for name, arguments in types.items() for arg in arguments}
    signature = {arg: types.get(arg, "i32") for arg in kernel.arg_names}
    others = {*known, "frozen"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg not in others}
    source = ASTSource(kernel, signature, known, attributes)
    options = {"num_warps": 8, "num_stages": tiles.stages}
    compiled = compile(source, GPUTarget("cuda", architecture, 32), options=options)
    print(architecture, name, kind, compiled.metadata.shared, compiled.asm["ptx"].count("mma"))
"""


def test_they_compile_for_gpus(tmp_path):
    """The interpreter takes programs that the compiler refuses. Compiling needs no GPU."""
    lines = run_python("-c", COMPILE, interpreted=False, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(lines) == 8
    for line in lines:
        *_, shared, products = line.split()
        assert int(shared) <= 163 * 1024, "more shared memory than an A100 has"
        assert int(products) > 0, "no tensor cores are used"


@pytest.mark.slow
def test_the_benchmark_runs_dry(tmp_path):
    printed = run_python("benchmarks/gpu.py", "--dry-run", "--dtypes", "bf16", "--out", tmp_path, interpreted=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert {"command", "seed", "hardware", "torch", "triton", "figures"} <= result.keys()
    assert result["dry_run"]
    assert {line["form"] for line in result["figures"]} == {"reference", "fused", "triton"}
    assert "triton" in printed


@pytest.mark.slow
def test_the_benchmark_says_that_it_needs_a_gpu():
    command = [sys.executable, "benchmarks/gpu.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    expected = "benchmarks/gpu.py: no CUDA device was found; run it where there is one, or try it with --dry-run"
    assert done.stderr.strip() == expected
