"""What growth saves, in three accounts: the largest size alone, the next size, and all sizes.

    make experiment NAME=savings

Four sizes from scratch, 2000 steps each, at the best of rates that are equal and of rates that follow the size. Two
ladders that reach the same sizes: one with a branch for each, which begins with two blocks of the smallest, and one to
the largest only. The law of the frontier said when they should grow. The ceiling is what that law promises if nothing
were lost at growth.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from frontier.experiment import BASE, BYTES, SHAPES, WARM_NEW, law
from lab.figures import OURS, colour, draw, legend, plain_ticks
from lab.models import config_of
from lab.results import best, compute, curve, final, finished, flops, growth_steps, losses, parameters, write_results
from lab.sizes import SEEDS, SIZES, STEPS, down_from, rate_of, seeded, to_the_end, token_former
from lab.spec import Growth, Run, TokenFormer
from lab.tables import growth_table, markdown, number, with_spread
from rates.experiment import sweep

from tokenformer import cost
from tokenformer.planning import ScalingLaw, Size, climbed

HERE = Path(__file__).parent
DECAY = 300  # steps of every branch
SHALLOW = replace(token_former(SIZES[0]), layers=2)
# Growth steps into 4 blocks, then into the next sizes, and where the last branch leaves.
FAMILY = (1700, 2300, 2900, 3470, 3840)
# From 2 blocks of 64 tokens to 4 blocks, 128 and 256 tokens: as planned, and shorter, as the first ended lower.
STRAIGHT = ((2470, 2820, 4100), (2000, 2300, 3250))


def scaled(model: TokenFormer, lr: float, seed: int = 0) -> Run:
    """From scratch, with rates that follow the size."""
    return Run(model, lr, STEPS, seed, base=BASE)


def trials(tokens: int) -> list[Run]:
    """A size with the first seed, at its best equal rate and at the scaled ones that are tried to the end."""
    model = token_former(tokens)
    equal = seeded(model)[:1]
    if tokens == SIZES[0]:  # there both ways are the same
        return equal
    return [*equal, *(down_from(sweep(model, "scaled"), partial(scaled, model)) or sweep(model, "scaled"))]


def from_scratch(tokens: int) -> list[Run]:
    """A size at the best rate with every seed; empty as long as it is not known."""
    chosen = best(trials(tokens))
    return [] if chosen is None or chosen.steps < STEPS else [replace(chosen, seed=seed) for seed in SEEDS]


def ladder(model: TokenFormer, grows_at: tuple[int, ...], lr: float, seed: int) -> Run:
    """It doubles its blocks at first, then its tokens, and decays from the last of these steps."""
    growths = tuple(
        Growth(step, 1 if i == 0 else 2, method="rotate", depth=4 if i == 0 else 0, warm_new=WARM_NEW)
        for i, step in enumerate(grows_at)
    )
    steps = grows_at[-1] + DECAY
    return Run(model, lr, steps, seed, growths, decay=DECAY / steps, base=BASE)


def family(lr: float, seed: int = 0) -> dict[int, Run]:
    """A branch for every size, which decays from where the trunk goes on to grow."""
    runs = {}
    for i, tokens in enumerate(SIZES, start=1):
        run = ladder(SHALLOW, FAMILY[:i], lr, seed)
        steps = FAMILY[i] + DECAY
        runs[tokens] = replace(run, steps=steps, decay=DECAY / steps)
    return runs


def straight(lr: float, seed: int = 0) -> list[Run]:
    """To the largest size only."""
    return [ladder(SHAPES["2 blocks of 64 tokens"], grows_at, lr, seed) for grows_at in STRAIGHT]


def plan() -> list[Run]:
    """Ladders and sizes from scratch with the first seed, then the other seeds."""
    lr = rate_of(token_former(SIZES[0]))
    if lr is None:
        return to_the_end(token_former(SIZES[0]))
    runs = [run for tokens in SIZES for run in (*trials(tokens), *from_scratch(tokens))]
    for seed in SEEDS:
        runs += [*straight(lr, seed), *family(lr, seed).values()]
    return sorted(runs, key=lambda run: run.seed)


def size_of(model: TokenFormer) -> Size:
    """What the law knows of a model."""
    return Size("", cost.parameters(config_of(model)).total, flops(Run(model, 0.0, 1)) / BYTES)


def ceiling(found: ScalingLaw, run: Run, target: float) -> float | None:
    """The FLOPs, for that loss, of a ladder like this one that loses nothing at growth: shorter in all its stages."""
    shapes, shape = [run.model], run.model
    for growth in run.growths:
        shape = replace(shape, tokens=round(shape.tokens * growth.factor), layers=growth.depth or shape.layers)
        shapes.append(shape)
    cuts = [0, *(growth.step for growth in run.growths), run.steps]
    stages = [(size_of(shape), b - a) for shape, a, b in zip(shapes, cuts, cuts[1:], strict=False)]
    for percent in range(20, 200):
        shorter = [(size, steps * BYTES * percent / 100) for size, steps in stages]
        if climbed(found, shorter, 1.0).loss <= target:
            return sum(size.flops_per_unit * seen for size, seen in shorter)
    return None


def report() -> None:
    """What was reached, for how much."""
    findings: dict[str, Any] = {"scratch": {}, "ladders": {}}
    for tokens in SIZES:
        runs = finished(from_scratch(tokens))
        if runs:
            facts = {"flops": flops(runs[0]), "parameters": parameters(runs[0]), "scaled": bool(runs[0].base)}
            findings["scratch"][str(tokens)] = {**facts, **losses(runs)}
    lr = rate_of(token_former(SIZES[0]))
    found = None if lr is None else law(lr)
    if lr is not None and findings["scratch"]:
        findings["ladders"] = _ladders(lr, found, findings["scratch"])
        draw(HERE / "savings.png", [partial(_curves, lr)])
    write_results(HERE, findings, plan())


def _ladders(lr: float, found: ScalingLaw | None, scratch: dict[str, Any]) -> dict[str, Any]:
    ladders: dict[str, Any] = {}
    grown = {
        "the family": [run for seed in SEEDS for run in family(lr, seed).values()],
        "to the largest": [run for seed in SEEDS for run in straight(lr, seed)],
    }
    ladders["growths"] = {name: steps for name, runs in grown.items() if (steps := growth_steps(runs))}
    largest = scratch.get(str(SIZES[-1]))
    for i in range(len(STRAIGHT)):
        runs = finished([straight(lr, seed)[i] for seed in SEEDS])
        if runs and largest:
            facts = {"flops": flops(runs[0]), "of_scratch": flops(runs[0]) / largest["flops"]}
            limit = ceiling(found, runs[0], largest["validation"]["mean"]) if found else None
            one = {**facts, **losses(runs), "ceiling": limit and limit / largest["flops"]}
            ladders.setdefault("largest", []).append(one)
    whole = [runs for seed in SEEDS if len(runs := finished(family(lr, seed).values())) == len(SIZES)]
    if whole and len(scratch) == len(SIZES):
        total = sum(size["flops"] for size in scratch.values())
        ladders["family"] = {"of_scratch": compute(whole[0]) / total, "sizes": {}}
        for i, tokens in enumerate(SIZES):
            branches = [runs[i] for runs in whole]
            since = FAMILY[i] if i else 0  # what was trained before is there already
            further = flops(branches[0]) - flops(branches[0], since)
            share = further / scratch[str(tokens)]["flops"]
            ladders["family"]["sizes"][str(tokens)] = {"flops": flops(branches[0]), "next": share, **losses(branches)}
    return ladders


def _curves(lr: float, axes: Any) -> None:
    for i, tokens in enumerate(SIZES):
        for run in finished(from_scratch(tokens)[:1]):
            axes.plot(*curve(run), color=colour(i + 2), lw=1, label=f"{tokens} tokens from scratch")
            axes.plot([flops(run)], [final(run)], "o", color=colour(i + 2), ms=4)
    for i, run in enumerate(finished(family(lr).values())):
        axes.plot(*curve(run), color=OURS, lw=1, label=None if i else "the family")
        axes.plot([flops(run)], [final(run)], "s", color=OURS, ms=4)
    for i, run in enumerate(finished(straight(lr))):
        axes.plot(*curve(run), "--", color=OURS, lw=1, label=None if i else "to the largest")
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation loss, nats a byte", ylim=(1.45, 2.2))
    plain_ticks(axes.xaxis)
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """The three accounts."""
    scratch, ladders = findings.get("scratch", {}), findings.get("ladders", {})
    whole = ladders.get("family")

    def against(one: dict[str, Any], tokens: str) -> str:
        return f"{one['validation']['mean'] / scratch[tokens]['validation']['mean'] - 1:+.1%}"

    accounts = []
    for largest in ladders.get("largest", []):
        limit = "-" if largest["ceiling"] is None else f"{largest['ceiling']:.0%}"
        off = against(largest, str(SIZES[-1]))
        accounts.append(["the largest size", f"{largest['of_scratch']:.0%}", off, limit])
    if whole:
        each = [one["next"] for tokens, one in whole["sizes"].items() if tokens != str(SIZES[0])]
        off = ", ".join(against(one, tokens) for tokens, one in whole["sizes"].items())
        accounts.append(["the next size", ", ".join(f"{share:.0%}" for share in each), off, "-"])
        accounts.append(["all sizes", f"{whole['of_scratch']:.0%}", off, "-"])
    sizes = [
        [
            f"{tokens} tokens",
            f"{BYTES * STEPS / one['parameters']:.1f}",
            "scaled" if one["scaled"] else "equal",
            f"{one['flops']:.3g}",
            with_spread(one["validation"]),
            number(whole["sizes"][tokens]["flops"] / one["flops"], 2) if whole else "-",
            with_spread(whole["sizes"][tokens]["validation"]) if whole else "-",
        ]
        for tokens, one in scratch.items()
    ]
    header = [
        "size",
        "bytes a parameter",
        "rates",
        "FLOPs from scratch",
        "loss",
        "FLOPs of its branch, of that",
        "loss",
    ]
    return {
        "accounts": markdown(["account", "of the FLOPs from scratch", "loss, against it", "ceiling"], accounts),
        "sizes": markdown(header, sizes),
        "growths": growth_table(ladders.get("growths", {})),
    }
