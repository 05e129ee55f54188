"""eval: how well a model predicts a text, solves benchmark tasks, or classifies images."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import BadCommandError, TokenFraction, TokenGroups, TrustRemoteCode, quiet_libraries

commands = typer.Typer()
EXAMPLE = "Example: tokenformer eval models/mine --tasks piqa,arc_easy --json scores.json"
IMAGES = 64  # at a time by default


@commands.command("eval", epilog=EXAMPLE)
def eval_command(
    context: typer.Context,
    model_name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, ours or any causal language model or image classifier; or a Hub name.",
        ),
    ],
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Score a text, in UTF-8.")] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Score tasks of lm-evaluation-harness, such as piqa,arc_easy.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Classify images: a folder of class folders, Parquet, IDX, a Hub name, …"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="With --tasks: rows of each.", show_default="all")] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --tasks: read DIR/NAME.jsonl.", show_default="the Hub"),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --tasks: task files of your own, in the harness's format."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="With --text: tokens from window to window.", show_default="half")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="With --text: tokens in a window.", show_default="the context, at most 2048")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --images: the split of a Hub dataset.", show_default="validation"),
    ] = None,
    hub_config: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --images: the configuration of a Hub dataset.")
    ] = None,
    image_column: Annotated[
        str | None, typer.Option(metavar="C", help="With --images: the column of images.", show_default="the only one")
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(metavar="C", help="With --images: the column of classes.", show_default="the only one")
    ] = None,
    by_position: Annotated[
        bool, typer.Option("--by-position", help="With --images: match classes by their order, not by their names.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --images: stop at one that cannot be decoded.")
    ] = False,
    batch_size: Annotated[
        str, typer.Option(metavar="N|auto", help="Windows, requests of tasks, or images at a time.")
    ] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="A file for the numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …", show_default="the fastest")] = None,
    tokens: TokenGroups = None,
    token_fraction: TokenFraction = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Score a model: on a text, on benchmark tasks, or on images.

    A text gives loss, perplexity and bits per byte, which can be compared between models with different tokenizers: a
    window slides over it, and every token but the first is scored once. Tasks are those of lm-evaluation-harness, and
    give its table and the average that the TokenFormer paper reports. Images give top-1 and top-5 accuracy and a table
    of classes; one that cannot be decoded is named, counted and left out.
    """
    _check_options(
        {"--text": text, "--tasks": tasks, "--images": images},
        {
            "--tasks": {"--limit": limit, "--data": data, "--include-path": include_path},
            "--text": {"--stride": stride, "--length": length},
            "--images": {
                "--split": split,
                "--hub-config": hub_config,
                "--image-column": image_column,
                "--label-column": label_column,
                "--by-position": by_position or None,
                "--strict": strict or None,
            },
        },
    )
    rows_at_a_time = _batch_size(batch_size)

    from tokenformer.io import check_new_file, existing_file

    from .scores import ScoredModel, score_images, score_tasks, score_text

    quiet_libraries()
    if text is not None:
        existing_file(text)
    if json_file is not None:
        check_new_file(json_file)
    scored = ScoredModel(model_name, tokens or [], device, trust_remote_code, token_fraction)
    if text is not None:
        windows = None if rows_at_a_time == "auto" else int(rows_at_a_time)
        score_text(scored, text, stride, length, windows, json_file)
    elif images is not None:
        from tokenformer.data.images import ImageSettings

        source = ImageSettings(
            images=[],
            validation=images,
            image_column=image_column,
            label_column=label_column,
            hub_config=hub_config,
            hub_validation_split=split or "validation",
        )
        size = IMAGES if rows_at_a_time == "auto" else int(rows_at_a_time)
        score_images(scored, source, by_position, strict, size, json_file)
    else:
        quiet = not context.find_root().params["debug"]
        score_tasks(scored, str(tasks), data, include_path, limit, rows_at_a_time, json_file, quiet)


def _check_options(what: dict[str, Any], options: dict[str, dict[str, Any]]) -> None:
    """One thing to score, and only options that go with it."""
    asked = [name for name, value in what.items() if value is not None]
    if len(asked) != 1:
        raise BadCommandError(f"{len(asked) or 'none'} of {', '.join(what)} were given; pass one of them")
    for owner, owned in options.items():
        for option, value in owned.items():
            if value is not None and owner != asked[0]:
                raise BadCommandError(f"{option} was given, but it only works with {owner}")


def _batch_size(given: str) -> int | str:
    if given == "auto":
        return given
    if not given.isdecimal() or int(given) < 1:
        raise BadCommandError(f"batch size {given} was given; a number of at least 1, or auto, is expected")
    return int(given)
