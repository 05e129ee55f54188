"""Small real runs for the tests of training: recipes, a corpus, and processes that can be killed."""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from tokenformer.training import load_recipe, train
from tokenformer.training.checkpoint import checkpoints
from tokenformer.training.run import StoppedError

RECIPE: dict[str, Any] = {
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "qkv_tokens": 16,
        "out_tokens": 16,
        "ffn_tokens": 64,
        # Random numbers in every step: a run that is resumed must have them in the same places.
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

# The same ladder on scikit-learn's digits, with all that images have beside it.
IMAGE_RECIPE: dict[str, Any] = {
    "model": {**RECIPE["model"], "patch_size": 4, "drop_path_rate": 0.1},
    "data": {
        "images": "digits",
        "size": 8,
        "channels": 1,
        "validation_fraction": 0.1,
        "workers": 1,
        "augment": {
            "crop_padding": 1,
            "flip": 0.5,
            "erasing": 0.2,
            "mixup": 0.4,
            "cutmix": 1.0,
            "label_smoothing": 0.1,
        },
    },
    "training": {
        **{key: value for key, value in RECIPE["training"].items() if key != "validation_blocks"},
        "validation_images": 20,
        "ema": 0.9,
        "layer_decay": 0.8,
    },
    "growth": RECIPE["growth"],
}


def write_recipe(folder: Path, **changes: dict[str, Any]) -> Path:
    """A recipe file with a corpus beside it; `changes` are merged into the sections."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for i in range(20):
            (corpus / f"{i:02}.txt").write_text("".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(40)))
    return _write(folder, RECIPE, {**changes, "data": {"train": str(corpus), **changes.get("data", {})}})


def write_image_recipe(folder: Path, **changes: dict[str, Any]) -> Path:
    """A recipe file of images; `changes` are merged into the sections."""
    return _write(folder, IMAGE_RECIPE, changes)


def _write(folder: Path, base: dict[str, Any], changes: dict[str, dict[str, Any]]) -> Path:
    recipe = {section: {**values, **changes.get(section, {})} for section, values in base.items()}
    recipe["data"] = {"cache": str(folder / "cache"), **recipe["data"]}
    path = folder / "recipe.yaml"
    # Without aliases, for sections that the two recipes share.
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
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


def kill_at(module: Any, name: str, call: int) -> Callable[[], None]:
    """In a child: die just before the `call`-th call of a function."""

    def before() -> None:
        original, calls = getattr(module, name), iter(range(1, 10**6))

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, dying)

    return before


def weights(out: Path, stage: int) -> dict[str, Any]:
    """The weights that a stage ended with."""
    return load_file(out / f"stage-{stage}" / "model" / "model.safetensors")


def assert_same(out: Path, reference: Path) -> None:
    """Two runs left the same models and checkpoints bit by bit, and the same metrics line by line."""
    for stage in ("stage-1", "stage-2", "stage-3"):
        newest = [checkpoints(run / stage)[-1] for run in (out, reference)]
        assert newest[0].name == newest[1].name
        for ours, theirs in [(out / stage / "model", reference / stage / "model"), newest]:
            names = sorted(path.name for path in theirs.glob("*.safetensors"))
            assert sorted(path.name for path in ours.glob("*.safetensors")) == names
            for name in names:
                assert_equal(load_file(ours / name), load_file(theirs / name))
    assert metrics(out) == metrics(reference)
    assert not list(out.rglob("*.partial*"))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def kill_often(recipe: Path, folder: Path, reference: Path, seconds: float, kills: int) -> None:
    """Kill runs at random moments, `kills` in all, and let each come to the end of the reference."""
    moments = random.Random(0)
    done = rounds = 0
    while done < kills:
        out = folder / f"run-{rounds}"
        code = None
        while code != 0:
            # Once there have been enough, let the run come to its end.
            code = run_in_child(recipe, out, kill_after=moments.uniform(0, seconds) if done < kills else None)
            assert code in (0, -signal.SIGKILL)
            done += code != 0
        assert_same(out, reference)
        rounds += 1


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("_per_second")} for line in lines]
