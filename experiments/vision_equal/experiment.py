"""A TokenFormer for images against a ViT with as many parameters, on CIFAR-10.

    make experiment NAME=vision_equal

Both try the same rates for an epoch, then the best and lower ones to the end; the best of these has three seeds. The
ViT is tried with transformers' initialisation, with one as wide as ours, and with one between them, which was best for
peers in the language experiments, and gets the one that is best at the end.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, draw, legend
from lab.results import accuracies, best, curve, finished, flops, image_scores, parameters, write_results
from lab.spec import Run, TokenViT, ViT
from lab.tables import IMAGE_HEADER, image_cells, markdown, number
from lab.vision import WIDTH, scratch, seeded, sweep, to_the_end, token_vit, vit

HERE = Path(__file__).parent
STARTS = {f"ViT, N(0, {init:.2g})": replace(vit(), init=init) for init in (0.02, 0.05, WIDTH**-0.5)}


def starts() -> list[Run]:
    """The ViT with each initialisation, to the end at the best rate of an epoch; empty as long as it is not known."""
    chosen = [best(sweep(model)) for model in STARTS.values()]
    return [] if None in chosen else [scratch(run.model, run.lr) for run in chosen if run is not None]


def peer() -> ViT | None:
    """The ViT with the best initialisation, once all are tried."""
    chosen = best(starts())
    return chosen.model if chosen is not None and isinstance(chosen.model, ViT) else None


def kinds() -> dict[str, list[Run]]:
    """The runs of each kind, with every seed."""
    theirs = peer()
    return {"TokenFormer": seeded(token_vit()), "ViT": [] if theirs is None else seeded(theirs)}


def plan() -> list[Run]:
    """The rates, then the best of them with all seeds."""
    rates = [run for model in (token_vit(), *STARTS.values()) for run in sweep(model)]
    ends = [run for model in (token_vit(), peer()) if model is not None for run in to_the_end(model)]
    return rates + starts() + ends + [run for runs in kinds().values() for run in runs]


def ends_of(model: TokenViT | ViT) -> list[Run]:
    """The runs to the end by which rates and initialisations are chosen."""
    tried = [] if model in STARTS.values() and model != peer() else to_the_end(model)
    return sorted({*tried, *(run for run in starts() if run.model == model)}, key=lambda run: run.lr)


def report() -> None:
    """Accuracies and losses, and the rates behind them."""
    findings: dict[str, Any] = {"kinds": {}, "rates": {}}
    for name, runs in kinds().items():
        done = finished(runs)
        if done:
            size = {"parameters": parameters(done[0]), "flops": flops(done[0]), "init": done[0].model.init}
            findings["kinds"][name] = {**size, **image_scores(done)}
    for name, model in {"TokenFormer": token_vit(), **STARTS}.items():
        findings["rates"][name] = {
            steps: {f"{run.lr:g}": accuracies([run])["mean"] for run in finished(runs)}
            for steps, runs in (("an epoch", sweep(model)), ("all epochs", ends_of(model)))
        }
    write_results(HERE, findings, plan())
    draw(HERE / "curves.png", [_curves])


def _curves(axes: Any) -> None:
    for (name, runs), hue in zip(kinds().items(), (OURS, THEIRS), strict=True):
        for i, run in enumerate(finished(runs)):
            axes.plot(*curve(run, value="accuracy"), color=hue, lw=1, label=None if i else name)
    axes.set(xlabel="training FLOPs", ylabel="accuracy on held-out images")
    legend(axes)


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Accuracy by kind; the rates."""
    rows = [
        [
            name,
            f"{found['parameters']:,}",
            f"{found['flops']:.3g}",
            f"N(0, {found['init']:.2g})",
            f"{found['lr']:g}",
            *image_cells(found),
        ]
        for name, found in findings.get("kinds", {}).items()
    ]
    header = ["model", "parameters", "FLOPs", "initialisation", "rate", *IMAGE_HEADER]
    tried = [
        [
            name,
            *(
                ", ".join(f"{rate}: {number(100 * found, 1)}" for rate, found in rates[steps].items()) or "-"
                for steps in ("an epoch", "all epochs")
            ),
        ]
        for name, rates in findings.get("rates", {}).items()
    ]
    accuracy = ["model", "accuracy in % after an epoch", "after all"]
    return {"kinds": markdown(header, rows), "rates": markdown(accuracy, tried)}
