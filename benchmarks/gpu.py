"""One Pattention layer on a GPU, in its three forms: time of forward and of forward with backward, and peak memory.

    python benchmarks/gpu.py [--dtypes bf16 fp16 fp32] [--kinds l2_gelu] [--rows 8192] [--repeats N] [--out FOLDER]
    python benchmarks/gpu.py --dry-run      tiny shapes on the CPU, triton in its interpreter: does the script work?

Leaves: a table of times relative to `reference`, and FOLDER/gpu.json (benchmarks/results unless told) with every figure
and what is needed to get it again. A form that fails (out of memory, or refused by the GPU) is reported with its error.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRY = "--dry-run" in sys.argv[1:]
if DRY:
    # Read by triton when it is imported, which importing torch can do.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from suite import FORM, RESULTS, circumstances  # noqa: E402
from timing import Ratio  # noqa: E402

from tokenformer.pattention import default_tau, pattention  # noqa: E402

FORMS = ("reference", "fused", "triton")
KINDS = ("l2_gelu", "gelu_l2", "softmax")  # those that triton has
WIDTHS = (768, 1024, 1536, 2048)  # the paper's; n = d as in its attention, and 4d as in its FFN
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARMUP = 3


def main() -> None:
    """Measure every shape, print the table, write the file."""
    options = _options()
    if not (DRY or torch.cuda.is_available()):
        sys.exit("benchmarks/gpu.py: no CUDA device was found; run it where there is one, or try it with --dry-run")
    surroundings = {**circumstances(), **hardware()}
    torch.manual_seed(options.seed)
    shapes = [(5, 16, 20)] if DRY else [(options.rows, d, n) for d in WIDTHS for n in (d, 4 * d)]
    figures = []
    print(f"{'rows':>6}{'d':>6}{'n':>6}  dtype kind     form      forward ms  ratio   both ms  ratio   peak MB  ratio")
    for dtype in options.dtypes:
        for kind in options.kinds:
            for rows, width, tokens in shapes:
                lines = measure(rows, width, tokens, dtype, kind, options.repeats)
                print(*map(row, lines), sep="\n", flush=True)
                figures += lines
    result = {
        "name": "gpu",
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "dry_run": DRY,
        "repeats": options.repeats,
        "seed": options.seed,
        **surroundings,
        "figures": figures,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def measure(rows: int, width: int, tokens: int, dtype: str, kind: str, repeats: int) -> list[dict[str, Any]]:
    """A line for each form at one shape."""
    device = "cpu" if DRY else "cuda"

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * std).to(DTYPES[dtype]).requires_grad_()

    x, keys, values = draw(rows, width), draw(tokens, width, std=0.02), draw(tokens, width, std=tokens**-0.5)
    gradient = torch.randn(rows, width, device=device).to(x.dtype)
    tau = torch.tensor(default_tau(tokens, kind), device=device)

    def forward() -> torch.Tensor:
        return pattention(x, keys, values, tau, kind)

    def both() -> object:
        return torch.autograd.grad(forward(), (x, keys, values), gradient)

    errors = {form: _first_run(form, both) for form in FORMS}
    working = [form for form in FORMS if errors[form] is None]
    times = {name: _in_turns(call, working, repeats) for name, call in (("forward", forward), ("both", both))}
    memory = {form: _peak(form, both) for form in working}
    lines = []
    for form in FORMS:
        line: dict[str, Any] = {"rows": rows, "width": width, "tokens": tokens, "dtype": dtype, "kind": kind}
        line |= {"form": form, "error": errors[form]}
        if form in working:
            line |= {f"{name}_ms": statistics.median(runs[form]) for name, runs in times.items()}
            line["peak_bytes"] = memory[form]
        if form in working and "reference" in working:
            for name, runs in times.items():
                ratio = Ratio.of([mine / other for mine, other in zip(runs[form], runs["reference"], strict=True)])
                line[f"{name}_ratio"] = [ratio.lower, ratio.median, ratio.upper]
            line["peak_ratio"] = memory[form] / memory["reference"] if memory["reference"] else None
        lines.append(line)
    return lines


def row(line: dict[str, Any]) -> str:
    """A line of the table. Ratios are to the reference form: below 1 is faster, or smaller."""
    text = f"{line['rows']:6}{line['width']:6}{line['tokens']:6}  {line['dtype']:5} {line['kind']:8} {line['form']:9}"
    if line["error"]:
        return f"{text} {line['error']}"
    for name in ("forward", "both"):
        ratio = line.get(f"{name}_ratio")
        text += f"{line[f'{name}_ms']:10.3f}" + (f"{ratio[1]:8.2f}" if ratio else " " * 8)
    ratio = line.get("peak_ratio")
    return text + f"{line['peak_bytes'] / 2**20:10.1f}" + (f"{ratio:8.2f}" if ratio else "")


def hardware() -> dict[str, Any]:
    """The GPU and what drives it."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    if DRY:
        return {"hardware": "none: dry run on the CPU", "triton": version}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "hardware": gpu.name,
        "processors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "triton": version,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, whose figures mean nothing")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["l2_gelu"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2 if DRY else 20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    return parser.parse_args()


def _first_run(form: str, call: Callable[[], object]) -> str | None:
    """Compile and warm up; the first line of the error if there was one. One form's failure must not end the others."""
    os.environ[FORM] = form
    try:
        for _ in range(1 if DRY else WARMUP):
            call()
        if not DRY:
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _in_turns(call: Callable[[], object], forms: list[str], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run, forms in turn, so that a clock that slows down slows all of them."""
    runs: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(repeats):
        for form in forms:
            os.environ[FORM] = form
            runs[form].append(_milliseconds(call))
    return runs


def _milliseconds(call: Callable[[], object]) -> float:
    if DRY:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _peak(form: str, call: Callable[[], object]) -> int:
    """Bytes above what was there before, at the worst moment of forward and backward; 0 on a CPU."""
    if DRY:
        return 0
    os.environ[FORM] = form
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
