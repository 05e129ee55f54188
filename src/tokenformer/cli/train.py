"""train: a recipe from its first stage to its last, carried on from wherever it stands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .outcome import say
from .summary import WIDEST_TABLE, show_summary

if TYPE_CHECKING:
    from ..training import Recipe

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
        bool, typer.Option("--dry-run", help="Print the resolved recipe and what it would cost, and stop.")
    ] = False,
) -> None:
    """Train a model up its ladder of growth stages.

    The same command carries a run on after any end. With torchrun: torchrun --nproc_per_node=2 -m tokenformer train …
    """
    from ..training import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        from ..training.dry_run import describe

        described = list(describe(loaded))
        typer.echo(loaded.to_yaml())
        for title, rows in described:
            show_summary(title, rows)
    else:
        _train(loaded)


def _train(recipe: "Recipe") -> None:
    from accelerate import PartialState
    from rich.console import Console

    from ..training import train
    from ..training.run import StoppedError
    from ..training.summary import stage_table
    from .summary import quiet_libraries

    quiet_libraries()
    try:
        model = train(recipe)
    except StoppedError as stop:
        if PartialState().is_main_process:
            say("stopped", stop)
        raise typer.Exit(stop.exit_code) from None
    if PartialState().is_main_process:
        run = model.parent.parent
        Console(width=WIDEST_TABLE).print(stage_table(run))
        show_summary(
            "Trained",
            {"model": str(model), "metrics": str(run / "metrics.jsonl"), "draw it": f"tokenformer report {run}"},
        )
