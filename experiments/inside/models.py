"""The models that are looked into, as runs: finished ones on enwik8, and ones whose text had a fault.

Enters: the rates that were the best. Leaves: runs; none as long as a rate is missing that they need.
"""

from dataclasses import replace

from groups.ways import BASES, base
from lab.results import best
from lab.sizes import SEEDS, initialised, sweep
from lab.spec import Adapter, Run
from lab.texts import RIGHT, WRONG

OURS, THEIRS = BASES
ADOPTED = "adopted twin"
NAMES = (OURS, THEIRS, ADOPTED)
CLEAN, EVERYWHERE, HALF = "enwik8", "misspelt", "half_misspelt"
STEPS, RETRAINED = 600, (10, 30, 100)
__all__ = ["RIGHT", "WRONG"]


def bases() -> dict[tuple[str, int], Run]:
    """The finished models on enwik8, by name and seed."""
    found = {(name, seed): base(name, seed) for seed in SEEDS for name in BASES}
    return {key: run for key, run in found.items() if run is not None}


def faulty() -> dict[tuple[str, str, int], Run]:
    """Models of the same shapes that were trained on text with a fault, by name, text and seed."""
    runs = {}
    for name, model in BASES.items():
        settled = initialised(model)
        chosen = None if settled is None else best(sweep(settled))
        if chosen is None:
            return {}
        for text, seeds in ((EVERYWHERE, SEEDS), (HALF, SEEDS[:1])):
            for seed in seeds:
                runs[name, text, seed] = replace(chosen, steps=STEPS, text=text, seed=seed, marks=())
    return runs


def retrained(run: Run) -> list[Run]:
    """All weights of a faulty model trained on, for a few steps, on text without the fault."""
    how = {"text": CLEAN, "begins": run, "adapter": Adapter("full"), "weight_decay": 0.0, "warmup": 5, "decay": 0.8}
    return [replace(run, steps=steps, **how) for steps in RETRAINED]
