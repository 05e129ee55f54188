"""train: a recipe from its first stage to its last, resumed from wherever it stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import say, show_summary, show_table

if TYPE_CHECKING:
    from tokenformer.training import Recipe

commands = typer.Typer()


@commands.command(
    "train",
    epilog="Example: tokenformer train recipes/demo.yaml training.learning_rate=1e-3 training.output_dir=runs/mine",
)
def train_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]…", help="What differs from the recipe.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done and what it would cost, and stop.")
    ] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the recipe with all that it leaves to defaults, and stop.")
    ] = False,
) -> None:
    """Train a model up its ladder of growth stages.

    Run the same command again to resume after any interruption. With torchrun: torchrun --nproc_per_node=2 -m
    tokenformer train …

    Tried with transformers 5.16 to 5.23.
    """
    from .recipe_keys import check_keys

    check_keys(recipe, overrides or [])

    from tokenformer.training import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if resolved:
        typer.echo(loaded.to_yaml(), nl=False)
    if dry_run:
        from tokenformer.training.dry_run import describe

        for title, rows in list(describe(loaded)):
            show_summary(title, rows)
    if not (dry_run or resolved):
        _train(loaded)


def _train(recipe: "Recipe") -> None:
    from accelerate import PartialState

    from tokenformer.training import train
    from tokenformer.training.run import StoppedError
    from tokenformer.training.summary import has_metrics, stage_table

    from .terminal import quiet_libraries

    quiet_libraries()
    try:
        model = train(recipe)
    except StoppedError as stop:
        if PartialState().is_main_process:
            say("stopped", stop)
        raise typer.Exit(stop.exit_code) from None
    if PartialState().is_main_process:
        run = model.parent.parent
        rows = {"model": str(model)}
        if has_metrics(run):
            show_table(*stage_table(run))
            rows |= {"metrics": str(run / "metrics.jsonl"), "draw it": f"tokenformer report {run}"}
        else:
            say("warning", f"{run}/metrics.jsonl is gone, so there is nothing to tell or draw of the stages")
        show_summary("Trained", rows)
