"""A ladder that grows in depth: alone and with tokens, killed and carried on, averaged, with all tokens or new ones."""

import itertools
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from command import ended
from command import run as run_command
from tokenformer.training import run as run_module
from training_runs import assert_same, kill_at, metrics, run, run_in_child, weights, write_recipe

STAGES = [{"steps": 8}, {"depth": 3, "steps": 6}, {"depth": 5, "factor": 2, "new_blocks_at": "top", "steps": 6}]


def deep_recipe(folder, **changes):
    return write_recipe(folder, **{**changes, "growth": {"stages": STAGES, **changes.get("growth", {})}})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed, with an average of the weights."""
    folder = tmp_path_factory.mktemp("deep")
    recipe = deep_recipe(folder, training={"ema": 0.8, "layer_decay": 0.8})
    assert run_in_child(recipe, folder / "run") == 0
    return recipe, folder / "run"


def test_every_stage_is_deeper_and_computes_the_same(whole):
    _, out = whole
    for stage, (depth, tokens) in enumerate([(2, 16), (3, 16), (5, 32)], start=1):
        config = AutoModelForCausalLM.from_pretrained(out / f"stage-{stage}" / "model").config
        assert (config.num_hidden_layers, config.qkv_tokens) == (depth, tokens)
    lines = [line for line in metrics(out) if line["kind"] == "growth"]
    assert [line["method"] for line in lines] == ["depth", "rotate + depth"]
    for line in lines:
        for name in ("validation_loss", "ema_validation_loss"):
            assert line[f"{name}_after"] == pytest.approx(line[f"{name}_before"], abs=1e-5)
    flops = [line["flops"] for line in metrics(out) if line["kind"] == "train"]
    per_step = [later - earlier for earlier, later in itertools.pairwise(flops)]
    assert per_step[-1] > 2 * per_step[0]
    card = (out / "stage-3" / "model" / "README.md").read_text()
    assert "1. 2 -> 3 blocks (copy, after each)\n" in card
    assert "2. rotate (seed 3): 16/16/64 -> 32/32/128, 3 -> 5 blocks (copy, top)\n" in card


@pytest.mark.parametrize(
    ("name", "call"),
    [("grow_checkpoint", 1), ("_measure_growth", 2), pytest.param("_write_json", 3, marks=pytest.mark.slow)],
)
def test_killed_and_carried_on_to_the_same_bits(whole, tmp_path, name, call):
    recipe, reference = whole
    assert run_in_child(recipe, tmp_path / "run", before=kill_at(run_module, name, call)) == -signal.SIGKILL
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference)


def test_only_new_blocks_train(tmp_path):
    stages = [{"steps": 4}, {"depth": 3, "trains": "new", "steps": 4}]
    run(deep_recipe(tmp_path, growth={"stages": stages, "decay_steps": 1}), tmp_path / "run")
    before, after = weights(tmp_path / "run", 1), weights(tmp_path / "run", 2)
    for name, tensor in after.items():
        if ".layers.2." in name:
            assert tensor.ne(before[name.replace(".layers.2.", ".layers.1.")]).any() or name.endswith("tau")
        else:
            assert torch.equal(tensor, before[name]), name


def test_a_dry_run_and_a_report_show_the_depth(whole, tmp_path):
    recipe, out = whole
    said = run_command("train", recipe, "--dry-run").stdout
    assert [line.split()[-1] for line in said.splitlines() if line.strip().startswith("blocks")] == ["2", "3", "5"]
    result = run_command("report", out, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.stderr
    assert "rotate + depth" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [{"steps": 2, "depth": 3}, {"factor": 2, "steps": 2}],
            "stages[0] has depth; the first stage has the model's",
        ),
        ([{"steps": 2}, {"steps": 2, "depth": 3, "to": "tiny"}], "stages[1] has to and depth; set one of factor"),
        ([{"steps": 2}, {"steps": 2, "depth": 1}], "the model has 2 blocks and depth=1 was given"),
        ([{"steps": 2}, {"steps": 2, "depth": 3, "new_blocks": "cpy"}], "new_blocks is 'cpy'; did you mean 'copy'"),
    ],
)
def test_stages_that_cannot_be(tmp_path, stages, message):
    ended(run_command("train", deep_recipe(tmp_path, growth={"stages": stages}), "--dry-run"), 2, message)
