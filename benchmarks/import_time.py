"""How long `import tokenformer` takes beyond torch and transformers, in fresh processes, in turns.

    python benchmarks/import_time.py [--repeats 5]

Leaves: the median seconds of each import and their difference. The promise is less than 3 s.
"""

import argparse
import statistics
import subprocess
import sys

# transformers loads its parts on first use; the model classes of ours are some of those parts.
TIMED = "import time, torch, transformers; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
BARE = TIMED.format("from transformers import PreTrainedModel, AutoModelForCausalLM")
OURS = TIMED.format("import tokenformer")


def seconds(code: str) -> float:
    """What one fresh process says it took."""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Alternate the two imports and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times = [(seconds(BARE), seconds(OURS)) for _ in range(repeats)]
    bare, ours = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"after torch and transformers: their model classes {bare:.2f} s, tokenformer {ours:.2f} s")


if __name__ == "__main__":
    main()
