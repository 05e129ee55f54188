"""The workshop of the experiments: runs described as data, trained once, shared where they have a past in common.

It measures time, memory and the circumstances with the tools of benchmarks/, which are found from here on.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
