"""evaluate_tasks(): the accuracies that papers compare, by lm-evaluation-harness.

    tokenformer eval models/mine --tasks lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande

Enters: a causal language model from transformers, its tokenizer, and names of tasks. Leaves: the harness's own results,
and their average as the paper takes it. `harness.py` talks to the harness; nothing of ours comes between the
logits and the scores.
"""

import importlib.metadata
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..data.sources import check_readable
from ..errors import BadRequestError, did_you_mean, require
from ..models.sample import evaluating
from .task_data import check_files

# What the paper's average is made of. By the authors' README they evaluate as Mamba does, whose appendix says:
# accuracy, but normalised by length for HellaSwag and ARC-challenge.
PAPER_METRICS = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
}
# The harness finds its `auto` by running out of GPU memory, which a CPU does not report. There, with 50,000 tokens in
# the vocabulary, 1 to 8 requests at a time took the same time each, 16 and 32 more; a tiny model is slower with 1.
AUTO_ON_CPU = 4
LIBRARIES = ("tokenformer", "lm_eval", "torch", "transformers", "datasets", "tokenizers")


@dataclass(frozen=True)
class Average:
    """The mean over those of the paper's tasks that were given: of `metrics`, and of plain accuracy throughout."""

    value: float
    acc: float
    metrics: dict[str, str]

    @property
    def complete(self) -> bool:
        """Whether it is the paper's average, of all six tasks."""
        return self.metrics.keys() == PAPER_METRICS.keys()


@dataclass(frozen=True)
class TaskScores:
    """The scores, and what it takes to reproduce them. `harness` is all that the harness returned.

    truncated counts the requests that were longer than the model's context; the harness cuts them from the left.
    """

    average: Average | None
    batch_size: int | str
    truncated: int
    data: str | None
    data_sha256: dict[str, str]
    seeds: dict[str, int]
    versions: dict[str, str]
    harness: dict[str, Any]

    def table(self) -> str:
        """The harness's table, and that of its groups if there are any."""
        from .harness import table

        return table(self.harness)

    def as_json(self) -> dict[str, Any]:
        """All of it, ready for `json.dumps(…, default=str)`."""
        average = None if self.average is None else {**asdict(self.average), "complete": self.average.complete}
        return {**asdict(self), "average": average}


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    data: str | os.PathLike | None = None,
    include_path: str | os.PathLike | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    quiet: bool = True,
) -> TaskScores:
    """Score a model on tasks of lm-evaluation-harness, zero-shot unless a task says otherwise.

    `tasks` is a list of names, or one string with commas between them; `data` a folder with a JSONL file for each, read
    instead of the Hub; `include_path` a folder with task files of your own, in the harness's format; `limit` how many
    rows of each task; `batch_size` a number, or "auto" for the largest that fits.
    `quiet` hides the harness's messages; its progress bars still appear in a terminal.
    """
    names, sums = check_request(tasks, limit, batch_size, data, include_path)
    if batch_size == "auto" and model.device.type == "cpu":
        batch_size = AUTO_ON_CPU
    from . import harness

    own = None if include_path is None else Path(include_path)
    cache = tempfile.TemporaryDirectory(prefix="tokenformer-eval-")
    with evaluating(model), cache as datasets_cache, harness.quiet() if quiet else nullcontext():
        manager = harness.task_manager(names, own)
        if data is None:
            loaded = harness.load_tasks(manager, names)
        else:
            loaded = harness.local_tasks(manager, names, Path(data), datasets_cache)
        results, truncated = harness.score(model, tokenizer, loaded, limit, batch_size)
    return TaskScores(
        average=average(results["results"]),
        batch_size=batch_size,
        truncated=truncated,
        data=None if data is None else str(data),
        data_sha256=sums,
        seeds=harness.SEEDS,
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        harness=results,
    )


def check_request(
    tasks: str | Sequence[str],
    limit: int | None,
    batch_size: int | str,
    data: str | os.PathLike | None,
    include_path: str | os.PathLike | None,
) -> tuple[list[str], dict[str, str]]:
    """The names of the tasks, each once, and the SHA-256 of their files. Refuses all that needs no model to refuse."""
    require("scoring tasks", "eval")
    named = tasks.split(",") if isinstance(tasks, str) else tasks
    names = list(dict.fromkeys(name.strip() for name in named if name.strip()))
    if not names:
        raise BadRequestError(f"no task was given; name one or more, such as {','.join(PAPER_METRICS)}")
    if limit is not None and limit < 1:
        raise BadRequestError(f"limit {limit} was given; at least 1 row of each task is needed")
    if limit is not None and limit > sys.maxsize:  # Python counts rows no further
        raise BadRequestError(f"limit {limit} was given; at most {sys.maxsize} rows can be counted, and none is all")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise BadRequestError(f"batch size {batch_size} was given; a number of at least 1, or auto, is expected")
    own = None if include_path is None else Path(include_path)
    if own is not None and not own.is_dir():
        raise BadRequestError(f"{include_path} is not a folder; --include-path takes one with task files, *.yaml")
    for path in [] if own is None else own.rglob("*.yaml"):
        check_readable(path)
    from . import harness

    with harness.quiet():  # it complains about some of its own tasks
        manager = harness.task_manager(names, own)
    for name in names:
        if name not in manager.all_tasks:
            where = f", nor defined in {include_path}" if include_path else ""
            raise BadRequestError(f"task {name!r} is not one of the harness's{where}; {_near(name, manager.all_tasks)}")
        if data is not None and name not in manager.all_subtasks:
            raise BadRequestError(f"{name} is a group of tasks; with --data, name the tasks themselves")
    return names, {} if data is None else check_files(names, Path(data))


def _near(name: str, known: Sequence[str]) -> str:
    hint = did_you_mean(name, [*PAPER_METRICS, *known])
    if hint.startswith("did you mean"):
        return hint
    return f"`lm_eval ls tasks` lists them, the paper's are {', '.join(PAPER_METRICS)}"


def average(results: Mapping[str, Mapping[str, Any]]) -> Average | None:
    """The paper's average over the harness's results; None if none of the paper's tasks is among them."""
    metrics = {task: metric for task, metric in PAPER_METRICS.items() if task in results}
    if not metrics:
        return None

    def mean(metric_of: Mapping[str, str]) -> float:
        return math.fsum(results[task][f"{metric},none"] for task, metric in metric_of.items()) / len(metric_of)

    return Average(value=mean(metrics), acc=mean(dict.fromkeys(metrics, "acc")), metrics=metrics)
