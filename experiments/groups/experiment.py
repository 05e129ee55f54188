"""Groups of tokens against LoRA: what a finished model learns of a new text, and what it forgets of the old one.

    make experiment NAME=groups

A TokenFormer and a GPT-NeoX of as many parameters, trained on enwik8, then 300 steps on a new text, in which only what
stands beside them learns: three sizes of it, at several rates, because more is learnt and more forgotten at a higher
one. Then five texts one after the other.
"""

import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from groups.domains import DOMAINS, OLD, SWITCHED, groups, in_turn, losses_by_text
from groups.ways import (
    ALL,
    BASES,
    BUDGETS,
    IDEAS,
    MAIN,
    MIDDLE,
    OWN,
    TEXTS,
    WAYS,
    before,
    idea,
    rated,
    seeded,
    ways_on,
)
from lab.figures import colour, draw, legend
from lab.results import best, final, finished, last, spread, write_results
from lab.sizes import SEEDS, probes, to_the_end
from lab.spec import Run
from lab.tables import markdown, number, with_spread
from lab.train import add_to_result, trained

HERE = Path(__file__).parent
COLUMNS = (*BUDGETS, ALL)
TRIED = BUDGETS[:2]  # budgets at which ideas are tried
# Compared where they have learnt equally much.
KINDS = ("tokens beside FFNs", "tokens beside all layers", "LoRA")
FORGOTTEN = 0.6  # nats a byte on the old text, beyond which the figures do not look


def cells(text: str) -> list[tuple[str, str]]:
    """Every way and budget that are tried together on a text: the main ways and the middle budget first."""
    pairs = [(way, budget) for way in ways_on(text) for budget in WAYS[way].sizes]
    return sorted(pairs, key=lambda pair: (pair[0] not in MAIN, pair[1] not in (MIDDLE, ALL)))


def plan() -> list[Run]:
    """The rates of the bases; each text by every way at every rate, then with other seeds; ideas; five texts."""
    bases = [run for some in (probes, to_the_end) for model in BASES.values() for run in some(model)]
    ideas = [run for name, budget in product(IDEAS, TRIED) for run in idea(name, budget)]
    first, second = (_learning(text) for text in TEXTS)
    return [*bases, *first, *ideas, *second, *groups(), *in_turn()]


def _learning(text: str) -> list[Run]:
    """All that begins with a base and learns one text."""
    starts = [run for name, seed in product(BASES, SEEDS) for run in before(name, text, seed)]
    tried = [run for way, budget in cells(text) for run in rated(way, budget, text)]
    return [*tried, *starts, *(run for way, budget in cells(text) for run in seeded(way, budget, text))]


def look() -> None:
    """Note the losses on all texts, once all are learnt here."""
    learnt, turned = groups(), in_turn()
    if all(map(finished_here, [*learnt, *turned])) and turned and last(turned[-1], "domains") is None:
        add_to_result(turned[-1].segments()[-1], {"kind": "domains", "texts": losses_by_text(learnt, turned[-1])})


def finished_here(run: Run) -> bool:
    """Whether the model at the end of a run is on this machine."""
    return trained(run.segments()[-1]) is not None


def report() -> None:
    """Losses on the new and the old text, of every way, budget and rate; ideas; and five texts."""
    findings: dict[str, Any] = {"before": _before(), "ways": {}, "ideas": {}, "texts": {}}
    for text in TEXTS:
        for way, budget in cells(text):
            found, runs = _tried(rated(way, budget, text)), finished(seeded(way, budget, text))
            if found:
                settled = _settled(runs) if runs else {}
                findings["ways"].setdefault(text, {}).setdefault(way, {})[budget] = {**found, **settled}
    for name, budget in product(IDEAS, TRIED):
        runs = idea(name, budget)
        if best(runs) is not None:
            findings["ideas"].setdefault(name, {})[budget] = _tried(runs)
    turned = in_turn()
    learnt = last(turned[-1], "domains") if turned else None
    if learnt is not None:
        findings["texts"] = learnt["texts"]
    write_results(HERE, findings, plan())
    for text in TEXTS:
        draw(HERE / f"{text}.png", [partial(_panel, findings, text, budget) for budget in BUDGETS], size=(4.6, 4.2))


def _before() -> dict[str, Any]:
    """The losses of the bases on every text."""
    found: dict[str, Any] = {}
    for text, name in product(TEXTS, BASES):
        runs = finished(run for seed in SEEDS for run in before(name, text, seed))
        if runs:
            found.setdefault(text, {})[name] = _settled(runs)
    return found


def _tried(runs: list[Run]) -> dict[str, Any]:
    """By rate, the losses on both texts with the first seed; nothing if none is finished, and none that broke."""
    ends = [(run, last(run, "end") or {}) for run in runs if math.isfinite(final(run) or math.inf)]
    rates = {f"{run.lr:g}": {"new": end["loss"], "old": end["old_loss"]} for run, end in ends}
    return {"trained": ends[0][1]["trained"], "rates": rates} if rates else {}


def _settled(runs: list[Run]) -> dict[str, Any]:
    """The losses on both texts of runs that differ in the seed, by part."""
    parts = {"validation": "end", "test": "test"}
    measured = {part: [last(run, kind) or {} for run in runs] for part, kind in parts.items()}
    return {
        "lr": runs[0].lr,
        "new": {part: spread([line["loss"] for line in found]) for part, found in measured.items()},
        "old": {part: spread([line["old_loss"] for line in found]) for part, found in measured.items()},
    }


def _panel(findings: dict[str, Any], text: str, budget: str, axes: Any) -> None:
    """What was gained on the new text, by what was lost on the old one: a point for every rate."""
    started = findings["before"].get(text, {})
    for i, (way, sizes) in enumerate(_in_order(findings, text).items()):
        found, name = sizes.get(budget, sizes.get(ALL)), WAYS[way].base
        if found is None or name not in started:
            continue
        new, old = (started[name][which]["validation"]["values"][0] for which in ("new", "old"))
        points = [(one["old"] - old, new - one["new"]) for one in found["rates"].values()]
        line = "o-" if name == "TokenFormer" else "s--"
        axes.plot(*zip(*points, strict=True), line, color=colour(i), label=way, markersize=3)
    axes.set(
        title=f"{text}, {budget} parameters learn",
        xlabel="enwik8: rise of the loss",
        ylabel=f"{text}: fall of the loss, nats a byte",
    )
    axes.set_xlim(right=min(FORGOTTEN, axes.get_xlim()[1]))
    if budget == BUDGETS[0]:
        legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """By text the losses on it and on enwik8, and what equal gains cost; sizes and rates; ideas; five texts."""
    made = {}
    for text in TEXTS:
        made[text] = _losses(findings, text, "new")
        made[f"{text}_old"] = _losses(findings, text, "old")
        made[f"{text}_equal"] = _equal_gains(findings, text)
    return {**made, "sizes": _sizes(findings), "ideas": _ideas(findings), "texts": _texts(findings)}


def _losses(findings: dict[str, Any], text: str, which: str) -> str:
    """Of every way before it learns and by budget, on test data."""
    started, rows = findings.get("before", {}).get(text, {}), []
    for way, sizes in _in_order(findings, text).items():
        cells = [started.get(WAYS[way].base, {}), *(sizes.get(budget, {}) for budget in COLUMNS)]
        rows.append([way, *(with_spread(found.get(which, {}).get("test")) for found in cells)])
    return markdown([f"loss on {text if which == 'new' else OLD}", "before", *COLUMNS], rows)


def _equal_gains(findings: dict[str, Any], text: str) -> str:
    """What is forgotten when all have learnt as much as the worst of them does at its best."""
    found, rows = _in_order(findings, text), []
    for name, budget in product(BASES, BUDGETS):
        curves = {way: _curve(found[way][budget]) for way in found if WAYS[way].base == name and budget in found[way]}
        adapters = {way: curves[way] for way in (f"{name}, {kind}" for kind in KINDS) if way in curves}
        if len(adapters) < 2:
            continue
        reached = max(curve[-1][0] for curve in adapters.values())
        cells = [_old_at(adapters.get(f"{name}, {kind}", []), reached) for kind in KINDS]
        rows.append([name, budget, number(reached), *("-" if old is None else number(old) for old in cells)])
    return markdown(["model", "parameters", f"loss on {text}", *(f"{OLD}: {kind}" for kind in KINDS)], rows)


def _curve(found: dict[str, Any]) -> list[tuple[float, float]]:
    """The losses on the new and the old text, from the lowest rate to the best."""
    points = [(one["new"], one["old"]) for _, one in sorted(found["rates"].items(), key=lambda item: float(item[0]))]
    return points[: 1 + points.index(min(points))]


def _old_at(curve: list[tuple[float, float]], reached: float) -> float | None:
    """The loss on the old text where a curve has this loss on the new one, between two of its points."""
    for (new, old), (lower, higher) in pairwise(curve):
        if lower <= reached <= new:
            return old + (higher - old) * (new - reached) / (new - lower)
    return None


def _in_order(findings: dict[str, Any], text: str) -> dict[str, dict[str, Any]]:
    """What was found on a text, by way, in the order of WAYS."""
    found = findings.get("ways", {}).get(text, {})
    return {way: found[way] for way in WAYS if way in found}


def _sizes(findings: dict[str, Any]) -> str:
    """How many parameters learn, and the best rate on python."""

    def cell(found: dict[str, Any]) -> str:
        return f"{found['trained']:,} at {found['lr']:g}" if "lr" in found else "-"

    ways = _in_order(findings, TEXTS[0]).items()
    rows = [[way, *(cell(sizes.get(budget, {})) for budget in COLUMNS)] for way, sizes in ways]
    return markdown(["parameters that learn, at the best rate", *COLUMNS], rows)


def _ideas(findings: dict[str, Any]) -> str:
    """The best of the rates of every idea, beside the plain way."""
    plain = findings.get("ways", {}).get(TEXTS[0], {}).get(OWN, {})
    rows = []
    for name, sizes in {"as they are": plain, **findings.get("ideas", {})}.items():
        cells = []
        for budget in TRIED:
            rates = sizes.get(budget, {}).get("rates", {})
            lr = min(rates, key=lambda lr: rates[lr]["new"], default=None)
            cells += [number(rates[lr]["new"]), number(rates[lr]["old"]), lr] if lr else ["-"] * 3
        rows.append([name, *cells])
    header = [f"{budget}, {what}" for budget in TRIED for what in (TEXTS[0], OLD, "rate")]
    return markdown(["tokens beside FFNs", *header], rows)


def _texts(findings: dict[str, Any]) -> str:
    """Every text with groups switched in every way, and after all weights learnt one text after the other."""
    rows = []
    for text in (OLD, *DOMAINS):
        found = findings.get("texts", {}).get(text)
        if found is not None:
            losses = [number(found["losses"][way]) for way in (*SWITCHED, "in turn")]
            rows.append([text, *losses, f"{100 * found['accuracy']:.0f} %"])
    header = [
        "loss on",
        "no group",
        "the right one",
        "all five",
        "the one chosen",
        "all weights in turn",
        "chosen right",
    ]
    return markdown(header, rows)
