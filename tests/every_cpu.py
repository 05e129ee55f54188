"""The numeric tests and the golden curves under every setting that makes one CPU compute as another would.

    make test-cpu        (about 15 minutes on 2 cores)

Not a test itself: it runs pytest once a setting, goes on after a failure, and ends with a table. torch chooses its own
kernels by ATEN_CPU_CAPABILITY, oneDNN by ONEDNN_MAX_CPU_ISA, MKL by MKL_CBWR; conftest.py reads TOKENFORMER_TEST_CPU.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = {
    "as it is": {},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "without oneDNN": {"TOKENFORMER_TEST_CPU": "no_onednn"},
    "MKL for any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "denormals flushed to zero": {"TOKENFORMER_TEST_CPU": "flush_denormals"},
}
CHOOSING = {name for variables in SETTINGS.values() for name in variables}
TESTS = (
    *("pattention", "pattention_forms", "pattention_module", "replace_linears", "nn", "presets"),
    *("growth", "growth_depth", "growth_optimizer", "vision_growth", "golden_losses", "language_model", "vision_model"),
    *("adoption", "adoption_saved", "official", "augment", "training_average"),
)


def main() -> int:
    """Run them all; the exit code says whether every setting passed."""
    here, results = Path(__file__).parent, {}
    paths = [str(here / f"test_{name}.py") for name in TESTS]
    for name, variables in SETTINGS.items():
        print(f"== {name} {variables or ''}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *paths]
        with tempfile.TemporaryDirectory() as cache:  # what was compiled for one setting does not fit another
            inherited = {name: value for name, value in os.environ.items() if name not in CHOOSING}
            environment = {**inherited, **variables, "TORCHINDUCTOR_CACHE_DIR": cache}
            results[name] = subprocess.run(command, env=environment, cwd=here.parent).returncode
    for name, code in results.items():
        print(f"{'failed' if code else 'passed':8} {name}")
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main())
