"""import-official and export-official: the checkpoints of the paper's authors to model folders and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import quiet_libraries, show_summary

if TYPE_CHECKING:
    from tokenformer.official import Conversion

commands = typer.Typer()


@commands.command(
    "import-official",
    epilog="Example: tokenformer import-official pytorch_model.bin 150M.yml models/150m --tokenizer tokenizer.json",
)
def import_official_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT.bin", help="The authors' weights.")],
    settings: Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The authors' settings for them.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The model folder to make.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json to put into the folder.")
    ] = None,
) -> None:
    """Turn a checkpoint of the paper's authors into a model folder.

    Every key and shape is checked, and the weights keep their dtype. The folder is an ordinary one, which
    transformers' Auto classes load.
    """
    from tokenformer.official import import_official

    quiet_libraries()
    show_summary("Imported", _rows(import_official(checkpoint, settings, folder, tokenizer)))


@commands.command(
    "export-official", epilog="Example: tokenformer export-official models/150m pytorch_model.bin 150M.yml"
)
def export_official_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The model folder.")],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT.bin", help="The weights to write.")],
    settings: Annotated[Path, typer.Argument(metavar="CONFIG.yml", help="The settings to write.")],
) -> None:
    """Write a model folder as a checkpoint for the paper's authors' code.

    A model that their code cannot compute is refused, for example one grown with its old tau.
    """
    from tokenformer.official import export_official

    quiet_libraries()
    show_summary("Exported", _rows(export_official(folder, checkpoint, settings)))


def _rows(done: "Conversion") -> dict[str, str]:
    vocabulary = f"{done.embedding_rows:,} rows"
    if done.vocabulary is not None:
        vocabulary += f": {done.vocabulary:,} used, {done.embedding_rows - done.vocabulary:,} padding"
    return {
        "parameters": f"{done.parameters:,}",
        "dtype": str(done.dtype).removeprefix("torch."),
        "tokens": ", ".join(f"{role} {count:,}" for role, count in done.num_tokens.items()),
        "vocabulary": vocabulary,
        "written": ", ".join(str(path) for path in done.written),
    }
