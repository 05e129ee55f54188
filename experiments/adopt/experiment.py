"""A Transformer adopted and grown by tokens, against training it on, widening it, and a TokenFormer from scratch.

    make experiment NAME=adopt

A GPT-NeoX trains for BASE steps at a constant rate; it is the one that net2net starts from. From there every way gets
as many FLOPs, by the cost model, and decays over its last fifth. The TokenFormer gets those of the GPT-NeoX on top.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lab.data import held_out
from lab.figures import colour, draw, legend
from lab.results import (
    best,
    curve,
    final,
    finished,
    flops,
    last,
    losses,
    non_embedding,
    rise_at_growth,
    spread,
    write_results,
)
from lab.sizes import (
    PROBE,
    RATES,
    SEEDS,
    SIZES,
    at_rates,
    like_the_smallest,
    models,
    neox,
    probes,
    rate_of,
    to_the_end,
    token_former,
)
from lab.spec import Growth, NeoX, Run, TokenFormer
from lab.tables import change, markdown, number, with_spread
from lab.train import SOME, add_to_result, finished_model, score, task_of, trained

from tokenformer.pattention import Pattention
from tokenformer.pattention.functional import reference

HERE = Path(__file__).parent
BASE, BUDGETS = 1200, (400, 1000)  # a budget is so many steps of the adopted model, and for the others as many FLOPs
SMALL, ANEW = neox(72), token_former(SIZES[1])
QKV, FFN = "*.query_key_value", "*.dense_h_to_4h"
# About twice the parameters of the GPT-NeoX, embedding left out, and all within 2 % of each other. Split copies whole
# sets of tokens, so it is tried where there are to be twice as many: in the FFN alone.
BOTH = Growth(BASE, method="rotate", sizes=((QKV, 216), (FFN, 437)), adopts=("ffn", "qkv"))
ROTATED = Growth(BASE, method="rotate", sizes=((FFN, 758),), adopts=("ffn",))
ADOPTED, WIDENED = "adopted, rotate", "widened by Net2Net"
WAYS: dict[str, tuple[Growth | None, tuple[int, ...]]] = {
    "trained on at its size": (None, SEEDS),
    ADOPTED: (BOTH, SEEDS),
    WIDENED: (Growth(BASE, method="net2net", sizes=(("ffn", 757),)), SEEDS),
    "FFN adopted, rotate": (ROTATED, SEEDS[:1]),
    "FFN adopted, split": (replace(ROTATED, method="split"), SEEDS[:1]),
    "FFN adopted with one token of ballast, split": (
        replace(ROTATED, method="split", sizes=((FFN, 757),), ballast="single"),
        SEEDS[:1],
    ),
}
SCRATCH = "TokenFormer from scratch"


def growths(way: str) -> tuple[Growth, ...]:
    """What happens to the GPT-NeoX at BASE."""
    growth = WAYS[way][0]
    return () if growth is None else (growth,)


@cache
def lengths(way: str) -> dict[int, int]:
    """For every budget the steps that a way may make, after BASE or from scratch."""
    adopted = Run(SMALL, 0.0, BASE + 1, growths=growths(ADOPTED))
    one = flops(adopted, since=BASE)
    if way == SCRATCH:
        base, step = flops(adopted, BASE), flops(Run(ANEW, 0.0, 1))
        return {budget: round((base + budget * one) / step) for budget in BUDGETS}
    step = flops(Run(SMALL, 0.0, BASE + 1, growths=growths(way)), since=BASE)
    return {budget: round(budget * one / step) for budget in BUDGETS}


def branch(way: str, budget: int, base_rate: float, seed: int, rate: float | None = None) -> Run:
    """From BASE on, at a `rate` of its own if it has one. All budgets have their steps in common until one decays."""
    grown = tuple(replace(growth, lr=rate) for growth in growths(way))
    host = like_the_smallest(SMALL)
    runs = {b: Run(host, base_rate, BASE + n, seed, grown, decay=n / 5 / (BASE + n)) for b, n in lengths(way).items()}
    return replace(runs[budget], marks=(BASE, *(run.decay_start for b, run in runs.items() if b < budget)))


def rates(way: str, base_rate: float) -> list[Run]:
    """A grown model at the rates that models of its kind are tried at, with the first seed."""
    kind = TokenFormer if way == ADOPTED else NeoX
    return at_rates(lambda rate: branch(way, max(BUDGETS), base_rate, SEEDS[0], rate), RATES[kind])


def runs(way: str) -> dict[int, list[Run]]:
    """For every budget the runs with all seeds; empty as long as the rates are not known."""
    if way == SCRATCH:
        rate = rate_of(ANEW)
        if rate is None:
            return {}
        steps = lengths(way)
        marks = {budget: [PROBE, *(n for b, n in steps.items() if b < budget)] for budget in BUDGETS}
        return {
            budget: [
                Run(ANEW, rate, steps[budget], seed, marks=tuple(Run(ANEW, rate, n).decay_start for n in marks[budget]))
                for seed in SEEDS
            ]
            for budget in BUDGETS
        }
    base_rate = rate_of(models(SIZES[0])[1])
    if base_rate is None:
        return {}
    growth, seeds = WAYS[way]
    own_rate = None
    if growth is not None:
        chosen = best(rates(ADOPTED if growth.adopts else WIDENED, base_rate))
        if chosen is None:
            return {}
        own_rate = chosen.growths[0].lr
    return {budget: [branch(way, budget, base_rate, seed, own_rate) for seed in seeds] for budget in BUDGETS}


def plan() -> list[Run]:
    """The rates, then all ways."""
    base_rate = rate_of(models(SIZES[0])[1])
    before = [run for model in (models(SIZES[0])[1], ANEW) for some in (probes, to_the_end) for run in some(model)]
    before += [] if base_rate is None else [run for way in (ADOPTED, WIDENED) for run in rates(way, base_rate)]
    return before + [run for way in (*WAYS, SCRATCH) for budget in runs(way).values() for run in budget]


def ballast_of(model: Any) -> dict[str, tuple[Pattention, torch.Tensor]]:
    """The layers of an adopted and grown model that have ballast, by name, with the places of those tokens."""
    found = {}
    for name, step in model.last_growth.layers.items():
        entry = model.config.quantization_config.layers[name.removeprefix(f"{model.base_model_prefix}.")]
        if entry["ballast"]:
            places = torch.arange(step.before - entry["ballast"], step.before)
            copies = step.before * torch.arange(step.copies)
            found[name] = model.get_submodule(name), (copies[:, None] + places).flatten()
    return found


@torch.no_grad()
def ballast_use(run: Run) -> dict[str, Any]:
    """What the tokens do at the end of a run that were there for the norm only when the model was adopted.

    Of every layer: the root mean square of what they add to its output over that of the output, on validation text, and
    the mean norm of their values over that of all others. Of the model: the loss as it is, with their values at zero,
    which leaves the norm as it is, and without these tokens.
    """
    model, task = finished_model(run), task_of(run)
    ballast, layers, hooks = ballast_of(model), [], []
    for layer, places in ballast.values():

        def note(module: Any, inputs: Any, output: Any, places: torch.Tensor = places) -> None:
            # Values of zero elsewhere leave what these add.
            values = torch.zeros_like(module.value_tokens)
            values[places] = module.value_tokens[places]
            tokens = (module.key_tokens, values, module.tau, module.kind)
            added = reference(inputs[0], *tokens, key_bias=module.key_bias)
            norms = module.value_tokens.norm(dim=1)
            others = torch.ones_like(norms, dtype=torch.bool).index_fill_(0, places, False)
            share = (added.square().mean() / output.square().mean()).sqrt().item()
            layers.append({"share": share, "values": (norms[places].mean() / norms[others].mean()).item()})

        hooks.append(layer.register_forward_hook(note))
    model(input_ids=held_out(run.text, "validation", run.context, 32), use_cache=False)
    for hook in hooks:
        hook.remove()
    found = {"layers": layers, "loss": score(model, task, "validation", SOME)["loss"]}
    for layer, places in ballast.values():
        layer.value_tokens[places] = 0
    found["without_values"] = score(model, task, "validation", SOME)["loss"]
    for layer, places in ballast.values():
        layer.key_tokens[places] = 0
        layer.key_bias[places] = 0
    found["dropped"] = score(model, task, "validation", SOME)["loss"]
    return found


def look() -> None:
    """Note what became of ballast, of all runs that end here with some."""
    for run in (run for way in WAYS for run in runs(way).get(max(BUDGETS), [])):
        end = run.segments()[-1]
        if run.growths and run.growths[0].adopts and trained(end) is not None and last(run, "ballast") is None:
            add_to_result(end, {"kind": "ballast", **ballast_use(run)})


def report() -> None:
    """Losses by way and budget, the rates behind them, how far growth moved the loss, and what became of ballast."""
    ways: dict[str, Any] = {}
    ballast: dict[str, Any] = {}
    for way in (*WAYS, SCRATCH):
        for budget, tried in runs(way).items():
            done = finished(tried)
            if not done:
                continue
            found = ways.setdefault(way, {"non_embedding": non_embedding(done[0]), "budgets": {}})
            found["jump"] = [rise_at_growth(run) for run in done] if done[0].growths else []
            how = {"flops": flops(done[0]), "steps": lengths(way)[budget]}
            rate = done[0].learning_rate(done[0].decay_start)  # after growth
            found["budgets"][str(budget)] = {**how, **losses(done), "lr": rate}
            uses = [use for run in done if (use := last(run, "ballast")) is not None]
            if uses:
                ballast[way] = _mean_use(uses)
    base_rate = rate_of(models(SIZES[0])[1])
    by_rate = {}
    for way in (ADOPTED, WIDENED) if base_rate is not None else ():
        tried = sorted(finished(rates(way, base_rate)), key=lambda run: run.growths[0].lr or 0.0)
        by_rate[way] = {f"{run.growths[0].lr:g}": final(run) for run in tried}
    write_results(HERE, {"ways": ways, "rates": by_rate, "ballast": ballast}, plan())
    draw(HERE / "losses.png", [_losses(ways), _ballast(ballast)])


def _mean_use(uses: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds."""
    whole = {key: spread([use[key] for use in uses]) for key in ("loss", "without_values", "dropped")}
    layers = zip(*(use["layers"] for use in uses), strict=True)
    return {**whole, "layers": [{key: spread([use[key] for use in layer]) for key in layer[0]} for layer in layers]}


def _colour(way: str) -> str:
    return colour([*WAYS, SCRATCH].index(way))


def _losses(ways: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for way, found in ways.items():
            along = zip(*curve(runs(way)[max(BUDGETS)][0]), strict=True)
            begin = flops(Run(SMALL, 0.0, BASE))
            axes.plot(*zip(*[point for point in along if point[0] >= begin], strict=True), color=_colour(way), lw=0.6)
            rows = found["budgets"].values()
            means = [row["validation"]["mean"] for row in rows]
            axes.plot([row["flops"] for row in rows], means, "o", color=_colour(way), label=way)
        axes.set(xlabel="training FLOPs in all", ylabel="validation loss, nats a byte")
        legend(axes)

    return panel


def _ballast(ballast: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for way, found in ballast.items():
            shares = {str(i): layer["share"]["mean"] for i, layer in enumerate(found["layers"], start=1)}
            axes.plot(list(shares), list(shares.values()), "o-", color=_colour(way), label=way)
        axes.set(xlabel="block", ylabel="ballast's part of the FFN's output")
        legend(axes)

    return panel


def tables(findings: dict[str, Any]) -> dict[str, str]:
    """Losses by way and budget; rates; ballast by layer, and the loss without it."""
    rows = []
    for way, found in findings.get("ways", {}).items():
        by_budget = [found["budgets"].get(str(budget), {}) for budget in BUDGETS]
        rows.append(
            [
                way,
                f"{found['non_embedding']:,}",
                change(max(found["jump"], key=abs)) if found["jump"] else "-",
                *(f"{with_spread(row.get('validation'))} ({row.get('steps', '-')})" for row in by_budget),
                with_spread(by_budget[-1].get("test")),
            ]
        )
    header = [f"from {BASE} steps of a GPT-NeoX on", "parameters without embedding", "loss at growth"]
    header += [f"{budget} steps' FLOPs (steps)" for budget in BUDGETS]
    by_rate = [
        [way, rate, number(loss)] for way, tried in findings.get("rates", {}).items() for rate, loss in tried.items()
    ]
    layers, without = [], []
    for way, found in findings.get("ballast", {}).items():
        without.append([way, *(with_spread(found[key]) for key in ("loss", "without_values", "dropped"))])
        for i, layer in enumerate(found["layers"], start=1):
            layers.append([way, str(i), with_spread(layer["share"]), with_spread(layer["values"])])
    return {
        "losses": markdown([*header, "test"], rows),
        "rates": markdown(["way", "rate after growth", "validation"], by_rate),
        "ballast": markdown(["way", "block", "part of the FFN's output", "norm of its values"], layers),
        "without": markdown(["way", "loss", "values of ballast zero", "ballast dropped"], without),
    }
