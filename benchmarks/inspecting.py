"""The page of what tokens do in a text: how large it is, how long it takes, and how soon a live one answers.

    make demo && python benchmarks/inspecting.py [--quick] [--repeats N] [--out FOLDER]

Enters: the run that `make demo` leaves in runs/demo, and 3,200 bytes of Python's argparse.py.
Leaves: the size of the page and its cards, the seconds it takes to make, and the seconds of a live answer, in which two
tokens of the last stage are switched; benchmarks/results/inspecting.json. A time is of the machine it was taken on.
"""

import argparse as a_text
import statistics
import sys
import tempfile
import time
from pathlib import Path

from suite import ROOT, Figure, Options, figure, run

from tokenformer import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer.inspecting import load_inspection, write_inspection
from tokenformer.inspecting.live import Live

MODEL = ROOT / "runs" / "demo" / "stage-3" / "model"
FIRST, LENGTH, CONTEXT = 2000, 3200, 200
MEGABYTE = 2**20


def measure(options: Options) -> list[Figure]:
    """Of the page, then of the live answers."""
    with tempfile.TemporaryDirectory() as folder:
        model, length = MODEL, LENGTH
        if options.quick:
            model, length = Path(folder) / "model", 64
            TokenFormerForCausalLM(TokenFormerConfig.preset("tiny")).save_pretrained(model)
        elif not MODEL.exists():
            sys.exit(f"{MODEL} does not exist; run make demo")
        text = Path(a_text.__file__).read_bytes()[FIRST : FIRST + length]
        began = time.perf_counter()
        inspection = load_inspection(model, prompt=text)
        written = write_inspection(inspection, Path(folder) / "page.html")
        seconds = time.perf_counter() - began
    live, ids = Live(inspection), list(text[: min(CONTEXT, length // 2)])
    live.answer(ids, [], [])  # of the model as it is, which is kept
    answers = []
    for i in range(options.repeats):
        began = time.perf_counter()
        live.answer(ids, [(4, 3, None), (9, 5, 2.0 + i / 10)], [])
        answers.append(time.perf_counter() - began)
    return [
        figure("megabytes of the page", written.size / MEGABYTE, at_most=5),
        figure("tokens with a card", written.tokens),
        figure("seconds to make it", seconds),
        figure("seconds of a live answer", statistics.median(answers), at_most=0.2),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
