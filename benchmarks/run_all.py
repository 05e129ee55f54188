"""Every benchmark that has a target, one after the other, each in a process of its own; then one table.

    make bench          (python benchmarks/run_all.py [--quick] [--repeats N] [--seed N] [--out FOLDER])

Leaves: benchmarks/results/*.json and the table: what, target, measured, met or missed. A missed target is said, and
is no error; a benchmark that could not run is.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from suite import add_arguments, table

SCRIPTS = (
    "pattention",
    "training_step",
    "vision",
    "long_context",
    "matmul_limit",
    "growth_step",
    "decoding",
    "linear_memory",
    "new_tokens",
    "joint_scores",
    "where_time_goes",
    "adoption",
    "token_groups",
    "top_k",
    "quantisation",
    "quantised_decoding",
    "serving",
)


def main() -> int:
    """Run all and print the table; the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    out = parser.parse_args().out
    figures, failed = [], []
    for name in SCRIPTS:
        began = time.perf_counter()
        print(f"{name}: running", flush=True)
        script = Path(__file__).with_name(f"{name}.py")
        if subprocess.run([sys.executable, str(script), *sys.argv[1:]], stdout=subprocess.DEVNULL).returncode:
            failed.append(name)
            continue
        figures += json.loads((out / f"{name}.json").read_text())["figures"]
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{table(figures)}")
    missed = sum(line["met"] is False for line in figures)
    print(f"\n{sum(line['met'] is True for line in figures)} targets met, {missed} missed")
    for name in failed:
        print(f"{name} could not run", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
