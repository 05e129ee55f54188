"""evaluate_tasks(): the accuracies that papers compare, by lm-evaluation-harness.

    tokenformer eval models/mine --tasks lambada_openai,hellaswag,piqa,arc_easy,arc_challenge,winogrande

Enters: a causal language model of transformers, its tokenizer, and names of tasks. Leaves: the harness's own results,
and their average as the paper takes it. The model is handed to the harness's own HFLM, and its `simple_evaluate` does
the rest: nothing of ours stands between the logits and the scores.
"""

import copy
import importlib.metadata
import io
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

from ..errors import BadFileError, BadRequestError, did_you_mean, install, one_line
from ..models.sample import evaluating
from ..models.text import ByteTokenizer
from .task_data import check_files, local_task

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
# Where the harness keeps them. To index its 14,000 tasks takes it many seconds; these few, none.
PAPER_FOLDERS = ("lambada", "hellaswag", "piqa", "arc", "winogrande")
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
    """What came out, and what it takes to come to it again. `harness` is all that the harness returned.

    truncated counts the requests that were longer than the model's context; the harness cuts them from the left.
    """

    average: Average | None
    batch_size: int | str
    truncated: int
    data: str | None
    data_sha256: dict[str, str]
    versions: dict[str, str]
    harness: dict[str, Any]

    def table(self) -> str:
        """The harness's table, and that of its groups if there are any."""
        from lm_eval.utils import make_table

        tables = [make_table(self.harness)]
        if self.harness.get("groups"):
            tables.append(make_table(self.harness, "groups"))
        return "\n".join(table.rstrip("\n") for table in tables)

    def as_json(self) -> dict[str, Any]:
        """All of it, ready for `json.dumps(…, default=str)`."""
        average = None if self.average is None else {**asdict(self.average), "complete": self.average.complete}
        seeds = {name: seed for name, seed in self.harness["config"].items() if name.endswith("_seed")}
        return {**asdict(self), "average": average, "seeds": seeds}


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    data: str | os.PathLike | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    quiet: bool = True,
) -> TaskScores:
    """Score a model on tasks of lm-evaluation-harness, zero-shot unless a task says otherwise.

    `tasks` are names, also as one text with commas in between; `data` is a folder with a JSONL file for each, to be
    read instead of the Hub; `limit` the rows of each task; `batch_size` a number, or "auto" for the largest that fits.
    Of the harness's messages, `quiet` shows none; its progress bars appear in a terminal.
    """
    names, sums = check_request(tasks, limit, batch_size, data)
    if batch_size == "auto" and model.device.type == "cpu":
        batch_size = AUTO_ON_CPU
    with ExitStack() as stack:
        if quiet:
            stack.enter_context(_quiet())
        manager = _manager(names)
        datasets_cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenformer-eval-"))
        if data is None:
            loaded = [task for name in names for task in _hub_tasks(manager, name)]
        else:
            loaded = [local_task(manager, name, Path(data), datasets_cache) for name in names]
        results, truncated = _evaluate(model, tokenizer, loaded, manager, limit, batch_size)
    return TaskScores(
        average=average(results["results"]),
        batch_size=batch_size,
        truncated=truncated,
        data=None if data is None else str(data),
        data_sha256=sums,
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        harness=results,
    )


def check_request(
    tasks: str | Sequence[str], limit: int | None, batch_size: int | str, data: str | os.PathLike | None
) -> tuple[list[str], dict[str, str]]:
    """The names of the tasks, each once, and the SHA-256 of their files. Whatever can be refused without a model is."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise BadRequestError(f"tasks need lm-evaluation-harness; {install('eval')}") from error
    named = tasks.split(",") if isinstance(tasks, str) else tasks
    names = list(dict.fromkeys(name.strip() for name in named if name.strip()))
    if not names:
        raise BadRequestError(f"no task was given; name one or more, such as {','.join(PAPER_METRICS)}")
    if limit is not None and limit < 1:
        raise BadRequestError(f"limit {limit} was given; at least 1 row of each task is needed")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise BadRequestError(f"batch size {batch_size} was given; a number from 1 on, or auto, is expected")
    manager = _manager(names)
    for name in names:
        if name not in manager.all_tasks:
            raise BadRequestError(f"task {name!r} is not one of the harness's; {_near(name, manager.all_tasks)}")
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


def _evaluate(
    model: PreTrainedModel, tokenizer: Any, tasks: list[Any], manager: Any, limit: int | None, batch_size: int | str
) -> tuple[dict[str, Any], int]:
    """What `simple_evaluate` returns, and how many requests it truncated."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    quiet_git = patch.object(evaluator, "get_git_commit_hash", _commit)
    with evaluating(model), quiet_git, _counted("Combined length of context") as truncated:
        harness_tokenizer = _harness_tokenizer(tokenizer, model.config)
        harness_model = HFLM(pretrained=model, tokenizer=harness_tokenizer, batch_size=batch_size, backend="causal")
        try:
            results = evaluator.simple_evaluate(
                model=harness_model,
                tasks=tasks,
                task_manager=manager,
                limit=limit,
                batch_size=batch_size,
                device=str(model.device),
            )
        except AssertionError as error:
            _refuse_long_answers(harness_model, manager.load(tasks)["tasks"], error)
            raise
    # Accuracy hides it: the harness takes the first answer for the best if all of them are NaN.
    samples = results.pop("samples")
    if any(map(_is_nan, (answer for rows in samples.values() for row in rows for answer in row["filtered_resps"]))):
        raise BadFileError("a log-likelihood is NaN, so no score means anything; are the model's weights broken?")
    return results, truncated[0]


def _commit() -> str | None:
    """The commit of the folder we are in, which the harness notes. It lets git complain where there is none."""
    try:
        described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True)
    except OSError:  # no git
        return None
    return described.stdout.strip() or None


def _refuse_long_answers(harness_model: Any, tasks: Mapping[str, Any], error: AssertionError) -> None:
    """Put into words what the harness only asserts: that an answer fits into the model's context."""
    lengths = (
        (len(harness_model.tok_encode(request.args[1])), request.doc_id, name)
        for name, task in tasks.items()
        for request in task.instances
        if request.request_type == "loglikelihood"
    )
    longest, row, name = max(lengths, default=(0, 0, ""))
    if longest > harness_model.max_length:
        raise BadRequestError(
            f"row {row + 1} of task {name} has an answer of {longest:,} tokens, and the model's context is "
            f"{harness_model.max_length:,}; the harness does not score that: leave out the task, or the row with --data"
        ) from error


def _is_nan(answer: Any) -> bool:
    value = answer[0] if isinstance(answer, tuple) else answer  # (log-likelihood, greedy) | log-likelihood | text
    return isinstance(value, float) and math.isnan(value)


def _harness_tokenizer(tokenizer: Any, config: Any) -> Any:
    """A tokenizer for HFLM, which begins an empty context with the token that begins or ends a text."""
    vocabulary = config.get_text_config().vocab_size
    end = config.get_text_config().eos_token_id
    if isinstance(tokenizer, ByteTokenizer):
        if tokenizer.eos_token_id is None:
            raise BadRequestError(
                "the model reads raw bytes and has no end-of-text token, with which the harness begins; "
                "a vocabulary of 257 has one"
            )
        from ..data.tokenizer import byte_tokenizer

        return byte_tokenizer()
    if tokenizer.vocab_size > vocabulary:
        raise BadRequestError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, and the model {vocabulary:,} rows; "
            "give the model's own tokenizer"
        )
    tokenizer = copy.deepcopy(tokenizer)  # HFLM gives it a token for padding
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        # A bare tokenizer.json does not say which token that is; config.json may.
        end = end[0] if isinstance(end, list) and end else end
        if not isinstance(end, int) or tokenizer.convert_ids_to_tokens(end) is None:
            raise BadRequestError(
                "neither the tokenizer nor config.json names a token that begins or ends a text, with which the "
                "harness begins; add eos_token to tokenizer_config.json"
            )
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer


def _manager(names: Sequence[str]) -> Any:
    """The harness's index of tasks: that of the paper's, if it has all of `names`, or that of everything."""
    with _quiet():  # it complains of some of its own tasks
        manager = _paper_manager()
        return manager if set(names) <= set(manager.all_subtasks) else _full_manager()


@cache
def _paper_manager() -> Any:
    from lm_eval import tasks

    return tasks.TaskManager(
        include_defaults=False, include_path=[Path(tasks.__file__).parent / folder for folder in PAPER_FOLDERS]
    )


@cache
def _full_manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _hub_tasks(manager: Any, name: str) -> list[Any]:
    """A task, or the group or tag of that name, with its data from the Hub or its cache."""
    try:
        loaded = manager.load(name)
    except Exception as error:  # the Hub's client, datasets and each task have their own
        raise BadRequestError(
            f"the data of task {name} did not come from the Hub: {type(error).__name__}: {one_line(error)[:200]}; "
            f"a local file can be given with --data DIR (DIR/{name}.jsonl)"
        ) from error
    inside = {child for children in loaded["group_map"].values() for child in children}
    everything = {**loaded["groups"], **loaded["tasks"]}
    return [item for key, item in everything.items() if key not in inside]


@contextmanager
def _quiet() -> Iterator[None]:
    """No messages from the harness, and its progress bars only in a terminal."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(io.StringIO()))
            if not sys.stderr.isatty():
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _counted(start: str) -> Iterator[list[int]]:
    """Count the warnings of HFLM that begin with `start`: it says so, and nowhere keeps it."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    count, level = [0], logger.level

    def tally(record: logging.LogRecord) -> bool:
        count[0] += record.getMessage().startswith(start)
        return record.levelno >= logging.getLogger("lm_eval").getEffectiveLevel()

    logger.setLevel(logging.WARNING)
    logger.addFilter(tally)
    try:
        yield count
    finally:
        logger.removeFilter(tally)
        logger.setLevel(level)
