"""Two processes over gloo: the same data, the same losses as one, sharded for real, and resumed by any number."""

import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
import transformers

from tokenformer.training.support import has_fsdp
from training_runs import metrics, run, weights, write_image_recipe, write_recipe

HAS_FSDP = has_fsdp(transformers.__version__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tokenformer"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


# Without dropout, whose random numbers each process draws for itself, and at a rate at which a difference in the last
# bit of a sum does not double with every step.
TRAINING = {"learning_rate": 3e-4}
PARAMETERS = {"text": 23, "deep": 23, "images": 28, "muon": 23, "nested": 23}
DEEP = {"stages": [{"steps": 10}, {"depth": 3, "steps": 8}, {"depth": 4, "factor": 2, "steps": 9}]}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, request):
    """The run to compare with. Images have mixed labels, a worker each, an average, and rates by depth."""
    folder = tmp_path_factory.mktemp("one")
    if request.param != "images":
        growth = DEEP if request.param == "deep" else {}
        training = {**TRAINING, "optimizer": "muon" if request.param == "muon" else "adamw"}
        if request.param == "nested":  # a process divides its own rows: those of a micro-batch here
            training |= {"nested": [0.25, 0.5, 1.0], "gradient_accumulation_steps": 2}
        recipe = write_recipe(folder, model={"attention_dropout": 0.0}, training=training, growth=growth)
    else:
        recipe = write_image_recipe(folder, model={"attention_dropout": 0.0, "drop_path_rate": 0.0}, training=TRAINING)
    run(recipe, folder / "run")
    return recipe, folder / "run", PARAMETERS[request.param]


def two_processes(recipe, out, *overrides):
    command = [*TORCHRUN, "train", str(recipe), f"training.output_dir={out}", *overrides]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def assert_equal_to_one(out, reference):
    ours, theirs = metrics(out), metrics(reference)
    assert [(line["kind"], line["step"]) for line in ours] == [(line["kind"], line["step"]) for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key in (key for key in other if "loss" in key):
            assert mine[key] == pytest.approx(other[key], rel=1e-5), (mine["kind"], mine["step"], key)
    for stage in (1, 2, 3):
        mine, other = weights(out, stage), weights(reference, stage)
        for name in other:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("one_process", "parallel"),
    [
        pytest.param("text", "ddp", marks=pytest.mark.slow),
        ("text", "fsdp"),
        pytest.param("images", "ddp", marks=pytest.mark.slow),
        pytest.param("images", "fsdp", marks=pytest.mark.slow),
        pytest.param("deep", "fsdp", marks=pytest.mark.slow),
        pytest.param("muon", "ddp", marks=pytest.mark.slow),
        pytest.param("muon", "fsdp", marks=pytest.mark.slow),
        pytest.param("nested", "ddp", marks=pytest.mark.slow),
        pytest.param("nested", "fsdp", marks=pytest.mark.slow),
    ],
    indirect=["one_process"],
)
def test_two_processes_are_equal_to_one(one_process, tmp_path, parallel):
    recipe, reference, parameters = one_process
    together = "training.gradient_accumulation_steps=1"  # what one process may have done in two parts
    done = two_processes(recipe, tmp_path / "run", f"training.parallel={parallel}", together)
    if parallel == "fsdp" and not HAS_FSDP:
        assert "training.parallel is fsdp, which needs transformers 5.19 or newer" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    said = re.search(r"2 processes over gloo: (.*)", done.stderr).group(1)
    assert said == ("DDP" if parallel == "ddp" else f"FSDP2, {parameters} parameters sharded")
    assert_equal_to_one(tmp_path / "run", reference)
    states = sorted((tmp_path / "run" / "stage-3").glob("checkpoint-27/rng_state_*.pth"))
    first, second = (torch.load(path, weights_only=False)["cpu"] for path in states)
    assert not torch.equal(first, second)  # or all processes would drop the same paths


@pytest.mark.parametrize("one_process", ["text", pytest.param("images", marks=pytest.mark.slow)], indirect=True)
def test_killed_with_two_processes_and_carried_on_with_one(one_process, tmp_path):
    """In the second stage: the model has grown from a checkpoint that two processes wrote."""
    recipe, reference, _ = one_process
    out = tmp_path / "run"
    parallel = "fsdp" if HAS_FSDP else "ddp"
    command = [*TORCHRUN, "train", str(recipe), f"training.output_dir={out}", f"training.parallel={parallel}"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out / "stage-2" / "checkpoint-12").exists():
        time.sleep(0.01)
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        child.kill()
        child.wait()
    assert not (out / "stage-2" / "result.json").exists()
    run(recipe, out)
    assert_equal_to_one(out, reference)


def test_a_lost_process_says_what_to_do(tmp_path):
    recipe, out = write_recipe(tmp_path, growth={"stages": [{"steps": 100_000}]}), tmp_path / "run"
    command = [*TORCHRUN, "train", str(recipe), f"training.output_dir={out}"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=said)
        while process.poll() is None and not (out / "stage-1" / "checkpoint-4").exists():
            time.sleep(0.01)
        children = psutil.Process(process.pid).children()
        next(child for child in children if child.environ().get("RANK") == "1").kill()
        assert process.wait(timeout=120) == 1
    line = next(line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("error: "))
    assert line.startswith("error: another process of this run has died; torchrun prints its exit code below")
    assert line.endswith(f"Run the same command again to resume from the last checkpoint in {out}")


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared(tmp_path):
    done = two_processes(write_recipe(tmp_path), tmp_path / "run", "training.global_batch=7")
    assert done.returncode != 0
    assert "training.global_batch is 7; with 2 processes and accumulation it must be divisible by 2" in done.stderr
