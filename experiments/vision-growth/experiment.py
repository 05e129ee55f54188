"""A TokenFormer for images that doubles its tokens, against both sizes from scratch, on CIFAR-10.

    make experiment NAME=vision-growth

The small model trains at a constant rate; a branch decays and is the small model. The trunk grows and trains on, and
decays: that is the large one. Compute is that of trunk and branches.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import colour, draw, legend
from lab.results import accuracy, compute, curve, finished, flops, image_scores, write_results
from lab.spec import Growth, Run
from lab.tables import IMAGE_HEADER, image_cells, markdown
from lab.vision import SEEDS, STEPS, TOKENS, rate_of, scratch, seeded, sweep, to_the_end, token_vit

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
    lr = rate_of(LARGE)
    return {} if lr is None else {m: [grown(m, lr, seed) for seed in seeds] for m, seeds in METHODS.items()}


def small() -> list[Run]:
    """The small size from scratch, at the rate of the large one, which the ladder needs for both."""
    return seeded(SMALL, like=LARGE)


def plan() -> list[Run]:
    """The rates, both sizes from scratch, then the ladders."""
    return [
        *sweep(LARGE),
        *to_the_end(LARGE),
        *small(),
        *seeded(LARGE),
        *(run for runs in ladders().values() for run in runs),
    ]


def report() -> None:
    """Accuracies of both sizes, and the compute of a ladder against that of both from scratch."""
    findings: dict[str, Any] = {"scratch": {}, "ladders": {}}
    for tokens, runs in ((SMALL.tokens, finished(small())), (LARGE.tokens, finished(seeded(LARGE)))):
        if runs:
            findings["scratch"][str(tokens)] = {"flops": flops(runs[0]), **image_scores(runs)}
    both = sum(found["flops"] for found in findings["scratch"].values())
    for method, runs in ladders().items():
        done = finished(runs)
        if done and len(findings["scratch"]) == 2:
            total = compute([scratch(SMALL, done[0].lr, done[0].seed), done[0]])
            findings["ladders"][method] = {"flops": total, "of_from_scratch": total / both, **image_scores(done)}
    write_results(HERE, findings, plan())
    draw(HERE / "growth.png", [_curves])


def _curves(axes: Any) -> None:
    for i, run in enumerate([*small()[:1], *seeded(LARGE)[:1], *(runs[0] for runs in ladders().values())]):
        if accuracy(run) is not None:
            name = f"{run.model.tokens} tokens" if not run.growths else f"grown by {run.growths[0].method}"
            axes.plot(*curve(run, value="accuracy"), color=colour(i), lw=1, label=name)
    axes.set(xlabel="training FLOPs", ylabel="accuracy on held-out images")
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Accuracy and compute, from scratch and grown."""
    rows = []
    for tokens, found in findings.get("scratch", {}).items():
        rows.append([f"{tokens} tokens from scratch", f"{found['flops']:.3g}", *image_cells(found), "-"])
    for method, found in findings.get("ladders", {}).items():
        name = f"{SMALL.tokens} -> {LARGE.tokens} tokens by {method}"
        rows.append([name, f"{found['flops']:.3g}", *image_cells(found), f"{found['of_from_scratch']:.0%}"])
    header = ["model", "FLOPs", *IMAGE_HEADER, "compute of both sizes"]
    return {"growth": markdown(header, rows)}
