"""plan: whether a recipe's model should grow, when, and what a budget buys otherwise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import BadCommandError, say, short, show_summary, show_table

if TYPE_CHECKING:
    from tokenformer.planning import Climb, Plan, ScalingLaw

commands = typer.Typer()


@commands.command("plan", epilog="Example: tokenformer plan recipes/mine.yaml --flops 1e15 --runs runs/a --runs runs/b")
def plan_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Its model is the smallest size.")],
    flops: Annotated[float | None, typer.Option(help="The budget: FLOPs of training.")] = None,
    hours: Annotated[float | None, typer.Option(help="Or hours, with --speed.")] = None,
    speed: Annotated[float | None, typer.Option(help="FLOPs per second that your hardware reaches.")] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Finished runs to fit a law to; repeat the option.")
    ] = None,
    law: Annotated[str | None, typer.Option(help="Or a published law: besiroglu or hoffmann.")] = None,
    largest: Annotated[float | None, typer.Option(metavar="PARAMETERS", help="No size beyond this.")] = None,
    to_largest: Annotated[bool, typer.Option("--to-largest", help="End at the largest size.")] = False,
    anytime: Annotated[
        bool, typer.Option("--anytime", help="A ladder to stop anywhere: near the best size at every budget.")
    ] = False,
    units: Annotated[
        float | None, typer.Option("--tokens", metavar="COUNT", help="How many tokens (or images) you have.")
    ] = None,
    by: Annotated[str, typer.Option(help="What doubles: tokens or depth.")] = "tokens",
    transfer: Annotated[
        float | None,
        typer.Option(help="The share of training that survives a doubling; 1: all.", show_default="from runs, or 0.86"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a recipe that does it.")] = None,
) -> None:
    """Find the best ladder for a budget, by a scaling law, and say plainly when not to grow.

    The law is fitted to finished runs of yours, or a published one. Losses are predictions: what the law says, with its
    uncertainty where runs were fitted.
    """
    budget = _budget(flops, hours, speed)
    if bool(runs) == (law is not None):
        raise BadCommandError(f"{'both' if runs else 'neither'} of --runs and --law given; choose one of them")
    if out is not None and out.exists():
        raise BadCommandError(f"--out {out} exists; choose a new name")
    if to_largest and largest is None:
        raise BadCommandError("--to-largest was given without --largest; say how large")

    from tokenformer.errors import BadRequestError, did_you_mean
    from tokenformer.io import replace_file
    from tokenformer.planning import PUBLISHED, fit, fitted_transfer, make_plan, read_finished
    from tokenformer.planning.plan import GROW_BY, TRANSFER
    from tokenformer.training import load_recipe

    if by not in GROW_BY:
        raise BadRequestError(f"--by {by} is not known; {did_you_mean(by, GROW_BY)}")
    if law is not None and law not in PUBLISHED:
        raise BadRequestError(f"--law {law} is not known; {did_you_mean(law, PUBLISHED)}")
    finished, ladders = read_finished(runs or [])
    found = fit(finished) if runs else PUBLISHED[law or ""]
    if transfer is None:
        transfer = fitted_transfer(found, ladders) if ladders else TRANSFER
    plan = make_plan(
        load_recipe(recipe),
        found,
        budget,
        transfer=transfer,
        by=by,  # type: ignore[arg-type]
        largest=largest,
        at_largest=to_largest,
        anytime=anytime,
        units=units,
    )
    _show(plan, found, budget, speed)
    if out is not None:
        replace_file(out, plan.to_yaml())
        show_summary("Written", {"recipe": str(out), "train it": f"tokenformer train {out}"})


def _budget(flops: float | None, hours: float | None, speed: float | None) -> float:
    if (flops is None) == (hours is None) or (hours is None) != (speed is None):
        raise BadCommandError("give the budget as --flops, or as --hours with --speed")
    budget = flops if flops is not None else (hours or 0.0) * 3600 * (speed or 0.0)
    if not 0 < budget < float("inf"):
        raise BadCommandError(f"the budget is {budget:g} FLOPs; a positive number is needed")
    return budget


def _show(plan: "Plan", law: "ScalingLaw", budget: float, speed: float | None) -> None:
    unit = plan.recipe.data.unit
    show_table(
        ["from scratch", "parameters", "steps", unit, "loss"],
        [
            (
                climb.rungs[0].size.name,
                f"{climb.rungs[0].size.parameters:,}",
                f"{plan.steps(climb)[0]:,}",
                short(climb.rungs[0].seen),
                _loss(plan, climb),
            )
            for climb in plan.scratch
        ],
    )
    typer.echo()
    if len(plan.climb.rungs) > 1:
        show_table(
            ["grown", "parameters", "steps", unit, "loss", "a step before\nis worth", "and costs"],
            [
                (
                    rung.size.name,
                    f"{rung.size.parameters:,}",
                    f"{steps:,}",
                    short(rung.seen),
                    f"{rung.loss:.3f}",
                    "" if rung.worth is None else f"{rung.worth:.2f}",
                    "" if rung.cost is None else f"{rung.cost:.2f}",
                )
                for rung, steps in zip(plan.climb.rungs, plan.steps(plan.climb), strict=True)
            ],
            "Worth and costs are in steps of this stage's size. Growth pays where a step is worth more than it costs.",
        )
        typer.echo()
    if law.covariance is None:
        say("note", "the losses are those of the law's own text and tokens; compare them with each other only")
    alpha, beta = law.coefficients[3:]
    rows = {
        "budget": f"{budget:.3g} FLOPs" + (f", {budget / speed / 3600:.3g} h" if speed else ""),
        "law": f"{law.name}: parameters^-{alpha:.2f}, {unit}^-{beta:.2f}",
        "survives a doubling": f"{plan.transfer:.0%} of training",
        "from scratch"
        if plan.at_largest
        else "best from scratch": f"{plan.best_from_scratch.rungs[0].size.name}: {_loss(plan, plan.best_from_scratch)}",
        "smallest size, trained on": _loss(plan, plan.scratch[0]),
        "grown": _loss(plan, plan.climb),
    }
    show_summary("Grow" if plan.grows else "Do not grow", {**rows, "because": _because(plan)})


def _loss(plan: "Plan", climb: "Climb") -> str:
    deviation = plan.deviation(climb)
    return f"{climb.loss:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def _because(plan: "Plan") -> str:
    if len(plan.climb.rungs) == 1:
        return f"no growth step is worth its cost with this budget; train {plan.best_from_scratch.rungs[0].size.name}"
    if plan.anytime:
        return "it may be stopped anywhere on the way"
    gain = plan.best_from_scratch.loss - plan.climb.loss
    deviation = plan.deviation(plan.best_from_scratch, plan.climb)
    unsure = "" if deviation is None else f" ± {deviation:.3f}"
    if not plan.grows:
        return (
            f"growing gains {gain:.3f}{unsure}, too little to matter; train {plan.best_from_scratch.rungs[0].size.name}"
        )
    peer = "that size" if plan.at_largest else "the best size"
    return f"growing ends {gain:.3f}{unsure} below {peer} from scratch"
