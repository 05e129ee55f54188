"""A Transformer adopted and grown by tokens, against training it on, widening it, and a TokenFormer from scratch.

    make experiment NAME=adopt

A GPT-NeoX trains for BASE steps at a constant rate; it is the one that net2net starts from. From there every way gets
as many FLOPs, by the cost model, has the best of its own rates, and decays over its last fifth. The TokenFormer gets
the FLOPs of the GPT-NeoX on top. Where Adam starts afresh, the rate rises again over REWARM steps. The LONG budget has
one seed, and the ways that are ahead.
"""

import copy
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
# A budget is so many steps of the adopted model, and for the others as many FLOPs. Rates are those of CHOSEN.
BASE, SHORT, CHOSEN, LONG = 1200, 400, 1000, 2500
BUDGETS = (SHORT, CHOSEN, LONG)
SMALL, ANEW = neox(72), token_former(SIZES[1])
QKV, FFN = "*.query_key_value", "*.dense_h_to_4h"
REWARM = 100
# About twice the parameters of the GPT-NeoX, embedding left out, and all within 2 % of each other. Split copies whole
# sets of tokens, so it is tried where there are to be twice as many: in the FFN alone.
BOTH = Growth(BASE, method="rotate", sizes=((QKV, 216), (FFN, 437)), adopts=("ffn", "qkv"), rewarm=REWARM)
ROTATED = Growth(BASE, method="rotate", sizes=((FFN, 758),), adopts=("ffn",), rewarm=REWARM)
SPLIT = replace(ROTATED, method="split")
AS_IT_IS = Growth(BASE, method="none")
ON, ADOPTED, FFN_ADOPTED, WIDENED = "trained on", "adopted, rotate", "FFN adopted, rotate", "widened by Net2Net"
SCRATCH = "TokenFormer from scratch"
# What happens at BASE, with which seeds, and whose rate is taken.
WAYS: dict[str, tuple[Growth, tuple[int, ...], str]] = {
    ON: (AS_IT_IS, SEEDS, ON),
    ADOPTED: (BOTH, SEEDS, ADOPTED),
    FFN_ADOPTED: (ROTATED, SEEDS, FFN_ADOPTED),
    WIDENED: (Growth(BASE, method="net2net", sizes=(("ffn", 757),), rewarm=REWARM), SEEDS, WIDENED),
    "trained on, Adam afresh": (replace(AS_IT_IS, adam="reset", rewarm=REWARM), SEEDS[:1], ON),
    # A token or two more than it comes to, whatever the weights are.
    "FFN adopted, hardly grown": (replace(ROTATED, method="zero", sizes=((FFN, 362),)), SEEDS[:1], FFN_ADOPTED),
    "FFN adopted, split": (SPLIT, SEEDS[:1], FFN_ADOPTED),
    "FFN adopted with one token of ballast, split": (
        replace(SPLIT, sizes=((FFN, 757),), ballast="single"),
        SEEDS[:1],
        FFN_ADOPTED,
    ),
}
LOSSES = ("loss", "without_values", "dropped", "others_dropped")
RATED = (ON, ADOPTED, FFN_ADOPTED, WIDENED, SCRATCH)
LONGER = (ON, FFN_ADOPTED, WIDENED)


@cache
def lengths(way: str) -> dict[int, int]:
    """For every budget the steps that a way may make, after BASE or from scratch."""
    adopted = Run(SMALL, 0.0, BASE + 1, growths=(BOTH,))
    one = flops(adopted, since=BASE)
    if way == SCRATCH:
        base, step = flops(adopted, BASE), flops(Run(ANEW, 0.0, 1))
        return {budget: round((base + budget * one) / step) for budget in BUDGETS}
    step = flops(Run(SMALL, 0.0, BASE + 1, growths=WAYS[way][:1]), since=BASE)
    return {budget: round(budget * one / step) for budget in BUDGETS}


def branch(way: str, budget: int, base_rate: float, seed: int, rate: float) -> Run:
    """From BASE on at a rate of its own, or from scratch. All budgets have their steps in common until one decays."""
    steps = lengths(way)
    if way == SCRATCH:
        shorter = [PROBE, *(n for b, n in steps.items() if b < budget)]
        marks = tuple(Run(ANEW, rate, n).decay_start for n in shorter)
        return Run(ANEW, rate, steps[budget], seed, marks=marks)
    grown, host = (replace(WAYS[way][0], lr=rate),), like_the_smallest(SMALL)
    runs = {b: Run(host, base_rate, BASE + n, seed, grown, decay=n / 5 / (BASE + n)) for b, n in steps.items()}
    return replace(runs[budget], marks=(BASE, *(run.decay_start for b, run in runs.items() if b < budget)))


def rates(way: str, base_rate: float) -> dict[Run, float]:
    """The way at the rates that models of its kind are tried at, with the first seed."""
    kind = TokenFormer if way in (ADOPTED, FFN_ADOPTED, SCRATCH) else NeoX
    tried = at_rates(lambda rate: branch(way, CHOSEN, base_rate, SEEDS[0], rate), RATES[kind])
    return {run: run.growths[0].lr if run.growths else run.lr for run in tried}


def runs(way: str) -> dict[int, list[Run]]:
    """For every budget the runs with all seeds; empty as long as the rates are not known."""
    base_rate = rate_of(models(SIZES[0])[1])
    if base_rate is None:
        return {}
    _, seeds, rated = WAYS.get(way, (None, SEEDS, SCRATCH))
    tried = rates(rated, base_rate)
    chosen = best(tried)
    if chosen is None:
        return {}
    seeded = {SHORT: seeds, CHOSEN: seeds, LONG: seeds[:1] if way in LONGER else ()}
    rate = tried[chosen]
    return {budget: [branch(way, budget, base_rate, seed, rate) for seed in some] for budget, some in seeded.items()}


def plan() -> list[Run]:
    """The rates, then all ways."""
    peer = models(SIZES[0])[1]
    base_rate, before = rate_of(peer), [run for some in (probes, to_the_end) for run in some(peer)]
    before += [] if base_rate is None else [run for way in RATED for run in rates(way, base_rate)]
    return before + [run for way in (*WAYS, SCRATCH) for budget in runs(way).values() for run in budget]


def tokens_of(model: Any) -> dict[str, tuple[Pattention, dict[str, torch.Tensor]]]:
    """The layers of an adopted model that have ballast, by name, with the places of ballast, of the tokens that came
    from the host, and of those that came with growth."""
    found = {}
    for name, entry in model.config.adopted.layers.items():
        if entry["ballast"]:
            whole = f"{model.base_model_prefix}.{name}"
            layer = model.get_submodule(whole)
            step = model.last_growth.layers[whole]
            places = step.before * torch.arange(step.copies)[:, None] + torch.arange(step.before)  # [copies, tokens]
            host, ballast = (part.flatten() for part in places.tensor_split([step.before - entry["ballast"]], dim=1))
            new = torch.arange(step.copies * step.before, step.after)
            found[whole] = layer, {"ballast": ballast, "host": host, "new": new}
    return found


@torch.no_grad()
def ballast_use(run: Run) -> dict[str, Any]:
    """What the tokens do at the end of a run that were there for the norm only when the model was adopted.

    Of every layer: the root mean square of what they add to its output over that of the output, on validation text, and
    the mean norms of the values of ballast, of the host's tokens and of new ones. Of the model: the loss as it is, with
    the values of ballast at zero, without ballast, and without as many of the host's tokens. Without tokens of `single`
    the norm would be nothing, so that is left out.
    """
    model, task = finished_model(run), task_of(run)
    layers, hooks = [], []
    for layer, places in tokens_of(model).values():

        def note(module: Any, inputs: Any, output: Any, places: dict[str, torch.Tensor] = places) -> None:
            # Values of zero elsewhere leave what these add.
            values = torch.zeros_like(module.value_tokens)
            values[places["ballast"]] = module.value_tokens[places["ballast"]]
            added = reference(inputs[0], module.key_tokens, values, module.tau, module.kind, key_bias=module.key_bias)
            norms = module.value_tokens.norm(dim=1)
            means = {kind: norms[some].mean().item() if len(some) else None for kind, some in places.items()}
            layers.append({"share": (added.square().mean() / output.square().mean()).sqrt().item(), "values": means})

        hooks.append(layer.register_forward_hook(note))
    model(input_ids=held_out(run.text, "validation", run.context, 32), use_cache=False)
    for hook in hooks:
        hook.remove()

    def loss_without(kind: str, parts: tuple[str, ...]) -> float:
        changed = copy.deepcopy(model)
        for layer, places in tokens_of(changed).values():
            drawn = torch.randperm(len(places[kind]), generator=torch.Generator().manual_seed(run.seed))
            for part in parts:
                getattr(layer, part)[places[kind][drawn[: len(places["ballast"])]]] = 0
        return score(changed, task, "validation", SOME)["loss"]

    found = {"layers": layers, "loss": score(model, task, "validation", SOME)["loss"]}
    found["without_values"] = loss_without("ballast", ("value_tokens",))
    if run.growths[0].ballast == "spread":
        for kind, name in (("ballast", "dropped"), ("host", "others_dropped")):
            found[name] = loss_without(kind, ("value_tokens", "key_tokens", "key_bias"))
    return found


def look() -> None:
    """Note what became of ballast, of all runs that end here with some."""
    for run in (run for way in WAYS for run in runs(way).get(CHOSEN, [])):
        end = run.segments()[-1]
        if run.growths[0].adopts and trained(end) is not None and last(run, "ballast") is None:
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
            grown = done[0].growths and done[0].growths[0].method != "none"
            found["jump"] = [rise_at_growth(run) for run in done] if grown else []
            how = {"flops": flops(done[0]), "steps": lengths(way)[budget]}
            rate = done[0].learning_rate(done[0].decay_start)  # after growth
            found["budgets"][str(budget)] = {**how, **losses(done), "lr": rate}
            uses = [use for run in done if (use := last(run, "ballast")) is not None]
            if uses:
                ballast[way] = _mean_use(uses)
    base_rate = rate_of(models(SIZES[0])[1])
    by_rate = {}
    for way in RATED if base_rate is not None else ():
        tried = rates(way, base_rate)
        by_rate[way] = {f"{tried[run]:g}": final(run) for run in sorted(finished(tried), key=lambda run: tried[run])}
    write_results(HERE, {"ways": ways, "rates": by_rate, "ballast": ballast}, plan())
    draw(HERE / "losses.png", [_losses(ways), _ballast(ballast)])


def _mean_use(uses: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds."""
    whole = {key: spread([use[key] for use in uses]) for key in LOSSES if key in uses[0]}
    layers = []
    for layer in zip(*(use["layers"] for use in uses), strict=True):
        kinds = [kind for kind, value in layer[0]["values"].items() if value is not None]
        values = {kind: spread([use["values"][kind] for use in layer]) for kind in kinds}
        layers.append({"share": spread([use["share"] for use in layer]), "values": values})
    return {**whole, "layers": layers}


def _colour(way: str) -> str:
    return colour([*RATED, *(way for way in WAYS if way not in RATED)].index(way))


def _losses(ways: dict[str, Any]) -> Any:
    def panel(axes: Any) -> None:
        for way, found in ((way, ways[way]) for way in RATED if way in ways):
            along = zip(*curve(runs(way)[int(list(found["budgets"])[-1])][0]), strict=True)
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
        axes.set_ylim(-0.02, 1.5 * axes.get_ylim()[1])  # room for the legend
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
                *(f"{with_spread(row['validation'])} ({row['steps']})" if row else "-" for row in by_budget),
                with_spread(found["budgets"].get(str(CHOSEN), {}).get("test")),
            ]
        )
    header = [f"from {BASE} steps of a GPT-NeoX on", "parameters without embedding", "loss at growth"]
    header += [f"{budget} steps' FLOPs (steps)" for budget in BUDGETS]
    by_rate = [
        [way, rate, number(loss)] for way, tried in findings.get("rates", {}).items() for rate, loss in tried.items()
    ]
    layers, without = [], []
    for way, found in findings.get("ballast", {}).items():
        without.append([way, *(with_spread(found.get(key)) for key in LOSSES)])
        for i, layer in enumerate(found["layers"], start=1):
            norms = [with_spread(layer["values"].get(kind)) for kind in ("ballast", "host", "new")]
            layers.append([way, str(i), with_spread(layer["share"]), *norms])
    return {
        "losses": markdown([*header, f"test, {CHOSEN}"], rows),
        "rates": markdown(["way", "rate after growth", "validation"], by_rate),
        "ballast": markdown(
            ["way", "block", "part of the FFN's output", "values of ballast", "of the host's tokens", "of new ones"],
            layers,
        ),
        "without": markdown(
            ["way", "loss", "values of ballast zero", "ballast dropped", "as many of the host's dropped"], without
        ),
    }
