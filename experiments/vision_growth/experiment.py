"""A TokenFormer for images that doubles its tokens, against both sizes from scratch, on CIFAR-10.

    make experiment NAME=vision_growth

The small model trains at a constant rate, its best; a branch decays and is the small model. The trunk grows and trains
on, and decays: that is the large one. Compute is that of trunk and branches. Beside it stand both sizes from scratch
with as many FLOPs as lead to the grown one, each at its own best rate.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend
from lab.results import accuracy, compute, curve, finished, flops, image_scores, write_results
from lab.spec import Growth, Run, TokenViT
from lab.tables import IMAGE_HEADER, image_cells, markdown
from lab.vision import LONGER, SEEDS, SHORTER, STEPS, TOKENS, rate_of, scratch, seeded, sweep, to_the_end, token_vit

HERE = Path(__file__).parent
SMALL, LARGE = token_vit(TOKENS // 2), token_vit()
BASE = STEPS - round(0.2 * STEPS)  # where the small model's branch starts to decay
MORE = round(0.4 * STEPS)  # steps of the grown model, of which the last half decay
METHODS = {"rotate": SEEDS, "split": SEEDS[:1], "zero": SEEDS[:1], "random": SEEDS[:1]}


def grown(method: str, lr: float, seed: int) -> Run:
    """The branch that ends with the large model."""
    steps = BASE + MORE
    return replace(scratch(SMALL, lr, seed), steps=steps, growths=(Growth(BASE, 2, method),), decay=0.2 * STEPS / steps)


def ladders() -> dict[str, list[Run]]:
    """The grown models of each method."""
    lr = rate_of(SMALL)
    return {} if lr is None else {m: [grown(m, lr, seed) for seed in seeds] for m, seeds in METHODS.items()}


def from_scratch() -> dict[str, list[Run]]:
    """Both sizes, and both at the compute of growth."""
    found = {_name(model): seeded(model) for model in (SMALL, LARGE)}
    for model, steps in ((LARGE, SHORTER), (SMALL, LONGER)):
        found[f"{_name(model)}, {steps} steps"] = [scratch(model, run.lr, run.seed, steps) for run in seeded(model)]
    return found


def _name(model: TokenViT) -> str:
    return f"{model.tokens} tokens"


def plan() -> list[Run]:
    """The rates, both sizes from scratch, then the ladders."""
    rates = [run for tried in (sweep, to_the_end) for model in (LARGE, SMALL) for run in tried(model)]
    return rates + [run for runs in (*from_scratch().values(), *ladders().values()) for run in runs]


def report() -> None:
    """Accuracies of both sizes, and the compute of a ladder against that of both from scratch."""
    findings: dict[str, Any] = {"scratch": {}, "ladders": {}}
    for name, runs in from_scratch().items():
        done = finished(runs)
        if done:
            seen = {"flops": flops(done[0]), "images": done[0].steps * done[0].batch}
            findings["scratch"][name] = {**seen, **image_scores(done)}
    sizes = [findings["scratch"].get(_name(model), {}).get("flops") for model in (SMALL, LARGE)]
    for method, runs in ladders().items():
        done = finished(runs)
        if done and None not in sizes:
            total = compute([scratch(SMALL, done[0].lr, done[0].seed), done[0]])
            cost = {"flops": flops(done[0]), "of_large": flops(done[0]) / sizes[1], "of_both": total / sum(sizes)}
            seen = {"images": done[0].steps * done[0].batch}
            findings["ladders"][method] = {**cost, **seen, **image_scores(done)}
    write_results(HERE, findings, plan())
    draw(HERE / "growth.png", [_curves])


def _curves(axes: Any) -> None:
    drawn = {**from_scratch(), **ladders()}
    for i, run in enumerate(runs[0] for runs in drawn.values() if runs):
        if accuracy(run) is not None:
            name = (
                f"{run.model.tokens} tokens, {run.steps} steps"
                if not run.growths
                else f"grown by {run.growths[0].method}"
            )
            axes.plot(*curve(run, value="accuracy"), color=colour(i), lw=1, label=name)
    axes.set(xlabel="training FLOPs", ylabel="accuracy on held-out images")
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Accuracy and compute, from scratch and grown."""
    named = {f"{name}, from scratch": found for name, found in findings.get("scratch", {}).items()}
    for method, found in findings.get("ladders", {}).items():
        named[f"{SMALL.tokens} -> {LARGE.tokens} tokens by {method}"] = found
    rows = [
        [
            name,
            f"{found['flops']:.3g}",
            f"{found['images']:,}",
            *image_cells(found),
            *(f"{found[of]:.0%}" if of in found else "-" for of in ("of_large", "of_both")),
        ]
        for name, found in named.items()
    ]
    header = ["model", "FLOPs up to it", "images seen", *IMAGE_HEADER, "of the large size", "both, of both sizes"]
    return {"growth": markdown(header, rows)}
