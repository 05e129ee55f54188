"""What `tokenformer eval` does once its options are checked: read the model, score it, show and write the numbers."""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from tokenformer.errors import BadRequestError, require
from tokenformer.evaluation import evaluate_images, evaluate_tasks, evaluate_text
from tokenformer.evaluation.tasks import PAPER_METRICS, check_request
from tokenformer.io import write_new
from tokenformer.models.images import read_image_processor
from tokenformer.models.loading import local_folder, read_model
from tokenformer.models.text import read_tokenizer

from .terminal import put_beside, show_summary, show_table

if TYPE_CHECKING:
    from tokenformer.data.images import ImageSettings

# With more classes than this the table only has the worst ones; the JSON has all.
MOST_CLASSES, WORST = 100, 20
# What a score of images depends on; the JSON has their versions.
IMAGE_LIBRARIES = ("tokenformer", "torch", "transformers", "datasets", "pillow")


@dataclass(frozen=True)
class ScoredModel:
    """A model by its folder or Hub name, with token groups beside it, as `--tokens` has them."""

    name: str
    tokens: list[str]
    device: str | None
    trust_remote_code: bool
    token_fraction: float | None = None

    def read(self, kind: Any) -> tuple[Path, Any]:
        """Its folder, and the model itself."""
        folder = local_folder(self.name, trust_remote_code=self.trust_remote_code)
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "token_fraction": self.token_fraction}
        model = read_model(folder, self.device, kind, **options)
        put_beside(model, self.tokens)
        return folder, model

    def read_with_tokenizer(self) -> tuple[Any, Any]:
        """A language model and its tokenizer."""
        folder, model = self.read(AutoModelForCausalLM)
        return model, read_tokenizer(folder, model.config, trust_remote_code=self.trust_remote_code)

    @property
    def facts(self) -> dict[str, Any]:
        """For the JSON."""
        groups = {"token_groups": self.tokens} if self.tokens else {}
        fraction = {"token_fraction": self.token_fraction} if self.token_fraction is not None else {}
        return {"model": self.name, **groups, **fraction}


def score_text(
    scored: ScoredModel,
    text: Path,
    stride: int | None,
    length: int | None,
    batch_size: int | None,
    json_file: Path | None,
) -> None:
    """Loss, perplexity and bits per byte of a text file."""
    content = text.read_bytes()
    if not content:
        raise BadRequestError(f"{text} is empty; choose a file with text")
    model, tokenizer = scored.read_with_tokenizer()
    score = evaluate_text(model, tokenizer, content, stride=stride, length=length, batch_size=batch_size)
    rows = {
        "loss": f"{score.loss:.4f} nats per token",
        "perplexity": f"{score.perplexity:.3f}",
        "bits per byte": f"{score.bits_per_byte:.4f}",
        "scored": f"{score.tokens:,} tokens, {score.bytes:,} bytes",
        "windows": f"{score.length:,} tokens, moved by {score.stride:,}",
    }
    _finish(rows, json_file, {**scored.facts, "text": str(text), **asdict(score)})


def score_tasks(
    scored: ScoredModel,
    tasks: str,
    data: Path | None,
    include_path: Path | None,
    limit: int | None,
    batch_size: int | str,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """The harness's table of tasks, and the paper's average."""
    names, _ = check_request(tasks, limit, batch_size, data, include_path)
    model, tokenizer = scored.read_with_tokenizer()
    scores = evaluate_tasks(
        model,
        tokenizer,
        names,
        data=data,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        quiet=quiet,
    )
    rows = {}
    if scores.average is not None:
        given = ", ".join(f"{task} {metric}" for task, metric in scores.average.metrics.items())
        whose = "the paper's" if scores.average.complete else f"{len(scores.average.metrics)} of the paper's"
        rows["average"] = f"{scores.average.value:.4f}, over {whose} {len(PAPER_METRICS)} tasks: {given}"
    rows["data"] = str(data or include_path or "the Hub")
    if limit is not None:
        rows["limit"] = f"the first {limit:,} rows of each task: a trial, not a result"
    if scores.truncated:
        rows["cut"] = f"{scores.truncated:,} requests, from the left, to the model's context"
    rows["batch size"] = str(scores.batch_size)
    typer.echo(scores.table())
    request = {**scored.facts, "tasks": names, "limit": limit}
    _finish(rows, json_file, {**request, **scores.as_json()})


def score_images(
    scored: ScoredModel,
    source: "ImageSettings",
    by_position: bool,
    strict: bool,
    batch_size: int,
    json_file: Path | None,
) -> None:
    """Overall accuracy, and that of each class."""
    require("scoring images", "vision", "datasets", "pyarrow", "PIL")
    import datasets

    from tokenformer.data.images import find_images

    datasets.disable_progress_bars()
    folder, model = scored.read(AutoModelForImageClassification)
    score = evaluate_images(
        model,
        read_image_processor(folder, trust_remote_code=scored.trust_remote_code),
        find_images(source, "validation"),
        by_position=by_position,
        batch_size=batch_size,
        strict=strict,
        say=lambda problem: typer.echo(f"left out: {problem}", err=True),
    )
    rows = [(one.name, one.images, one.correct, one.correct / one.images) for one in score.classes if one.images]
    note, classes = "", len(rows)
    if classes > MOST_CLASSES:
        note = f"The {WORST} classes of {classes:,} with the lowest accuracy; --json has all."
        rows = sorted(rows, key=lambda row: row[3])[:WORST]
    table = [(name, f"{images:,}", f"{correct:,}", f"{accuracy:.4f}") for name, images, correct, accuracy in rows]
    show_table(["class", "images", "correct", "accuracy"], table, note)
    summary = {"top-1": f"{score.top1:.4f}"}
    if score.top5 is not None:
        summary["top-5"] = f"{score.top5:.4f}"
    summary["scored"] = f"{score.images:,} images of {classes:,} classes, matched {score.matched}"
    if score.bad:
        summary["left out"] = f"{len(score.bad):,} images that cannot be decoded"
    gone = [one.name for one in score.classes if not one.images]
    if gone:
        summary["not scored"] = f"{', '.join(gone)}: no image of these classes can be decoded"
    request = {
        **scored.facts,
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


def _finish(rows: dict[str, str], json_file: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers, if a file was named, and show the rows, also if writing fails."""
    try:
        if json_file is not None:
            with write_new(json_file) as (partial,):
                # The harness puts a few functions into its results, which JSON cannot hold.
                partial.write_text(json.dumps(numbers, indent=2, default=str) + "\n", encoding="utf-8")
            rows = {**rows, "written": str(json_file)}
    finally:
        show_summary("Scored", rows)
