"""eval: how well a model predicts a text, solves the tasks that papers compare models by, or classifies images."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .summary import quiet_libraries, show_summary, show_table

commands = typer.Typer()
EXAMPLE = "Example: tokenformer eval models/mine --tasks piqa,arc_easy --json scores.json"
IMAGES = 64  # at a time, unless the request says otherwise
# Of more classes than this the table has the worst ones; the JSON has all.
MOST_CLASSES, WORST = 100, 20
# On which a score of images depends; the JSON has their versions.
IMAGE_LIBRARIES = ("tokenformer", "torch", "transformers", "datasets", "pillow")


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
        str | None, typer.Option(metavar="C", help="With --images: that of classes.", show_default="the only one")
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
) -> None:
    """Score a model: on a text, on the tasks that papers compare models by, or on images.

    A text gives loss, perplexity and bits per byte, which can be compared between models with different tokenizers: a
    window slides over it, and every token but the first is scored once. Tasks are those of lm-evaluation-harness, and
    give its table and the average that the TokenFormer paper reports. Images give top-1 and top-5 accuracy and a table
    of classes; one that cannot be decoded is named, counted and left out.
    """
    from ..files import check_new_file, existing_file

    _check_options(
        {"--text": text, "--tasks": tasks, "--images": images},
        {
            "--tasks": {"--limit": limit, "--data": data},
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
    quiet_libraries()
    if text is not None:
        existing_file(text)
    if json_file is not None:
        check_new_file(json_file)
    rows_at_a_time = _batch_size(batch_size)
    if text is not None:
        windows = None if rows_at_a_time == "auto" else int(rows_at_a_time)
        _score_text(model_name, text, stride, length, windows, json_file, device)
    elif images is not None:
        from ..data import ImageConfig

        source = ImageConfig(
            images=[],
            validation=images,
            image_column=image_column,
            label_column=label_column,
            hub_config=hub_config,
            hub_validation_split=split or "validation",
        )
        size = IMAGES if rows_at_a_time == "auto" else int(rows_at_a_time)
        _score_images(model_name, source, by_position, strict, size, json_file, device)
    else:
        quiet = not context.find_root().params["debug"]
        _score_tasks(model_name, str(tasks), data, limit, rows_at_a_time, json_file, device, quiet)


def _check_options(what: dict[str, Any], options: dict[str, dict[str, Any]]) -> None:
    """One thing to score, and only options that go with it."""
    from ..errors import BadRequestError

    asked = [name for name, value in what.items() if value is not None]
    if len(asked) != 1:
        raise BadRequestError(f"{len(asked) or 'none'} of {', '.join(what)} were given; give one of them")
    for owner, owned in options.items():
        for option, value in owned.items():
            if value is not None and owner != asked[0]:
                raise BadRequestError(f"{option} was given, which goes with {owner}")


def _score_text(
    model_name: str,
    text: Path,
    stride: int | None,
    length: int | None,
    batch_size: int | None,
    json_file: Path | None,
    device: str | None,
) -> None:
    from dataclasses import asdict

    from ..errors import BadRequestError
    from ..evaluation import evaluate_text

    content = text.read_bytes()
    if not content:
        raise BadRequestError(f"{text} is empty; give a file with text")
    model, tokenizer = _read(model_name, device)
    score = evaluate_text(model, tokenizer, content, stride=stride, length=length, batch_size=batch_size)
    rows = {
        "loss": f"{score.loss:.4f} nats a token",
        "perplexity": f"{score.perplexity:.3f}",
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "scored": f"{score.tokens:,} tokens, {score.bytes:,} bytes",
        "windows": f"{score.length:,} tokens, moved by {score.stride:,}",
    }
    _finish(rows, json_file, {"model": model_name, "text": str(text), **asdict(score)})


def _score_tasks(
    model_name: str,
    tasks: str,
    data: Path | None,
    limit: int | None,
    batch_size: int | str,
    json_file: Path | None,
    device: str | None,
    quiet: bool,
) -> None:
    from ..evaluation.tasks import PAPER_METRICS, check_request, evaluate_tasks

    names, _ = check_request(tasks, limit, batch_size, data)
    model, tokenizer = _read(model_name, device)
    scores = evaluate_tasks(model, tokenizer, names, data=data, limit=limit, batch_size=batch_size, quiet=quiet)
    rows = {}
    if scores.average is not None:
        given = ", ".join(f"{task} {metric}" for task, metric in scores.average.metrics.items())
        whose = "the paper's" if scores.average.complete else f"{len(scores.average.metrics)} of the paper's"
        rows["average"] = f"{scores.average.value:.4f}, over {whose} {len(PAPER_METRICS)} tasks: {given}"
    rows["data"] = str(data) if data else "the Hub"
    if limit is not None:
        rows["limit"] = f"the first {limit:,} rows of each task: a try, not a result"
    if scores.truncated:
        rows["cut"] = f"{scores.truncated:,} requests, from the left, to the model's context"
    rows["batch size"] = str(scores.batch_size)
    typer.echo(scores.table())
    request = {"model": model_name, "tasks": names, "limit": limit}
    _finish(rows, json_file, {**request, **scores.as_json()})


def _score_images(
    model_name: str,
    source: Any,
    by_position: bool,
    strict: bool,
    batch_size: int,
    json_file: Path | None,
    device: str | None,
) -> None:
    from dataclasses import asdict
    from importlib.metadata import version

    import datasets
    from transformers import AutoModelForImageClassification

    from ..data.image_data import load_pillow
    from ..data.image_sources import find_images
    from ..evaluation import evaluate_images
    from ..models.images import read_image_processor
    from ..models.loading import read_any_model

    load_pillow()
    datasets.disable_progress_bars()
    model = read_any_model(model_name, device, AutoModelForImageClassification)
    score = evaluate_images(
        model,
        read_image_processor(model_name),
        find_images(source, "validation"),
        by_position=by_position,
        batch_size=batch_size,
        strict=strict,
        say=lambda problem: typer.echo(f"left out: {problem}", err=True),
    )
    rows = [(one.name, one.images, one.correct, one.correct / one.images) for one in score.classes if one.images]
    note, scored = "", len(rows)
    if scored > MOST_CLASSES:
        note = f"The {WORST} classes of {scored:,} with the lowest accuracy; --json has all."
        rows = sorted(rows, key=lambda row: row[3])[:WORST]
    table = [(name, f"{images:,}", f"{correct:,}", f"{accuracy:.4f}") for name, images, correct, accuracy in rows]
    show_table(["class", "images", "correct", "accuracy"], table, note)
    summary = {"top-1": f"{score.top1:.4f}"}
    if score.top5 is not None:
        summary["top-5"] = f"{score.top5:.4f}"
    summary["scored"] = f"{score.images:,} images of {scored:,} classes, matched {score.matched}"
    if score.bad:
        summary["left out"] = f"{len(score.bad):,} images that cannot be decoded"
    gone = [one.name for one in score.classes if not one.images]
    if gone:
        summary["not scored"] = f"{', '.join(gone)}: no image of these classes can be decoded"
    request = {
        "model": model_name,
        "source": source.validation,
        "split": source.hub_validation_split,
        "hub_config": source.hub_config,
        "image_column": source.image_column,
        "label_column": source.label_column,
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in IMAGE_LIBRARIES},
    }
    _finish(summary, json_file, {**request, **asdict(score)})


def _batch_size(given: str) -> int | str:
    from ..errors import BadRequestError

    if given == "auto":
        return given
    if not given.isdecimal() or int(given) < 1:
        raise BadRequestError(f"batch size {given} was given; a number from 1 on, or auto, is expected")
    return int(given)


def _read(model_name: str, device: str | None) -> tuple[Any, Any]:
    from ..models.loading import read_any_model
    from ..models.text import read_tokenizer

    model = read_any_model(model_name, device)
    return model, read_tokenizer(model_name, model.config)


def _finish(rows: dict[str, str], json_file: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers, if a file was named, and show the rows, also if writing fails."""
    import json

    from ..files import write_new

    try:
        if json_file is not None:
            with write_new(json_file) as (partial,):
                # What JSON lacks, and the harness puts into its results, is a function here or there.
                partial.write_text(json.dumps(numbers, indent=2, default=str) + "\n", encoding="utf-8")
            rows = {**rows, "written": str(json_file)}
    finally:
        show_summary("Scored", rows)
