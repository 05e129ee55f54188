"""prepare: text to tokenized blocks in the cache, where training finds them; and a tokenizer trained on the text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import BadCommandError, TrustRemoteCode, quiet_libraries, show_summary

if TYPE_CHECKING:
    from tokenformer.data.text import TextData

commands = typer.Typer()


@commands.command(
    "prepare", epilog="Example: tokenformer prepare corpus/ notes.jsonl --tokenizer bytes --block-length 1024"
)
def prepare_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE…", help="Files, folders, globs, Hub names, or stdlib: Python's own library."),
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="bytes, a tokenizer.json, a folder, or a Hub name.")
    ] = "bytes",
    block_length: Annotated[int, typer.Option(metavar="N", help="Tokens in a block.")] = 256,
    column: Annotated[
        str, typer.Option(metavar="C", help="The column with the text, where there are columns.")
    ] = "text",
    validation: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="Separate held-out text; may be given several times.")
    ] = None,
    validation_fraction: Annotated[float, typer.Option(metavar="F", help="The share of documents to hold out.")] = 0.01,
    split: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Shares cut in order instead, such as 0.9,0.05,0.05.")
    ] = None,
    split_seed: Annotated[int, typer.Option(metavar="N", help="Decides which documents are held out.")] = 0,
    errors: Annotated[
        str, typer.Option(metavar="replace|strict", help="What to do about text that is not UTF-8.")
    ] = "replace",
    eos_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The token that ends a document, if the tokenizer does not say.")
    ] = None,
    hub_config: Annotated[str | None, typer.Option(metavar="NAME", help="For Hub names: the configuration.")] = None,
    hub_split: Annotated[str, typer.Option(metavar="NAME", help="For Hub names: the split.")] = "train",
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that tokenize; all cores if not given.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="$TOKENFORMER_CACHE or ~/.cache/tokenformer if not given.")
    ] = None,
    train_size: Annotated[
        int | None,
        typer.Option(
            "--train-tokenizer",
            metavar="N",
            max=2**20,  # as train_tokenizer has it, which a number of more than 64 bits would not reach
            help="First train a byte-level BPE of N entries on the text.",
        ),
    ] = None,
    tokenizer_out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder for the trained tokenizer, which is then used.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tokenize text and pack it into blocks, once: training with the same settings finds it in the cache.

    A document is a file, or a row where there are rows. With --train-tokenizer the tokenizer is trained on the
    training documents first.
    """
    if (train_size is None) != (tokenizer_out is None):
        raise BadCommandError("--train-tokenizer and --tokenizer-out go together: a size, and a folder to save to")
    shares = _shares(split)

    from tokenformer.data.text import TextData, TextSettings, train_tokenizer
    from tokenformer.errors import BadFileError, BadRequestError, require
    from tokenformer.io import write_new

    require("preparing text", "train", "datasets", "pyarrow")
    quiet_libraries()
    settings = TextSettings(
        train=sources,
        validation=validation or None,
        column=column,
        tokenizer=tokenizer,
        eos_token=eos_token,
        block_length=block_length,
        validation_fraction=validation_fraction,
        split=shares,
        split_seed=split_seed,
        errors=errors,  # type: ignore[arg-type]  # the settings check it
        workers=workers,
        cache=cache,
        hub_config=hub_config,
        hub_split=hub_split,
    )
    if train_size is not None and tokenizer_out is not None:
        with write_new(tokenizer_out) as (folder,):
            train_tokenizer(settings, train_size).save_pretrained(folder)
        settings.tokenizer = str(tokenizer_out)
    try:
        done = TextData(settings, trust_remote_code=trust_remote_code).prepare()
    except (BadRequestError, BadFileError) as error:
        if tokenizer_out is None:
            raise
        kept = f"{tokenizer_out} has the tokenizer: go on with --tokenizer {tokenizer_out}"
        raise type(error)(f"{error}; {kept}") from error
    show_summary("Found" if done.cached else "Prepared", _rows(settings.tokenizer, done))


def _shares(split: str | None) -> list[float] | None:
    try:
        return None if split is None else [float(share) for share in split.split(",")]
    except ValueError:
        raise BadCommandError(f"--split {split} was given; it takes numbers, as in 0.9,0.05,0.05") from None


def _rows(tokenizer: str, done: "TextData") -> dict[str, str]:
    stats = done.stats
    rows = {
        "documents": f"{stats['documents']:,}, {stats['bytes'] / 1e6:,.1f} MB",
        "tokenizer": f"{tokenizer}: {done.vocab_size:,} entries, {done.bytes_per_token:.2f} bytes per token",
    }
    for part, counts in stats["parts"].items():
        rows[part] = f"{counts['blocks']:,} blocks of {done.train.block_length:,}, {counts['dropped']:,} tokens dropped"
    passed_over = {
        "empty": stats["empty"],
        "without text": stats["null"],
        "binary": stats["binary"],
        "places not UTF-8, replaced": stats["replaced"],
    }
    if any(passed_over.values()):
        rows["passed over"] = ", ".join(f"{count:,} {name}" for name, count in passed_over.items() if count)
    return {**rows, "in": str(done.folder)}
