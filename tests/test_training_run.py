"""Runs from a recipe to the last stage's model: what they leave, what they log, what trains and what does not."""

import itertools
import json
import math
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenformer import grow
from tokenformer.training.measure import GrowthRiseError
from training_runs import metrics, run, weights, write_recipe


@pytest.fixture(scope="module")
def ladder_run(tmp_path_factory):
    """One run of three stages that several tests look at."""
    folder = tmp_path_factory.mktemp("ladder")
    out = folder / "run"
    model = run(write_recipe(folder), out)
    return out, model


def test_every_stage_leaves_an_ordinary_model(ladder_run):
    out, model = ladder_run
    assert model == out / "stage-3" / "model"
    for stage, tokens in ((1, 16), (2, 32), (3, 64)):
        loaded = AutoModelForCausalLM.from_pretrained(out / f"stage-{stage}" / "model")
        assert loaded.config.qkv_tokens == tokens
        assert not loaded.config.chunked_loss
        assert len(loaded.config.growth_history or []) == stage - 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    out_ids = loaded.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out_ids[0]).startswith("def ")


def test_metrics_tell_the_whole_story(ladder_run):
    out, _ = ladder_run
    lines = metrics(out)
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [*range(2, 27, 2), 27]
    assert [line["stage"] for line in train] == [1] * 5 + [2] * 4 + [3] * 5
    assert all(line["tokens"] == line["step"] * 8 * 32 for line in lines)
    flops = [line["flops"] for line in train]
    assert flops == sorted(flops)
    per_step = [b - a for a, b in itertools.pairwise(flops)]
    assert per_step[-2] > 1.5 * per_step[0]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in train)
    assert train[-1]["loss"] < train[0]["loss"] - 1
    assert {"stage", "step", "tokens", "flops", "parameters", "loss", "lr", "grad_norm"} <= set(train[0])
    validation = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validation][:2] == [5, 10]


def test_growth_is_not_felt(ladder_run):
    out, _ = ladder_run
    steps = [line for line in metrics(out) if line["kind"] == "growth"]
    assert [line["step"] for line in steps] == [10, 18]
    for line in steps:
        assert line["validation_loss_after"] == pytest.approx(line["validation_loss_before"], abs=1e-4)
        assert line["parameters"] > line["parameters_before"]


def test_one_schedule_over_the_ladder_and_a_checkpoint_before_the_decay(ladder_run):
    out, _ = ladder_run
    rates = {line["step"]: line["lr"] for line in metrics(out) if line["kind"] == "train"}
    assert rates[2] == pytest.approx(3e-3 * 2 / 4)
    assert all(rates[step] == pytest.approx(3e-3) for step in range(4, 23, 2))
    assert rates[26] < 0.5 * 3e-3
    kept = {path.name for path in (out / "stage-3").glob("checkpoint-*")}
    assert kept == {"checkpoint-22", "checkpoint-24", "checkpoint-27"}
    assert (out / "stage-3" / "checkpoint-22" / "KEEP").exists()


def test_a_rate_from_a_stage_on(tmp_path):
    stages = [{"steps": 4}, {"factor": 2, "steps": 4, "learning_rate": 1e-3}, {"factor": 2, "steps": 4}]
    recipe = write_recipe(tmp_path, growth={"stages": stages, "warmup_steps": 0, "decay_steps": 2})
    run(recipe, tmp_path / "run")
    rates = {line["step"]: line["lr"] for line in metrics(tmp_path / "run") if line["kind"] == "train"}
    assert rates[4] == pytest.approx(3e-3)
    assert rates[6] == rates[8] == rates[10] == pytest.approx(1e-3)
    assert rates[12] == pytest.approx(0.5e-3)


def test_a_decay_that_begins_with_the_last_growth_keeps_the_grown_checkpoint(tmp_path):
    stages = [{"steps": 4}, {"factor": 2, "steps": 6}]
    recipe = write_recipe(tmp_path, growth={"stages": stages, "warmup_steps": 0, "decay_steps": 20})
    run(recipe, tmp_path / "run")
    kept = {path.parent.name for path in (tmp_path / "run" / "stage-2").glob("checkpoint-*/KEEP")}
    assert kept == {"checkpoint-4"}


def test_a_ladder_can_be_climbed_further_from_before_the_decay(ladder_run, tmp_path):
    out, _ = ladder_run
    recipe = write_recipe(tmp_path, growth={"stages": [{"steps": 3}, {"factor": 2, "steps": 3}], "warmup_steps": 0})
    start = out / "stage-3" / "checkpoint-22"
    text = recipe.read_text()
    recipe.write_text(
        text[: text.index("model:")] + f"model:\n  checkpoint: {start}\n" + text[text.index("training:") :]
    )
    model = run(recipe, tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(model).config.qkv_tokens == 128
    first = next(line for line in metrics(tmp_path / "run") if line["kind"] == "train")
    before = next(line for line in metrics(out) if line["kind"] == "train" and line["step"] == 22)
    assert first["loss"] == pytest.approx(before["loss"], abs=0.3)


def test_a_checkpoint_decides_the_model_whatever_the_recipe_says(ladder_run, tmp_path):
    """So that the recipe of the first run serves for going on."""
    out, _ = ladder_run
    recipe = write_recipe(tmp_path, growth={"stages": [{"steps": 2}, {"factor": 2, "steps": 2}]})
    model = run(recipe, tmp_path / "run", f"model.checkpoint={out / 'stage-2' / 'model'}")
    assert AutoModelForCausalLM.from_pretrained(model).config.qkv_tokens == 64
    parameters = {line["parameters"] for line in metrics(tmp_path / "run") if line["stage"] == 1}
    assert parameters == {line["parameters"] for line in metrics(out) if line["stage"] == 2}


def test_what_was_frozen_keeps_its_moments_for_later(tmp_path):
    stages = [{"steps": 4}, {"factor": 2, "steps": 3, "trains": "new"}, {"factor": 2, "steps": 2}]
    run(write_recipe(tmp_path, growth={"stages": stages}), tmp_path / "run")
    state = load_file(tmp_path / "run" / "stage-3" / "checkpoint-9" / "optimizer.safetensors")
    assert state["model.embed_tokens.weight/step"] == 6
    assert state["model.layers.0.ffn.key_tokens/step"] == 9


def test_growth_is_measured_in_the_same_arithmetic_before_and_after(tmp_path):
    """Mixed precision is around the model after training, and not yet around the one that was just loaded."""
    stages = {"stages": [{"steps": 12}, {"factor": 2, "steps": 2}]}
    run(write_recipe(tmp_path, growth=stages, training={"bf16": True}), tmp_path / "run")
    (step,) = [line for line in metrics(tmp_path / "run") if line["kind"] == "growth"]
    assert step["validation_loss_after"] == pytest.approx(step["validation_loss_before"], abs=1e-5)


def test_signals_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(write_recipe(tmp_path, growth={"stages": [{"steps": 1}]}), tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_growth_is_one_stage_with_a_cosine(tmp_path):
    recipe = write_recipe(tmp_path, growth={"stages": [], "warmup_steps": 2}, training={"max_steps": 8})
    run(recipe, tmp_path / "run")
    rates = [line["lr"] for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert rates[0] == pytest.approx(3e-3)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.3 * 3e-3


def test_each_stage_its_own_cosine(tmp_path):
    recipe = write_recipe(tmp_path, growth={"schedule": "cosine", "stages": [{"steps": 8}, {"factor": 2, "steps": 8}]})
    run(recipe, tmp_path / "run")
    rates = {line["step"]: line["lr"] for line in metrics(tmp_path / "run") if line["kind"] == "train"}
    assert rates[4] == pytest.approx(3e-3)
    assert rates[8] < 0.5 * 3e-3
    assert rates[10] == pytest.approx(3e-3 * 2 / 4)
    assert rates[12] == pytest.approx(3e-3)


@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
def test_training_only_new_tokens_moves_no_old_one(tmp_path, method):
    stages = [{"steps": 6}, {"factor": 2, "steps": 6, "trains": "new", "method": method}]
    run(write_recipe(tmp_path, growth={"stages": stages}), tmp_path / "run")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "stage-1" / "model")
    grown = grow(before, 2, method=method, seed=2).state_dict()
    after = weights(tmp_path / "run", 2)
    for name, values in after.items():
        rows = grown[name].shape[0] // 2 if name.endswith("_tokens") else None
        assert torch.equal(values[:rows] if rows else values, grown[name][:rows] if rows else grown[name]), name
    key = "model.layers.0.ffn.key_tokens"
    assert not torch.equal(after[key][64:], grown[key][64:])


def test_adam_reset_starts_without_moments(tmp_path):
    stages = [{"steps": 6}, {"factor": 2, "steps": 4, "adam": "reset"}]
    run(write_recipe(tmp_path, growth={"stages": stages}, training={"keep_checkpoints": 9}), tmp_path / "run")
    assert (tmp_path / "run" / "stage-1" / "checkpoint-6" / "optimizer.safetensors").exists()
    assert not (tmp_path / "run" / "stage-2" / "checkpoint-6" / "optimizer.safetensors").exists()
    state = load_file(tmp_path / "run" / "stage-2" / "checkpoint-10" / "optimizer.safetensors")
    assert state["model.layers.0.ffn.key_tokens/step"] == 4


def test_a_plateau_grows_the_model_early(tmp_path):
    """With a rate of almost nothing the loss is flat from the start."""
    recipe = write_recipe(
        tmp_path,
        growth={"trigger": "plateau", "patience": 2, "stages": [{"steps": 500}, {"factor": 2, "steps": 4}]},
        training={"learning_rate": 1e-9, "eval_steps": 2},
    )
    run(recipe, tmp_path / "run")
    result = json.loads((tmp_path / "run" / "stage-1" / "result.json").read_text())
    assert result["step"] == 6
    assert [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "growth"] == [6]
    assert metrics(tmp_path / "run")[-1]["step"] == 10


def test_the_authors_growth_may_raise_the_loss(tmp_path):
    stages = [{"steps": 20}, {"factor": 4, "steps": 2, "method": "random"}]
    run(write_recipe(tmp_path, growth={"stages": stages}), tmp_path / "run")
    (step,) = [line for line in metrics(tmp_path / "run") if line["kind"] == "growth"]
    assert abs(step["validation_loss_after"] - step["validation_loss_before"]) > 1e-3


def test_exact_growth_that_is_felt_stops_the_run(tmp_path, monkeypatch):
    from tokenformer.growth import layer

    monkeypatch.setattr(layer, "grown_tau", lambda tau, kind, step, method: tau / 100)
    with pytest.raises(GrowthRiseError, match=r"rose from .* when the model grew into stage 2 by rotate"):
        run(write_recipe(tmp_path), tmp_path / "run")
    assert (tmp_path / "run" / "stage-1" / "result.json").exists()


def test_the_final_loss_of_the_resolved_recipe_is_the_same(ladder_run, tmp_path):
    """RUN/recipe.yaml is a recipe that makes the run again, bit by bit."""
    out, _ = ladder_run
    run(out / "recipe.yaml", tmp_path / "again")
    assert metrics(tmp_path / "again") == metrics(out)
    ours, theirs = weights(tmp_path / "again", 3), weights(out, 3)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
