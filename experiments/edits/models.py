"""The models that facts are written into, as runs.

Enters: the rates that were the best on enwik8. Leaves: runs on the made text of lab/facts.py; none as long as a rate is
not known.
"""

from dataclasses import replace

from groups.ways import BASES
from lab.results import best
from lab.sizes import SEEDS, initialised, probes, sweep
from lab.spec import Run

TEXT, STEPS, BATCH, CONTEXT = "facts", 1500, 16, 64


def trials() -> list[Run]:
    """What finds the rates."""
    return [run for model in BASES.values() for run in probes(model)]


def knowing() -> dict[tuple[str, int], Run]:
    """The models that know the facts, by name and seed."""
    runs = {}
    for name, model in BASES.items():
        settled = initialised(model)
        chosen = None if settled is None else best(sweep(settled))
        if chosen is None:
            return {}
        like = {"text": TEXT, "steps": STEPS, "batch": BATCH, "context": CONTEXT, "marks": ()}
        runs |= {(name, seed): replace(chosen, seed=seed, **like) for seed in SEEDS}
    return dict(sorted(runs.items(), key=lambda item: item[0][1]))
