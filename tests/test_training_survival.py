"""Never lose work: killed at any instant, on a full disk, by a signal or a NaN, a run goes on or says what to do."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from tokenformer import BadFileError, BadRequestError
from tokenformer import io as io_module
from tokenformer.errors import BadResultError
from tokenformer.io import check_folder
from tokenformer.training import run as run_module
from tokenformer.training import trainer as trainer_module
from tokenformer.training.checkpoint import checkpoints, last_good
from tokenformer.training.trainer import LadderTrainer, NotFiniteError
from training_runs import assert_equal, assert_same, kill_at, kill_often, run, run_in_child, weights, write_recipe


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run that nothing disturbed, its recipe, and the seconds it took."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = write_recipe(folder)
    run(recipe, folder / "warm")  # prepares the data, as every later run finds it
    start = time.perf_counter()
    assert run_in_child(recipe, folder / "run") == 0
    return recipe, folder / "run", time.perf_counter() - start


def test_killed_with_an_average_of_the_weights(tmp_path):
    recipe = write_recipe(tmp_path, training={"ema": 0.8, "layer_decay": 0.7})
    run(recipe, tmp_path / "whole")
    killed = kill_at(trainer_module, "seal_folder", 4)
    assert run_in_child(recipe, tmp_path / "run", before=killed) == -signal.SIGKILL
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(uninterrupted, tmp_path, kills):
    """Bit by bit the weights, and line by line the metrics, of a run that was left alone."""
    recipe, reference, seconds = uninterrupted
    kill_often(recipe, tmp_path, reference, seconds, kills)


# What is killed, before which of its calls, and before which others in the slow tests.
WORST_MOMENTS = [
    (trainer_module, "seal_folder", (3,), (1, 6)),  # everything is written, but has no name yet
    (io_module, "seal_folder", (2,), (1, 3)),  # the same for first checkpoints, grown ones and models
    (io_module, "_sync", (), (30, 3)),  # half-way to the disk
    (run_module, "grow_checkpoint", (1,), (2,)),
    (run_module, "_write_json", (2,), (1, 3, 5)),  # between a stage's model and the note that it is done
    (run_module, "_measure_growth", (), (1, 2)),
]


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        pytest.param(module, name, call, marks=[pytest.mark.slow] if call in more else [])
        for module, name, calls, more in WORST_MOMENTS
        for call in (*calls, *more)
    ],
)
def test_killed_at_the_worst_moments(uninterrupted, tmp_path, module, name, call):
    recipe, reference, _ = uninterrupted
    assert run_in_child(recipe, tmp_path / "run", before=kill_at(module, name, call)) == -signal.SIGKILL
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference)


def interrupted(recipe, out, save_calls):
    """A run that died, with some checkpoints in its first stage."""
    assert run_in_child(recipe, out, before=kill_at(trainer_module, "seal_folder", save_calls)) == -signal.SIGKILL


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        "missing",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("manifest", marks=pytest.mark.slow),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_one_before_it_used(uninterrupted, tmp_path, damage, capsys):
    recipe, reference, _ = uninterrupted
    out = tmp_path / "run"
    interrupted(recipe, out, 3)
    newest = checkpoints(out / "stage-1")[-1]
    assert newest.name == "checkpoint-8"
    victim = newest / ("MANIFEST.json" if damage == "manifest" else "optimizer.safetensors")
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    with pytest.raises(BadFileError, match=victim.name):
        check_folder(newest)
    good, problems = last_good(out / "stage-1")
    assert good.name == "checkpoint-4"
    assert victim.name in problems[0]
    assert run_in_child(recipe, out) == 0
    assert (out / "stage-1" / "broken-checkpoint-8").exists()
    shutil.rmtree(out / "stage-1" / "broken-checkpoint-8")
    assert_same(out, reference)


def test_the_last_checkpoint_of_a_finished_stage_is_broken(uninterrupted, tmp_path):
    """The stage's last steps are made again before the model grows."""
    recipe, reference, _ = uninterrupted
    out = tmp_path / "run"
    assert run_in_child(recipe, out, before=kill_at(run_module, "grow_checkpoint", 1)) == -signal.SIGKILL
    assert (out / "stage-1" / "result.json").exists()
    for _ in range(2):  # a second time, over what was set aside the first time
        (out / "stage-1" / "checkpoint-10" / "model.safetensors").write_bytes(b"")
        kill = kill_at(run_module, "grow_checkpoint", 1)
        assert run_in_child(recipe, out, before=kill) == -signal.SIGKILL
    assert run_in_child(recipe, out) == 0
    shutil.rmtree(out / "stage-1" / "broken-checkpoint-10")
    assert_same(out, reference)


def test_a_mistake_does_not_burn_the_folder(uninterrupted, tmp_path):
    """A run whose first step was never made may be started again with another recipe."""
    recipe, _, _ = uninterrupted
    with pytest.raises(BadRequestError, match="nowhere"):
        run(recipe, tmp_path / "run", f"data.train={tmp_path / 'nowhere'}")
    run(recipe, tmp_path / "run", "growth.stages=[{steps: 1}]")


def test_no_good_checkpoint_at_all(uninterrupted, tmp_path):
    recipe, _, _ = uninterrupted
    interrupted(recipe, tmp_path / "run", 2)
    for checkpoint in checkpoints(tmp_path / "run" / "stage-1"):
        (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadFileError, match=r"stage-1 has no good checkpoint: .*model.safetensors has 0 bytes"):
        run(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),  # torch.save's
    ],
)
def test_a_full_disk_leaves_the_last_good_checkpoint(uninterrupted, tmp_path, monkeypatch, error):
    recipe, reference, _ = uninterrupted
    original, calls = LadderTrainer._save_optimizer_and_scheduler, iter(range(10**6))

    def full(self, output_dir):
        original(self, output_dir)
        if next(calls) == 1:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(LadderTrainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(BadResultError, match=r"checkpoint-8 could not be written: .*; free some space"):
            run(recipe, tmp_path / "run")
    assert [c.name for c in checkpoints(tmp_path / "run" / "stage-1")] == ["checkpoint-0", "checkpoint-4"]
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference)


def test_a_folder_that_cannot_be_written(uninterrupted, tmp_path):
    recipe, _, _ = uninterrupted
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BadRequestError, match=r"file/run cannot be written \(Not a directory\); choose another"):
        run(recipe, tmp_path / "file" / "run")


def test_a_second_process_on_the_same_run(uninterrupted, tmp_path):
    recipe, _, _ = uninterrupted
    out = tmp_path / "run"
    out.mkdir()
    holds = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds, str(out / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(
            BadRequestError, match=r"another process is training in .*run; wait for it, or choose another"
        ):
            run(recipe, out)
        other.stdin.close()


def test_another_recipe_in_the_same_folder_is_refused(uninterrupted, tmp_path):
    recipe, reference, _ = uninterrupted
    with pytest.raises(BadRequestError, match=r"was started with training.learning_rate=0.003, and now it is 0.1"):
        run(recipe, reference, "training.learning_rate=0.1")


def test_another_batch_in_the_same_folder_is_refused(tmp_path):
    """How a step is shared out may change; what a step is may not."""
    stages = {"stages": [{"steps": 2}]}
    recipe = write_recipe(tmp_path, growth=stages, training={"global_batch": None, "per_device_train_batch_size": 4})
    run(recipe, tmp_path / "run")
    (tmp_path / "run" / "stage-1" / "result.json").unlink()
    shared = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    run(recipe, tmp_path / "run", *shared)
    with pytest.raises(BadRequestError, match=r"was started with 128 tokens a step, and now it would be 256"):
        run(recipe, tmp_path / "run", "training.per_device_train_batch_size=8")
    run(recipe, tmp_path / "run", "training.per_device_train_batch_size=1", "training.global_batch=4")


def test_a_plateau_needs_something_held_out(tmp_path):
    recipe = write_recipe(tmp_path, growth={"trigger": "plateau"}, data={"validation_fraction": 0})
    with pytest.raises(BadRequestError, match="plateau, which needs validation data, and none is held out"):
        run(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_other_data_under_the_same_name_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one line of text and another\n" * 200)
    recipe = write_recipe(tmp_path, growth={"stages": [{"steps": 2}]}, data={"train": str(text)})
    run(recipe, tmp_path / "run")
    text.write_text("other text\n" * 600)
    with pytest.raises(BadRequestError, match=r"run was started with other data than the recipe's sources hold now"):
        run(recipe, tmp_path / "run")


def test_a_finished_run_is_left_as_it_is(uninterrupted):
    recipe, reference, _ = uninterrupted
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*") if path.name != "lock"}
    assert run(recipe, reference) == reference / "stage-3" / "model"
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*") if path.name != "lock"} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(uninterrupted, tmp_path, number):
    recipe, reference, _ = uninterrupted

    def before():
        original, calls = LadderTrainer.training_step, iter(range(1, 10**6))

        def step(self, *args, **kwargs):
            if next(calls) == 7:
                os.kill(os.getpid(), number)
            return original(self, *args, **kwargs)

        LadderTrainer.training_step = step

    out = tmp_path / "run"
    assert run_in_child(recipe, out, before=before) == 128 + number
    assert checkpoints(out / "stage-1")[-1].name == "checkpoint-7"
    assert run_in_child(recipe, out) == 0
    assert_equal(weights(out, 3), weights(reference, 3))


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_stops_the_run(uninterrupted, tmp_path, monkeypatch, what, clip):
    recipe, _, _ = uninterrupted
    original, calls = Trainer.training_step, iter(range(1, 10**6))

    def step(self, model, *args, **kwargs):
        loss = original(self, model, *args, **kwargs)
        if next(calls) == 6:
            if what == "loss":
                return loss * float("nan")
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(Trainer, "training_step", step)
    with pytest.raises(NotFiniteError, match=rf"the {what} is (nan|inf) at step 6; the last good checkpoint is .*-4;"):
        run(recipe, tmp_path / "run", f"training.max_grad_norm={clip}")


def test_an_overflow_is_left_to_the_scaler_of_fp16(monkeypatch):
    monkeypatch.setattr(Trainer, "_get_grad_norm", lambda self, model, grad_norm=None: torch.tensor(torch.nan))
    trainer = LadderTrainer.__new__(LadderTrainer)
    trainer.frozen, trainer.accelerator = None, SimpleNamespace(scaler=object())
    assert trainer._get_grad_norm(None).isnan()


def test_only_tensors_are_ever_unpickled(uninterrupted):
    """Weights and moments are safetensors; what is left is read with weights_only."""
    _, reference, _ = uninterrupted
    for path in reference.rglob("*"):
        if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
            assert path.name.startswith("rng_state"), path
    state = json.loads((reference / "stage-3" / "checkpoint-27" / "trainer_state.json").read_text())
    assert state["global_step"] == 27


@pytest.mark.parametrize("seals", [6, *(pytest.param(seals, marks=pytest.mark.slow) for seals in (2, 4))])
def test_a_stream_is_carried_on_at_its_place(tmp_path, seals):
    """Through the end of the corpus, where it starts again in another order, and through growth."""
    recipe = write_recipe(
        tmp_path,
        data={"streaming": True, "shuffle_buffer": 20},
        growth={"stages": [{"steps": 90}, {"factor": 2, "steps": 60}, {"factor": 2, "steps": 3}]},
        training={"save_steps": 20, "eval_steps": 50, "logging_steps": 10, "gradient_accumulation_steps": 2},
    )
    run(recipe, tmp_path / "whole")
    assert (
        run_in_child(recipe, tmp_path / "run", before=kill_at(trainer_module, "seal_folder", seals)) == -signal.SIGKILL
    )
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_the_command_carries_on_after_a_kill(uninterrupted, tmp_path):
    """The same through the command line, in a process that starts from nothing."""
    recipe, reference, _ = uninterrupted
    command = [sys.executable, "-m", "tokenformer", "train", str(recipe), f"training.output_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "run" / "stage-1" / "checkpoint-4").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stage-3/model" in done.stdout
    assert_same(tmp_path / "run", reference)
