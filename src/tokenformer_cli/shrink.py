"""shrink, sort: a saved language model without the tokens that do least on a text, or with these behind the others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import BadCommandError, TrustRemoteCode, counts_by_role, quiet_libraries, show_summary, show_table

if TYPE_CHECKING:
    from tokenformer.shrinking.shrink_folder import SizeScore

commands = typer.Typer()
NOTE = "Loss: nats per token of the text, on windows that did not decide which tokens stay."


@commands.command("shrink", epilog="Example: tokenformer shrink models/large models/small --factor 0.5 --text book.txt")
def shrink_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    text: Annotated[Path, typer.Option(help="A text of the kind that the model is for.")],
    factor: Annotated[float | None, typer.Option(help="The share of its tokens that every layer keeps.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=COUNT,…", help="Token counts: qkv=512,out=512,ffn=2048; of an adopted model `*.mlp.*=2048`."
        ),
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="Find the smallest sizes whose loss rises by at most so many nats.")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many tokens of the text are read, from its beginning.")] = 32768,
    device: Annotated[str, typer.Option(help="Where the model runs, for example cuda.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Shrink the folder of a language model into a new one, and fit tau to the tokens that stay.

    Half of the text that is read decides which tokens stay, the other half is scored. The table has the loss of the
    model, of three quarters, a half and a quarter of its tokens, and of the size that was chosen. The tokenizer is
    copied along.

    Give one of --factor, --tokens and --max-loss.
    """
    sizes = {"--factor": factor, "--tokens": tokens, "--max-loss": max_loss}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        raise BadCommandError(f"{' and '.join(given) or 'no size'} was given; give one of {', '.join(sizes)}")
    num_tokens = counts_by_role(tokens) if tokens is not None else None

    from tokenformer.shrinking.shrink_folder import shrink_folder

    quiet_libraries()
    shrink_folder(
        source,
        target,
        text,
        factor=factor,
        num_tokens=num_tokens,
        max_loss=max_loss,
        limit=limit,
        device=device,
        trust_remote_code=trust_remote_code,
        show=_show,
    )
    show_summary("Shrunk", {"written": str(target)})


@commands.command("sort", epilog="Example: tokenformer sort models/large models/sorted --text book.txt")
def sort_command(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    text: Annotated[Path, typer.Option(help="A text of the kind that the model is for.")],
    limit: Annotated[int, typer.Option(help="How many tokens of the text are read, from its beginning.")] = 32768,
    device: Annotated[str, typer.Option(help="Where the model runs, for example cuda.")] = "cpu",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Sort the tokens of a language model into a new folder, so that it can be loaded in any size.

    The model computes the same. `--token-fraction 0.5` of other commands, and from_pretrained(…, token_fraction=0.5),
    then read the first half of the tokens alone. Half of the text that is read decides the order, the other half is
    scored; the table has the loss of the model, and of three quarters, a half and a quarter of its tokens.
    """
    from tokenformer.shrinking.shrink_folder import sort_folder

    quiet_libraries()
    options = {"limit": limit, "device": device, "trust_remote_code": trust_remote_code}
    sort_folder(source, target, text, **options, show=_show_table)  # type: ignore[arg-type]
    show_summary("Sorted", {"written": str(target)})


def _show(scores: "list[SizeScore]") -> None:
    _show_table(scores, _by_role(scores[0], scores[-1]))


def _show_table(scores: "list[SizeScore]", more: str = "") -> None:
    whole = scores[0]
    rows = []
    for score in scores:
        label = "chosen" if score.share is None else f"{score.share:.0%} of the tokens"
        counts = [f"{sum(score.tokens.values()):,}", f"{score.parameters:,}"]
        rows.append([label, *counts, f"{score.loss:.4f}", f"{score.loss - whole.loss:+.4f}"])
    show_table(["", "tokens", "parameters", "loss", "rise"], rows, f"{NOTE}\n{more}".rstrip())


def _by_role(whole: "SizeScore", chosen: "SizeScore") -> str:
    """The chosen counts of layers with the same last name, beside those before."""
    names = dict.fromkeys(name.rpartition(".")[2] for name in whole.tokens)
    parts = []
    for last in names:
        before, after = (
            sorted({count for name, count in score.tokens.items() if name.rpartition(".")[2] == last})
            for score in (whole, chosen)
        )
        parts.append(f"{last} {'/'.join(map(str, before))} -> {'/'.join(map(str, after))}")
    return f"Tokens of each layer: {', '.join(parts)}."
