"""How much memory the loss of a language model needs, with logits and in chunks, each in a fresh process.

    python benchmarks/loss_memory.py [--tokens 2048] [--vocabulary 50304] [--width 256]

Leaves: the peak of resident memory over what was there before, forward and backward, for both.
"""

import argparse
import subprocess
import sys

SCRIPT = """
import resource, torch
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn({tokens}, {width}, requires_grad=True)
weight = (torch.randn({vocabulary}, {width}) * 0.02).requires_grad_()
labels = torch.randint(0, {vocabulary}, ({tokens},))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{loss}.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
LOSSES = {
    "with logits": "F.cross_entropy(F.linear(x, weight), labels)",
    "256 rows at a time": "F.linear_cross_entropy(x, weight, labels, "
    "options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256))",
}


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 2048), ("vocabulary", 50304), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    shape = vars(parser.parse_args())
    for name, loss in LOSSES.items():
        script = SCRIPT.format(loss=loss, **shape)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        print(f"{name}: {float(run.stdout):.0f} MB")


if __name__ == "__main__":
    main()
