"""quantize: a saved model into one whose tokens are integers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import BadCommandError, TrustRemoteCode, quiet_libraries, short, show_summary, show_table

if TYPE_CHECKING:
    from tokenformer.quantisation.quantise_folder import FolderQuantisation

commands = typer.Typer()
NOTE = "Loss: nats per token of the text."


@commands.command("quantize", epilog="Example: tokenformer quantize models/mine models/mine-int8 --to int8")
def quantize_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    to: Annotated[str, typer.Option(metavar="DTYPE", help="int8 or int4.")] = "int8",
    output_layer: Annotated[
        bool, typer.Option("--output-layer", help="Let the output layer multiply by integers: sooner, not smaller.")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="A text, for the loss before and after.")] = None,
    limit: Annotated[
        int, typer.Option(min=2, help="How many bytes of the text are read, from its beginning.")
    ] = 100_000,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Make integers of the tokens in a model folder: int8 takes a quarter of their memory, int4 an eighth.

    Every key and every value has one scale. Embeddings, norms, biases and the output layer's weight stay as they are.
    The new model can grow and take token groups. The tokenizer is copied along.
    """
    if to not in ("int8", "int4"):
        raise BadCommandError(f"--to {to} was given; choose int8 or int4")

    from tokenformer.quantisation.quantise_folder import quantise_folder

    quiet_libraries()
    score = None if text is None else _score(source, text, limit, trust_remote_code)
    quantise_folder(
        source,
        target,
        to,
        output_layer=output_layer,
        score=score,
        show=_show,
        trust_remote_code=trust_remote_code,
    )
    show_summary("Quantised", {"written": str(target)})


def _score(source: Path, text: Path, limit: int, trust_remote_code: bool) -> Any:
    """What scores a model on the beginning of the text."""
    from tokenformer.errors import BadRequestError
    from tokenformer.evaluation import evaluate_text
    from tokenformer.io import existing_file
    from tokenformer.models import TokenFormerVisionConfig
    from tokenformer.models.loading import read_config
    from tokenformer.models.text import read_tokenizer

    with existing_file(text).open("rb") as file:
        content = file.read(limit)
    config = read_config(source, trust_remote_code=trust_remote_code)
    if isinstance(config, TokenFormerVisionConfig):
        raise BadRequestError(f"{source} takes images, and a text says nothing of it; leave --text out")
    tokenizer = read_tokenizer(source, config, trust_remote_code=trust_remote_code)
    whole = content.decode(errors="ignore") if content else ""
    return lambda model: evaluate_text(model, tokenizer, whole).loss


def _show(found: "FolderQuantisation") -> None:
    rows = [
        [label, short(found.token_bytes[i], "B"), short(found.model_bytes[i], "B")]
        + ([f"{found.scores[i]:.4f}"] if found.scores else [])
        for i, label in enumerate(("before", "after"))
    ]
    shares = [f"{after / before:.3f}" for before, after in (found.token_bytes, found.model_bytes)]
    rows.append(["ratio", *shares, *([f"{found.scores[1] / found.scores[0]:.4f}"] if found.scores else [])])
    columns = ["", "tokens", "whole model", *(["loss"] if found.scores else [])]
    show_table(columns, rows, NOTE if found.scores else "")
