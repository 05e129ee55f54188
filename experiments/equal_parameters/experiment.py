"""TokenFormer against a Transformer with as many parameters, trained on the same bytes in the same order.

    make experiment NAME=equal_parameters

Both kinds try three rates at every size, the smallest to the end, the others for a third of the steps, then the best
and those below it to the end. The best of these has three seeds, at the middle size one. `TRIALS` are changes of
TokenFormer's defaults, tried at the smallest size.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.figures import OURS, THEIRS, draw, legend, plain_ticks
from lab.models import equal_neox
from lab.results import final, finished, losses, parameters, write_results
from lab.sizes import PROBE, RATES, contenders, models, probes, scratch, seeded, sweep, to_the_end, token_former
from lab.spec import Run, TokenFormer
from lab.tables import markdown, number, with_spread

HERE = Path(__file__).parent
WIDTHS = (64, 96, 128)  # as many tokens as the width: the shape of the paper's models
SEEDED = (64, 128)
PAPER = TokenFormer(64, width=64)  # with the paper's initialisation, of which the trials are changes
PEER = equal_neox(PAPER)
OURS_64 = token_former(64, 64)  # with ours: N(0, 0.125)
VALUES = 2 / (PAPER.layers * PAPER.width**0.5)


def changed(**changes: Any) -> TokenFormer:
    """The smallest model with other fields in its configuration."""
    return replace(PAPER, changes=tuple(changes.items()))


TRIALS: dict[str, Run] = {
    **{
        f"keys and embedding N(0, 0.02), the paper's, rate {rate:g}": scratch(PAPER, rate)
        for rate in RATES[TokenFormer]
    },
    "GPT-NeoX: everything N(0, 0.02), transformers' own, rate 4e-3": scratch(PEER, 4e-3),
    "keys and embedding N(0, 0.05)": scratch(changed(initializer_range=0.05), 2e-3),
    "keys N(0, 0.1)": scratch(replace(PAPER, keys=5.0), 2e-3),
    "embedding N(0, 0.1)": scratch(replace(changed(initializer_range=0.1), keys=0.2), 2e-3),
    "keys and embedding N(0, 0.1)": scratch(changed(initializer_range=0.1), 2e-3),
    "keys and embedding N(0, 0.125)": scratch(OURS_64, 2e-3),
    "keys and embedding N(0, 0.1), rate 4e-3": scratch(changed(initializer_range=0.1), 4e-3),
    "GPT-NeoX: everything N(0, 0.05), rate 4e-3": scratch(replace(PEER, init=0.05), 4e-3),
    **{
        f"width 128, {PROBE} steps, keys and embedding N(0, {std:g}), rate {rate:g}": Run(
            TokenFormer(128, changes=(("initializer_range", std),)), rate, PROBE
        )
        for std, rate in ((0.02, 2e-3), (0.035, 2e-3), (0.07, 2e-3), (0.1, 2e-3), (0.07, 1e-3), (0.07, 4e-3))
    },
    **{
        f"GPT-NeoX of width 148, {PROBE} steps, everything N(0, {std:g}), rate 4e-3": Run(
            replace(equal_neox(TokenFormer(128)), init=std), 4e-3, PROBE
        )
        for std in (0.02, 0.035, 0.05, 0.08)
    },
    **{
        f"keys and embedding N(0, 0.125), {change}": scratch(model, 2e-3)
        for change, model in {
            "values at half the scale": replace(OURS_64, changes=(("value_initializer_range", VALUES / 2),)),
            "values at twice the scale": replace(OURS_64, changes=(("value_initializer_range", VALUES * 2),)),
            "tau half as large": replace(OURS_64, tau=0.5),
            "tau twice as large": replace(OURS_64, tau=2.0),
            "GeLU before the norm": replace(OURS_64, kind="gelu_l2"),
        }.items()
    },
    "keys and embedding N(0, 0.125), no weight decay": replace(scratch(OURS_64, 2e-3), weight_decay=0.0),
}


def plan() -> list[Run]:
    """The trials, the rates, the best of them with all seeds."""
    kinds = [model for width in WIDTHS for model in models(width, width)]
    tried = [run for some in (probes, to_the_end) for model in kinds for run in some(model)]
    groups = [runs for width in SEEDED for model in models(width, width) for runs in contenders(model)]
    return [*TRIALS.values(), *tried, *(run for runs in groups for run in runs)]


def report() -> None:
    """A table of losses, and two figures: loss against parameters, and against the rate."""
    findings: dict[str, Any] = {"sizes": [], "trials": {}}
    for width in WIDTHS:
        ours, theirs = (seeded(model) for model in models(width, width))
        found = {}
        for name, runs in (("tokenformer", ours), ("gpt_neox", theirs)):
            done = finished(runs)
            if done:
                found[name] = {
                    "parameters": parameters(done[0]),
                    **losses(done),
                    "rates": {f"{run.lr:g}": final(run) for run in sweep(done[0].model)},
                    "to_the_end": {f"{run.lr:g}": final(run) for run in to_the_end(done[0].model)},
                }
        findings["sizes"].append({"width": width, **found})
    findings["trials"] = {name: final(run) for name, run in TRIALS.items()}
    write_results(HERE, findings, plan())
    draw(HERE / "loss.png", [_sizes(findings), _rates(findings)])


def _sizes(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for name, colour in (("tokenformer", OURS), ("gpt_neox", THEIRS)):
            rows = [size[name] for size in findings["sizes"] if name in size]
            means = [row["validation"]["mean"] for row in rows]
            axes.plot([row["parameters"] / 1e6 for row in rows], means, "o-", color=colour, label=name)
        axes.set(xscale="log", xlabel="million parameters", ylabel="validation loss, nats a byte")
        plain_ticks(axes.xaxis, (0.3, 0.5, 0.7, 1))
        legend(axes)

    return panel


def _rates(findings: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for name, colour in (("tokenformer", OURS), ("gpt_neox", THEIRS)):
            for size in findings["sizes"]:
                points = {rate: loss for rate, loss in size.get(name, {}).get("rates", {}).items() if loss}
                axes.plot([float(rate) for rate in points], list(points.values()), ".-", color=colour)
        axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss after the trial of a rate")
        plain_ticks(axes.xaxis, sorted({rate for rates in RATES.values() for rate in rates}))

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by size; the rates; the trials."""
    sizes, rates = [], []
    for size in findings["sizes"]:
        ours, theirs = size.get("tokenformer"), size.get("gpt_neox")
        if ours and theirs:
            sizes.append(
                [
                    f"{ours['parameters']:,} / {theirs['parameters']:,}",
                    with_spread(ours["validation"]),
                    with_spread(theirs["validation"]),
                    with_spread(ours["test"]),
                    with_spread(theirs["test"]),
                    f"{ours['lr']:g} / {theirs['lr']:g}",
                ]
            )
        for name, kind in (("TokenFormer", ours), ("GPT-NeoX", theirs)):
            if kind:
                short, end = (
                    ", ".join(f"{rate}: {number(loss)}" for rate, loss in kind[steps].items())
                    for steps in ("rates", "to_the_end")
                )
                rates.append([name, f"{kind['parameters']:,}", "-" if short == end else short, end])
    trials = [[name, number(loss)] for name, loss in findings["trials"].items()]
    header = ["parameters, ours / theirs", "validation, ours", "GPT-NeoX", "test, ours", "GPT-NeoX", "rates"]
    return {
        "sizes": markdown(header, sizes),
        "rates": markdown(["model", "parameters", f"validation loss by rate, {PROBE} steps", "to the end"], rates),
        "trials": markdown(["change", "validation loss"], trials),
    }
