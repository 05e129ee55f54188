"""What every script of `make bench` shares: its command line, its result file and its lines of the table.

A script defines `measure(options)`, which returns figures, and calls `run(measure, __doc__)`:

    python benchmarks/<name>.py [--quick] [--repeats N] [--processor-time] [--seed N] [--out FOLDER]

Leaves: FOLDER/<name>.json (benchmarks/results unless told) with the figures and what is needed to get them again.
"""

import argparse
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import Ratio, use_processor_time

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FORM = "TOKENFORMER_PATTENTION"

Figure = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What the command line says. `quick` is for tests: tiny shapes, whose figures mean nothing."""

    quick: bool
    repeats: int
    seed: int
    out: Path


def figure(
    what: str,
    measured: float | Ratio,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    aim: float | None = None,
    **details: Any,
) -> Figure:
    """One line of the table. A target is met or missed as printed, with two decimals."""
    spread = [measured.lower, measured.upper] if isinstance(measured, Ratio) else None
    value = measured.median if isinstance(measured, Ratio) else measured
    target, met = None, None
    if at_least is not None:
        target, met = f">= {at_least:g}", round(value, 2) >= at_least
    elif at_most is not None:
        target, met = f"<= {at_most:g}", round(value, 2) <= at_most
    return {"what": what, "measured": value, "spread": spread, "target": target, "aim": aim, "met": met, **details}


def table(figures: Iterable[Figure]) -> str:
    """What, target, measured, met or missed: a line a figure."""
    rows = [("what", "target", "measured", "")]
    for line in figures:
        target = line["target"] or "-"
        target += f", aim {line['aim']:g}" if line["aim"] else ""
        spread = " ({:.2f}..{:.2f})".format(*line["spread"]) if line["spread"] else ""
        verdict = {True: "met", False: "MISSED", None: ""}[line["met"]]
        rows.append((line["what"], target, f"{line['measured']:.2f}{spread}", verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    )


def run(
    measure: Callable[[Options], list[Figure]], doc: str | None, repeats: int = 7, argv: list[str] | None = None
) -> None:
    """Read the command line, measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add_arguments(parser)
    given = parser.parse_args(argv)
    if given.processor_time:
        use_processor_time()
    options = Options(given.quick, given.repeats or (2 if given.quick else repeats), given.seed, given.out)
    torch.manual_seed(options.seed)
    name = Path(inspect.getfile(measure)).stem
    command = ["python", f"benchmarks/{name}.py", *(sys.argv[1:] if argv is None else argv)]
    figures = measure(options)
    result = {"name": name, "command": " ".join(command), "repeats": options.repeats, "seed": options.seed}
    result |= {**circumstances(), "figures": figures}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(figures))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every script has."""
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--repeats", type=int, help="runs of each callable that is timed")
    parser.add_argument(
        "--processor-time", action="store_true", help="time the processor, not the wall: for one thread, among others"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")


def circumstances() -> dict[str, Any]:
    """The code and the machine."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "pattention": os.environ.get(FORM, "automatic"),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    # Result files change as the suite runs; the code that they came from does not.
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
