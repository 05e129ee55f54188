"""Small real runs for the tests of training: a recipe, a corpus, and processes that can be killed."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from safetensors.torch import load_file

from tokenformer.training import load_recipe, train
from tokenformer.training.run import StoppedError

RECIPE: dict[str, Any] = {
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "qkv_tokens": 16,
        "out_tokens": 16,
        "ffn_tokens": 64,
        # Random numbers in every step: a run that is carried on must have them in the same places.
        "attention_dropout": 0.1,
    },
    "data": {"block_length": 32, "validation_fraction": 0.1},
    "training": {
        "learning_rate": 3e-3,
        "global_batch": 8,
        "logging_steps": 2,
        "eval_steps": 5,
        "save_steps": 4,
        "validation_blocks": 8,
    },
    "growth": {
        "warmup_steps": 4,
        "stages": [{"steps": 10}, {"factor": 2, "steps": 8}, {"factor": 2, "steps": 9}],
    },
}


def write_recipe(folder: Path, **changes: dict[str, Any]) -> Path:
    """A recipe file with a corpus beside it; `changes` are merged into the sections."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for i in range(20):
            (corpus / f"{i:02}.txt").write_text("".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(40)))
    recipe = {section: {**values, **changes.get(section, {})} for section, values in RECIPE.items()}
    recipe["data"] = {"train": str(corpus), "cache": str(folder / "cache"), **recipe["data"]}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run(recipe: Path, out: Path, *overrides: str) -> Path:
    """Train in this process, quietly."""
    loaded = load_recipe(recipe, [f"training.output_dir={out}", *overrides])
    with open(os.devnull, "w") as nowhere:
        return train(loaded, Console(file=nowhere))


def run_in_child(
    recipe: Path, out: Path, *overrides: str, kill_after: float | None = None, before: Callable[[], None] | None = None
) -> int:
    """Train in a process of its own and return its exit code, negative for a signal.

    It is forked, so that it need not import anything; `before` runs in it first, `kill_after` seconds end it.
    """
    process = multiprocessing.get_context("fork").Process(target=_child, args=(recipe, out, overrides, before))
    process.start()
    process.join(kill_after)
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return process.exitcode or 0


def _child(recipe: Path, out: Path, overrides: tuple[str, ...], before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    try:
        run(recipe, out, *overrides)
    except StoppedError as stop:
        os._exit(stop.exit_code)


def weights(out: Path, stage: int) -> dict[str, Any]:
    """The weights that a stage ended with."""
    return load_file(out / f"stage-{stage}" / "model" / "model.safetensors")


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]
