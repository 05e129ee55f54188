"""Runs from a recipe to the last stage's model: what they leave, what they log, what trains and what does not."""

import io
import itertools
import json
import math
import re
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState, TrainingArguments

from tokenformer import grow
from tokenformer.training import load_recipe, train
from tokenformer.training.callbacks import Bar, Metrics
from tokenformer.training.ladder import build_ladder
from tokenformer.training.validation import GrowthRiseError
from training_runs import metrics, run, weights, write_recipe


@pytest.fixture(scope="module")
def ladder_run(tmp_path_factory):
    """One run of three stages that several tests look at."""
    folder = tmp_path_factory.mktemp("ladder")
    out = folder / "run"
    said = io.StringIO()
    model = train(load_recipe(write_recipe(folder), [f"training.output_dir={out}"]), Console(file=said))
    (folder / "said").write_text(said.getvalue())
    return out, model


def test_a_log_file_has_losses_speed_and_the_time_left(ladder_run):
    out, _ = ladder_run
    lines = [line for line in (out.parent / "said").read_text().splitlines() if " step " in line]
    assert lines[0].startswith("stage 1/3  step 2/27  loss ")
    measured = r"stage 3/3  step 26/27  loss \d\.\d{3}  val \d\.\d{3}  [\d,]+ tokens/s  \d:\d\d:\d\d left"
    assert any(re.fullmatch(measured, line) for line in lines), lines


def test_the_bar_fits_80_columns_and_counts_larger_models_for_more(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path))
    recipe.data.inspect(count_samples=False)  # the tokenizer, or a vocabulary that outweighs the layers is assumed
    ladder = build_ladder(recipe, 1)
    metrics = Metrics(tmp_path / "metrics.jsonl", ladder)
    metrics.speed = 1_234_567.0
    console = Console(file=(drawn := io.StringIO()), force_terminal=True, width=80)
    bar, state, control = Bar(console, ladder, metrics), TrainerState(is_world_process_zero=True), TrainerControl()
    args = TrainingArguments(output_dir=str(tmp_path))
    bar.on_train_begin(args, state, control)
    state.global_step = ladder.stages[0].end  # 10 of 27 steps
    bar.on_log(args, state, control, logs={"loss": 2.5})
    bar.on_evaluate(args, state, control, metrics={"eval_loss": 2.75})
    bar.on_step_end(args, state, control)
    done = bar.progress.tasks[0].percentage
    bar.close()
    assert done == pytest.approx(100 * ladder.flops(10) / ladder.flops(27))
    assert done < 100 * 10 / 27 - 5
    last = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn.getvalue()).splitlines()[-1].rpartition("\r")[2]
    assert len(last) <= 80
    assert re.search(r"stage 1/3  step 10/27 .*loss 2\.500  val 2\.750  1,234,567 tokens/s", last)


def test_every_stage_leaves_an_ordinary_model(ladder_run):
    out, model = ladder_run
    assert model == out / "stage-3" / "model"
    for stage, tokens in ((1, 16), (2, 32), (3, 64)):
        loaded = AutoModelForCausalLM.from_pretrained(out / f"stage-{stage}" / "model")
        assert loaded.config.qkv_tokens == tokens
        assert not loaded.config.chunked_loss
        assert len(loaded.config.growth_history or []) == stage - 1
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert loaded.config.pad_token_id == tokenizer.pad_token_id is not None
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
    # The tokens are bytes, and the end of each of the few documents is one more.
    bits = [line["validation_bits_per_byte"] / line["validation_loss"] * math.log(2) for line in validation]
    assert bits == pytest.approx([bits[0]] * len(bits))
    assert 1 < bits[0] < 1.1


def test_growth_does_not_change_the_loss(ladder_run):
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


@pytest.mark.parametrize("size", [{"factor": 2}, {"depth": 3}])
def test_a_plateau_grows_the_model_early(tmp_path, size):
    """With a rate of almost nothing the loss is flat from the start."""
    recipe = write_recipe(
        tmp_path,
        growth={"trigger": "plateau", "patience": 2, "stages": [{"steps": 500}, {**size, "steps": 4}]},
        training={"learning_rate": 1e-9, "eval_steps": 2},
    )
    train(load_recipe(recipe, [f"training.output_dir={tmp_path / 'run'}"]), Console(file=(said := io.StringIO())))
    assert "stage 1/2 ends at step 6: the validation loss has flattened: the best of the last 2 is " in said.getvalue()
    result = json.loads((tmp_path / "run" / "stage-1" / "result.json").read_text())
    assert result["step"] == 6
    assert [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "growth"] == [6]
    assert metrics(tmp_path / "run")[-1]["step"] == 10


def test_the_authors_growth_may_raise_the_loss(tmp_path):
    stages = [{"steps": 20}, {"factor": 4, "steps": 2, "method": "random"}]
    run(write_recipe(tmp_path, growth={"stages": stages}), tmp_path / "run")
    (step,) = [line for line in metrics(tmp_path / "run") if line["kind"] == "growth"]
    assert abs(step["validation_loss_after"] - step["validation_loss_before"]) > 1e-3


def test_exact_growth_that_changes_the_loss_stops_the_run(tmp_path, monkeypatch):
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
