"""A stage that trains a token group: on data of its own, killed and resumed, with the base untouched."""

import io
import signal

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from conftest import relative_error
from tokenformer import BadRequestError, load_tokens, save_tokens, token_groups, use_tokens
from tokenformer.training import load_recipe, train
from tokenformer.training import run as run_module
from tokenformer.training import trainer as trainer_module
from training_runs import assert_same, kill_at, metrics, run, run_in_child, weights, write_recipe

GROUP = {"group": "capitals", "num_tokens": {"ffn": 16, "out": 4}, "steps": 8}
IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


def recipe_with_a_group(folder, **changes):
    other = folder / "capitals"
    other.mkdir(exist_ok=True)
    for i in range(20):
        (other / f"{i}.txt").write_text(f"THE {i}TH TEXT SHOUTS, AND SHOUTS AGAIN.\n" * 9)
    stages = [{"steps": 10}, {**GROUP, "data": {"train": str(other)}}, {"factor": 2, "steps": 9}]
    return write_recipe(folder, growth={"stages": stages}, **changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    recipe = recipe_with_a_group(folder)
    run(recipe, folder / "run")
    return recipe, folder / "run"


def test_only_the_group_learns_and_on_its_own_data(uninterrupted, tmp_path):
    _, out = uninterrupted
    base, grouped = weights(out, 1), weights(out, 2)
    assert all(torch.equal(grouped[name], tensor) for name, tensor in base.items())
    own = {name for name in grouped if name not in base}
    assert own
    assert all(".token_groups.capitals." in name for name in own)
    model = AutoModelForCausalLM.from_pretrained(out / "stage-2" / "model").eval()
    first = AutoModelForCausalLM.from_pretrained(out / "stage-1" / "model").eval()
    (facts,) = token_groups(model)
    assert (facts.name, facts.kept, facts.on) == ("capitals", True, True)
    with torch.no_grad():
        learnt = model(IDS).logits
        assert torch.equal(use_tokens(model)(IDS).logits, first(IDS).logits)
        assert relative_error(learnt, first(IDS).logits) > 1e-4
        # The group alone, beside the base that it was trained beside.
        folder = save_tokens(use_tokens(model, "capitals"), "capitals", tmp_path / "capitals")
        assert torch.equal(load_tokens(first, folder)(IDS).logits, learnt)
    growth = [line for line in metrics(out) if line["kind"] == "growth"]
    assert [line["method"] for line in growth] == ["group capitals", "rotate"]
    assert growth[0]["validation_loss_before"] == pytest.approx(growth[0]["validation_loss_after"], abs=1e-6)
    shouted = [line["validation_loss"] for line in metrics(out) if line["kind"] == "validation" and line["stage"] == 2]
    assert shouted[-1] < growth[0]["validation_loss_before"]


def test_the_next_stage_trains_all_and_keeps_the_group(uninterrupted):
    _, out = uninterrupted
    before, after = weights(out, 2), weights(out, 3)
    key = "model.layers.0.ffn.token_groups.capitals.value_tokens"
    assert after[key].shape == before[key].shape
    assert not torch.equal(after[key], before[key])
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (trainer_module, "seal_folder", 5),  # in the stage of the group
        pytest.param(run_module, "grow_checkpoint", 1, marks=pytest.mark.slow),
        pytest.param(run_module, "_measure_growth", 1, marks=pytest.mark.slow),
        pytest.param(run_module, "_write_json", 4, marks=pytest.mark.slow),
    ],
)
def test_killed_and_carried_on_to_the_same_bits(uninterrupted, tmp_path, module, name, call):
    recipe, reference = uninterrupted
    assert run_in_child(recipe, tmp_path / "run", before=kill_at(module, name, call)) == -signal.SIGKILL
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference)


def test_a_trained_model_gets_a_group_in_the_first_stage(uninterrupted, tmp_path):
    _, out = uninterrupted
    model = {"checkpoint": str(out / "stage-1" / "model")}
    recipe = write_recipe(tmp_path, growth={"stages": [GROUP]}, model=model, training={"ema": 0.9})
    said = io.StringIO()
    train(load_recipe(recipe, [f"training.output_dir={tmp_path / 'run'}"]), Console(file=said))
    base, grouped = weights(out, 1), weights(tmp_path / "run", 1)
    assert all(torch.equal(grouped[name], tensor) for name, tensor in base.items())
    assert any(name.endswith("capitals.key_tokens") for name in grouped)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"group": "law", "steps": 3}, r"group is given, with no num_tokens, as \{ffn: 64\}"),
        ({**GROUP, "factor": 2}, "group is given, with factor beside it; a group has a name"),
        ({**GROUP, "num_tokens": {"fnn": 3}}, r"growth.stages\[1\]: num_tokens has the key 'fnn'; did you mean 'ffn'"),
        ({**GROUP, "num_tokens": {"ffn": 0}}, r"growth.stages\[1\]: num_tokens of ffn is 0; at least 1 is needed"),
        ({**GROUP, "group": "a b"}, r"growth.stages\[1\]: a token group cannot be called 'a b'"),
        (
            {**GROUP, "data": {"tokenizer": "bytes"}},
            r"stages\[1\].data: tokenizer is given, and the model has one for all",
        ),
        ({**GROUP, "data": {"trian": "x"}}, r"stages\[1\].data: .*'trian'.*did you mean 'train'"),
        (
            {"factor": 2, "steps": 3, "data": {"train": "x"}},
            "data is given, which only a stage that trains a group may",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(tmp_path, stage, message):
    with pytest.raises(BadRequestError, match=message) as error:
        run(write_recipe(tmp_path, growth={"stages": [{"steps": 10}, stage]}), tmp_path / "run")
    assert "\n" not in str(error.value)


def test_a_new_model_is_no_base(tmp_path):
    with pytest.raises(BadRequestError, match=r"stages\[0\]: a group is all that it trains, and the model is new"):
        run(write_recipe(tmp_path, growth={"stages": [GROUP]}), tmp_path / "run")
