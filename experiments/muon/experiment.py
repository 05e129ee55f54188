"""Is Muon better than Adam for tokens, when its own arithmetic is paid for?

    make experiment NAME=muon

Muon has the keys and values, AdamW the rest. A run with Muon has the FLOPs of one with AdamW of PROBE steps, and so
fewer steps. From scratch at two sizes, at several rates, with rates that follow the size and with one rate for all (the
updates of Muon have a bounded norm); then a growth step, across which momentum is carried; then runs from scratch
three times as long, because the best rate and the gain may fall with the length.
"""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, draw, legend
from lab.results import best, curve, final, flops, rise_at_growth, write_results
from lab.sizes import PROBE, SIZES, STEPS, at_rates, down_from, to_the_end, token_former
from lab.spec import Growth, Run, TokenFormer
from lab.tables import change, markdown, number
from rates.experiment import BASE, optimum
from rates.experiment import sweep as adam_sweep

HERE = Path(__file__).parent
RATES = (4e-3, 8e-3, 1.6e-2)
MODELS = {f"{tokens} tokens": token_former(tokens) for tokens in (SIZES[0], SIZES[2])}
WAYS: dict[str, tuple[tuple[str, int], ...]] = {"scaled": BASE, "equal": ()}
BEFORE, AFTER, FACTOR = 800, 400, 4  # steps of AdamW before and after growth


def with_muon(run: Run, base: tuple[tuple[str, int], ...] = BASE) -> Run:
    """The same run with Muon, and in every stage so many steps that the FLOPs are the same."""
    muon = replace(run, optimizer="muon", base=base)
    cuts = [0, *(growth.step for growth in run.growths), run.steps]
    ends, at = [], 0
    for start, end in itertools.pairwise(cuts):
        at += round((end - start) * flops(run, end, start) / flops(muon, end, start))
        ends.append(at)
    growths = tuple(replace(growth, step=step) for growth, step in zip(run.growths, ends, strict=False))
    return replace(muon, steps=ends[-1], growths=growths)


def sweep(model: TokenFormer, way: str) -> list[Run]:
    """Muon at every rate."""
    return at_rates(lambda rate: with_muon(Run(model, rate, PROBE), WAYS[way]), RATES)


def grown(lr: float) -> Run:
    """The smaller model, which becomes the larger one."""
    step = Growth(BEFORE, FACTOR, method="rotate")
    return Run(MODELS["32 tokens"], lr, BEFORE + AFTER, growths=(step,), base=BASE)


def ladders() -> dict[str, Run]:
    """The growth step with each optimizer, at the best rate of the small size; empty as long as that is not known."""
    small = MODELS["32 tokens"]
    adam, muon = best(adam_sweep(small, "scaled")), best(sweep(small, "scaled"))
    return {} if adam is None or muon is None else {"AdamW": grown(adam.lr), "Muon": with_muon(grown(muon.lr))}


def longer() -> dict[str, list[Run]]:
    """Runs with the FLOPs of STEPS of AdamW, from the best rate of the shorter ones down until one is worse."""
    found = {}
    for name, model, way in (
        ("32 tokens", MODELS["32 tokens"], "scaled"),
        ("128 tokens", MODELS["128 tokens"], "equal"),
    ):
        found[f"{name}, AdamW"] = to_the_end(model)
        found[f"{name}, Muon"] = down_from(sweep(model, way), partial(_long, model, way))
    return found


def _long(model: TokenFormer, way: str, lr: float) -> Run:
    return with_muon(Run(model, lr, STEPS), WAYS[way])


def sweeps() -> dict[str, list[Run]]:
    """From scratch: every size with both optimizers. At the smallest, rates that follow the size are equal."""
    found = {}
    for name, model in MODELS.items():
        found[f"{name}, AdamW, scaled"] = adam_sweep(model, "scaled")
        for way in WAYS if model.tokens != SIZES[0] else ("scaled",):
            found[f"{name}, Muon, {way}"] = sweep(model, way)
    return found


def plan() -> list[Run]:
    """From scratch, then growth, then the longer runs."""
    short, long = (
        (run for runs in sweeps().values() for run in runs),
        (run for runs in longer().values() for run in runs),
    )
    return [*short, *ladders().values(), *long]


def report() -> None:
    """The lowest loss of every way, and how growth went."""
    findings: dict[str, Any] = {"scratch": {}, "ladders": {}, "longer": {}}
    for name, runs in sweeps().items():
        chosen = best(runs)
        if chosen is not None:
            losses = {run.lr: final(run) or 0.0 for run in runs}
            facts = {"steps": chosen.steps, "flops": flops(chosen), "loss": final(chosen)}
            findings["scratch"][name] = {**facts, "optimum": optimum(losses), "losses": losses}
    for name, run in ladders().items():
        if final(run) is not None:
            facts = {"steps": run.steps, "flops": flops(run), "loss": final(run), "lr": run.lr}
            findings["ladders"][name] = {**facts, "rise": rise_at_growth(run)}
    for name, runs in longer().items():
        chosen = best(runs)
        if chosen is not None:
            facts = {"steps": chosen.steps, "flops": flops(chosen), "loss": final(chosen), "lr": chosen.lr}
            findings["longer"][name] = facts
    write_results(HERE, findings, plan())
    draw(HERE / "growth.png", [_curves])


def _curves(axes: Any) -> None:
    for hue, (name, run) in zip((THEIRS, OURS), ladders().items(), strict=False):
        if final(run) is not None:
            at, measured = curve(run)
            axes.plot([*at, flops(run)], [*measured, final(run)], color=hue, label=name)
    axes.set(xlabel="training FLOPs", ylabel="validation loss, nats a byte", ylim=(None, 2.5))
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """From scratch and grown, at equal FLOPs."""
    scratch = [
        [name, f"{found['optimum']:.2g}", str(found["steps"]), number(found["loss"])]
        for name, found in findings.get("scratch", {}).items()
    ]
    ladders = [
        [name, f"{found['lr']:g}", str(found["steps"]), change(found["rise"]), number(found["loss"])]
        for name, found in findings.get("ladders", {}).items()
    ]
    longest = [
        [name, f"{found['lr']:g}", str(found["steps"]), number(found["loss"])]
        for name, found in findings.get("longer", {}).items()
    ]
    return {
        "longer": markdown(["from scratch, longer", "rate", "steps", "loss"], longest),
        "scratch": markdown(["from scratch", "best rate", "steps", "loss"], scratch),
        "growth": markdown(["32 → 128 tokens", "rate", "steps", "rise at growth", "loss"], ladders),
    }
