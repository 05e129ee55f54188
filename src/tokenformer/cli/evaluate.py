"""eval: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated

import typer

from .summary import quiet_libraries, show_summary

commands = typer.Typer()


@commands.command("eval", epilog="Example: tokenformer eval models/mine --text book.txt --json score.json")
def eval_command(
    folder: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, in UTF-8.")],
    stride: Annotated[int | None, typer.Option(help="Tokens from window to window.", show_default="half")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a window.", show_default="the context")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows at a time.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="A file for the numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
) -> None:
    """Score a text: loss, perplexity and bits per byte.

    A window slides over the text, and every token but the first is scored once. Bits per byte can be compared between
    models with different tokenizers.
    """
    import json
    from dataclasses import asdict

    from ..evaluation import evaluate_text
    from ..files import check_new, existing_file, write_new
    from ..models.loading import read_model
    from ..models.text import read_tokenizer

    quiet_libraries()
    existing_file(text)
    if json_file is not None:
        check_new(json_file)
    model = read_model(folder, device)
    tokenizer = read_tokenizer(folder, model.config)
    score = evaluate_text(model, tokenizer, text.read_bytes(), stride=stride, length=length, batch_size=batch_size)
    if json_file is not None:
        with write_new(json_file) as (partial,):
            partial.write_text(json.dumps({"model": str(folder), "text": str(text), **asdict(score)}, indent=2) + "\n")
    rows = {
        "loss": f"{score.loss:.4f} nats a token",
        "perplexity": f"{score.perplexity:.3f}",
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "scored": f"{score.tokens:,} tokens, {score.bytes:,} bytes",
        "windows": f"{score.length:,} tokens, moved by {score.stride:,}",
    }
    if json_file is not None:
        rows["written"] = str(json_file)
    show_summary("Scored", rows)
