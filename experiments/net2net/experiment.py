"""Growing a TokenFormer by tokens against widening a Transformer by Net2Net, both fourfold, with equal budgets after.

    make experiment NAME=net2net

Both kinds train at a quarter of the size for BASE steps at a constant rate, grow, and train on; for every budget a
branch decays over its last fifth. Parameters without the embedding agree within 2 % before and after (Net2Net doubles
the width, which also doubles the embedding).
"""

from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend
from lab.results import finished, flops, losses, non_embedding, rise_at_growth, write_results
from lab.sizes import SEEDS, SIZES, like_the_smallest, models, neox, probes, rate_of, to_the_end, token_former
from lab.spec import Growth, NeoX, Run, TokenFormer
from lab.tables import change, markdown, number, with_spread

HERE = Path(__file__).parent
BASE, BUDGETS = 1200, (250, 500, 1000)
SMALL = {"tokenformer": token_former(31), "gpt_neox": neox(72)}
WAYS = {
    "TokenFormer, rotate": ("tokenformer", "rotate", "carry"),
    "TokenFormer, rotate, Adam reset": ("tokenformer", "rotate", "reset"),
    "Transformer, Net2Net": ("gpt_neox", "net2net", "carry"),
    "Transformer, Net2Net, Adam reset": ("gpt_neox", "net2net", "reset"),
}


def runs(way: str) -> dict[int, list[Run]]:
    """For every budget the runs with all seeds, one for the controls; empty as long as the best rate is not known."""
    kind, method, adam = WAYS[way]
    nearest, model = dict(zip(SMALL, models(SIZES[0]), strict=True))[kind], SMALL[kind]
    rate = rate_of(nearest)
    if rate is None:
        return {}
    model = like_the_smallest(model) if isinstance(model, NeoX) else model
    growth = Growth(BASE, 4, method, adam)
    seeds = SEEDS if adam == "carry" else SEEDS[:1]
    return {budget: [grown(model, growth, rate, budget, seed) for seed in seeds] for budget in BUDGETS}


def grown(model: TokenFormer | NeoX, growth: Growth, rate: float, budget: int, seed: int) -> Run:
    """A branch of the run with the largest budget: cut where the smaller ones start to decay."""
    decays = [BASE + b * 4 // 5 for b in BUDGETS if b <= budget]
    end = BASE + budget
    return Run(model, rate, end, seed, (growth,), decay=1 - decays[-1] / end, marks=tuple(decays[:-1]))


def plan() -> list[Run]:
    """The rates, then all ways."""
    rates = [run for some in (probes, to_the_end) for model in models(SIZES[0]) for run in some(model)]
    return rates + [run for way in WAYS for budget in runs(way).values() for run in budget]


def report() -> None:
    """Losses by way and budget, and how much the loss moved when the model grew."""
    findings: dict[str, Any] = {}
    for way in WAYS:
        for budget, tried in runs(way).items():
            done = finished(tried)
            if done:
                findings.setdefault(way, {"non_embedding": non_embedding(done[0]), "budgets": {}})
                findings[way]["jump"] = [rise_at_growth(run) for run in done]
                findings[way]["budgets"][str(budget)] = {"flops": flops(done[0], since=BASE), **losses(done)}
    write_results(HERE, findings, plan())
    draw(HERE / "budgets.png", [_budgets(findings)])


def _budgets(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        # Controls have one seed, and would be compared with means.
        carried = {way: found for way, found in findings.items() if WAYS[way][2] == "carry"}
        for i, (way, found) in enumerate(carried.items()):
            at = [int(budget) for budget in found["budgets"]]
            means = [row["validation"]["mean"] for row in found["budgets"].values()]
            axes.plot(at, means, "o-", color=colour(i), label=way)
        axes.set(xlabel="steps after growth", ylabel="validation loss, nats a byte")
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by way and budget."""
    losses_of = {
        way: [found["budgets"].get(str(budget), {}).get("validation") for budget in BUDGETS]
        for way, found in findings.items()
    }
    rows = [
        [
            way,
            f"{found['non_embedding']:,}",
            change(max(found["jump"], key=abs)),
            *(with_spread(loss) for loss in losses_of[way]),
        ]
        for way, found in findings.items()
        if WAYS[way][2] == "carry"
    ]
    first = [[way, *(number(loss and loss["values"][0]) for loss in found)] for way, found in losses_of.items()]
    steps = [f"{budget} steps" for budget in BUDGETS]
    return {
        "budgets": markdown(["grown by", "parameters without embedding", "loss at growth", *steps], rows),
        "adam": markdown(["seed 0, grown by", *steps], first),
    }
