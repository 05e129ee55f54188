"""The model and its tasks in the hands of lm-evaluation-harness; the only file that imports it.

Enters: a causal language model from transformers, its tokenizer, the names of tasks and, if their rows are local, the
folder that has them. Leaves: the harness's results. Every score is computed by the harness: its HFLM asks the model,
its tasks ask the questions, its `evaluate` puts them together.
"""

import copy
import io
import logging
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval import evaluator, tasks
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from transformers import PreTrainedModel

from ..errors import BadFileError, BadRequestError, one_line

# Where the harness keeps the paper's tasks. Indexing all of its 14,000 takes many seconds; these few, none.
PAPER_FOLDERS = ("lambada", "hellaswag", "piqa", "arc", "winogrande")
# Those of the harness's command, so that its numbers and ours agree.
SEEDS = {
    "random_seed": DEFAULT_RANDOM_SEED,
    "numpy_seed": DEFAULT_OTHER_SEED,
    "torch_seed": DEFAULT_OTHER_SEED,
    "fewshot_seed": DEFAULT_OTHER_SEED,
}


def task_manager(names: Sequence[str], own: Path | None) -> tasks.TaskManager:
    """The harness's index of tasks: of the paper's if it has all of `names`, otherwise of everything.

    `own` is a folder with the user's task files, which come before the harness's of the same name.
    """
    manager = paper_manager(own)
    return manager if set(names) <= set(manager.all_subtasks) else full_manager(own)


@cache
def paper_manager(own: Path | None = None) -> tasks.TaskManager:
    folders = [str(Path(tasks.__file__).parent / name) for name in PAPER_FOLDERS]
    return tasks.TaskManager(include_defaults=False, include_path=[*folders, str(own)] if own else folders)


@cache
def full_manager(own: Path | None = None) -> tasks.TaskManager:
    return tasks.TaskManager(include_path=str(own) if own else None)


def load_tasks(manager: tasks.TaskManager, names: Sequence[str]) -> dict[str, Any]:
    """Tasks, groups and tags by name, with the data that they name: on the Hub, in its cache, or local."""
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        try:
            found = manager.load(name)
        except Exception as error:  # the Hub's client, datasets, pyarrow and the tasks' own code share no base class
            raise BadRequestError(
                f"the data of task {name} could not be read: {type(error).__name__}: {one_line(error)[:200]}; "
                f"for what is on the Hub, a local file can be given with --data DIR (DIR/{name}.jsonl)"
            ) from error
        for what, items in loaded.items():
            items.update(found[what])
    return loaded


def local_tasks(manager: tasks.TaskManager, names: Sequence[str], folder: Path, datasets_cache: str) -> dict[str, Any]:
    """The same tasks, each with the rows of `folder`/NAME.jsonl as its only split."""
    return {"tasks": {name: _local_task(manager, name, folder, datasets_cache) for name in names}, "groups": {}}


def _local_task(manager: tasks.TaskManager, name: str, folder: Path, datasets_cache: str) -> Any:
    path = folder / f"{name}.jsonl"
    override = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}, "cache_dir": datasets_cache},
        "test_split": "test",
        "validation_split": None,
        "training_split": None,
        "fewshot_split": None,
    }
    try:
        # The harness applies an override to one of its tasks only if the task is a member of a group.
        task = manager.load({"group": "local", "task": [override]})["tasks"][name]
    except Exception as error:  # datasets, pyarrow, Jinja and the tasks' own code share no base class
        raise BadFileError(f"{path} does not fit the task {name}: {type(error).__name__}: {one_line(error)}") from error
    if task.config.num_fewshot:
        raise BadRequestError(
            f"task {name} shows the model examples of another split; with --data, only zero-shot works"
        )
    return task


def score(
    model: PreTrainedModel, tokenizer: Any, loaded: dict[str, Any], limit: int | None, batch_size: int | str
) -> tuple[dict[str, Any], int]:
    """The harness's results, and how many requests it truncated."""
    random.seed(SEEDS["random_seed"])
    numpy.random.seed(SEEDS["numpy_seed"])
    torch.manual_seed(SEEDS["torch_seed"])
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEEDS["fewshot_seed"])
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    asked = CheckedModel(model, tokenizer, batch_size)
    results = evaluator.evaluate(lm=asked, task_dict=loaded, limit=limit, log_samples=False)
    return results, asked.truncated


def table(results: dict[str, Any]) -> str:
    """The harness's table of tasks, and that of groups if there are any."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n".join(part.rstrip("\n") for part in parts)


class CheckedModel(HFLM):
    """The harness's model, which also refuses what would make a score meaningless and counts what was truncated."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, batch_size: int | str) -> None:
        tokenizer = with_start_token(tokenizer, model.config)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
        self.truncated = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        try:
            return super().loglikelihood(requests, disable_tqdm)
        except LongAnswerError as error:
            request = requests[error.index]
            raise BadRequestError(
                f"row {request.doc_id + 1} of task {request.task_name} has an answer of {error.length:,} tokens, and "
                f"the model's context is {self.max_length:,}; the harness does not score that: leave out the task, or "
                "the row with --data"
            ) from error

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        length, index = max(((len(answer), i) for i, (_, _, answer) in enumerate(requests)), default=(0, 0))
        if length > self.max_length:
            raise LongAnswerError(index, length)
        # The last token is only predicted, never read.
        self.truncated += sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests)
        answers = super()._loglikelihood_tokens(requests, *args, **options)
        # Accuracy would hide it: among answers that are all NaN, the harness takes the first for the best.
        if any(math.isnan(likelihood) for likelihood, _ in answers):
            raise BadFileError("a log-likelihood is NaN, so no score means anything; are the model's weights broken?")
        return answers


class LongAnswerError(Exception):
    """The answer of request `index` alone is longer than the model's context."""

    def __init__(self, index: int, length: int) -> None:
        super().__init__(index, length)
        self.index, self.length = index, length


def with_start_token(tokenizer: Any, config: Any) -> Any:
    """A tokenizer for HFLM, which starts an empty context with the token that begins or ends a text."""
    vocabulary = config.get_text_config().vocab_size
    end = config.get_text_config().eos_token_id
    if tokenizer.vocab_size > vocabulary:
        raise BadRequestError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, and the model {vocabulary:,} rows; "
            "use the model's own tokenizer"
        )
    tokenizer = copy.deepcopy(tokenizer)  # HFLM gives it a token for padding
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        # A bare tokenizer.json does not say which token that is; config.json may.
        end = end[0] if isinstance(end, list) and end else end
        if not isinstance(end, int) or tokenizer.convert_ids_to_tokens(end) is None:
            raise BadRequestError(
                "neither the tokenizer nor config.json names a token that begins or ends a text, with which the "
                "harness begins; add eos_token to tokenizer_config.json (raw bytes: train with a vocabulary of 257)"
            )
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Only the harness's errors are logged, and progress bars appear only in a terminal.

    The harness also prints and draws bars where it has no argument to stop it, hence the redirection.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(io.StringIO()))
            if not sys.stderr.isatty():
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logger.setLevel(level)
