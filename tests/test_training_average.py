"""The average of the weights and the rates by depth, against the same written plainly, for text as for images."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conftest import make_tiny, make_tiny_vision, relative_error
from tokenformer.growth import apply_growth, plan_growth
from tokenformer.training.ema import WeightAverage, averaged_model, grow_average, read
from tokenformer.training.rates import divide_by_share, share_by_depth
from training_runs import metrics, run, write_recipe


def moved(model, steps, seed=0):
    """A model after each of some random steps."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=random)
        yield model


def averaged(model, folder, steps=5, decay=0.9):
    average = WeightAverage(model, decay, folder)
    for _ in moved(model, steps):
        average.update()
    return average


@pytest.mark.parametrize("make", [make_tiny, make_tiny_vision])
def test_the_average_is_what_its_formula_says(make, tmp_path):
    ours, plain = make(), make()
    average = WeightAverage(ours, 0.5, tmp_path)
    expected = {name: parameter.detach().double().clone() for name, parameter in plain.named_parameters()}
    for t, (_, model) in enumerate(zip(moved(ours, 12), moved(plain, 12), strict=True)):
        average.update()
        decay = min(0.5, (1 + t) / (10 + t))
        for name, parameter in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    average.save(tmp_path, write=True)
    found, updates = read(tmp_path)
    assert updates == 12
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-6)


def test_it_goes_on_from_a_file_to_the_bit(tmp_path):
    whole, cut = make_tiny(), make_tiny()
    through = averaged(whole, tmp_path / "none", steps=6)
    through.save(tmp_path, write=True)
    expected, _ = read(tmp_path)
    steps = moved(cut, 6)
    first = WeightAverage(cut, 0.9, tmp_path / "none")
    for _ in range(4):
        next(steps)
        first.update()
    first.save(tmp_path, write=True)
    second = WeightAverage(cut, 0.9, tmp_path)
    for _ in steps:
        second.update()
    second.save(tmp_path, write=True)
    found, updates = read(tmp_path)
    assert updates == 6
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_takes_the_place_of_the_weights_for_a_while(tmp_path):
    model = make_tiny_vision()
    average = averaged(model, tmp_path)
    images = torch.randn(2, 3, 32, 32)
    before, weights = model(images).logits, {name: p.clone() for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path)
    with average.in_place():
        inside = model(images).logits
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert torch.equal(model(images).logits, before)
    average.save(tmp_path, write=True)
    loaded, _ = averaged_model(tmp_path)
    assert torch.equal(loaded(images).logits, inside)
    assert relative_error(inside, before) > 1e-3


@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
def test_it_grows_exactly_with_the_model_s_own_step(method, tmp_path):
    """The same seed: it becomes what the model would have become had it had these weights."""
    model = make_tiny_vision()
    average = averaged(model, tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with average.in_place():
        before = model(images).logits
    model.save_pretrained(tmp_path)
    average.save(tmp_path, write=True)
    growth = plan_growth(model, 2.0, method=method, seed=7)
    (tmp_path / "grown").mkdir()
    grow_average(tmp_path, tmp_path / "grown", growth)
    grown = apply_growth(model, growth)
    found, updates = read(tmp_path / "grown")
    assert updates == 5
    grown.load_state_dict(found, strict=False)
    assert relative_error(grown(images).logits, before) < 1e-5
    with average.in_place():
        expected = dict(apply_growth(model, growth).named_parameters())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_a_file_there_is_no_average(tmp_path):
    make_tiny().save_pretrained(tmp_path)
    assert averaged_model(tmp_path) is None
    assert read(tmp_path) == ({}, 0)


def test_text_runs_have_it_too(tmp_path):
    """Measured beside the weights, grown with them, and in the models of the stages."""
    run(write_recipe(tmp_path, training={"ema": 0.8, "layer_decay": 0.7}), tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    for line in (line for line in lines if line["kind"] == "growth"):
        assert line["ema_validation_loss_after"] == pytest.approx(line["ema_validation_loss_before"], abs=1e-4)
    newest = tmp_path / "whole" / "stage-3" / "checkpoint-27"
    assert "ema.safetensors" in json.loads((newest / "MANIFEST.json").read_text())
    with safe_open(newest / "ema.safetensors", framework="pt") as file:
        assert file.metadata() == {"updates": "27"}
    model = load_file(tmp_path / "whole" / "stage-3" / "model" / "model.safetensors")
    averages = load_file(newest / "ema.safetensors")
    assert all(torch.equal(model[name], averages[name]) for name in averages)


def test_the_rate_falls_from_the_head_to_the_embedding():
    for model, first, head in (
        (make_tiny(num_hidden_layers=3), "model.embed_tokens.weight", "model.norm.weight"),
        (make_tiny_vision(num_hidden_layers=3), "model.embeddings.position_embeddings", "classifier.weight"),
    ):
        decayed, plain = [], []
        for name, parameter in model.named_parameters():
            (plain if name.endswith("bias") else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=8.0)
        divide_by_share(optimizer, model, {name: share_by_depth(name, 3, 0.5) for name, _ in model.named_parameters()})
        found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        names = dict(model.named_parameters())
        assert found.keys() == {id(p) for p in names.values()}
        rates = {name: found[id(p)]["lr"] for name, p in names.items()}
        assert [rates[f"model.layers.{i}.ffn.key_tokens"] for i in range(3)] == [1.0, 2.0, 4.0]
        assert (rates[first], rates[head], optimizer.param_groups[0]["lr"]) == (0.5, 8.0, 8.0)
        assert all(found[id(p)]["weight_decay"] == (0.0 if name.endswith("bias") else 0.3) for name, p in names.items())


def test_the_shares_are_those_of_the_usual_fine_tuning():
    """With 12 blocks: decay to the power 13 for the embedding, 12 for the first block, 1 for the last."""
    assert share_by_depth("model.embeddings.class_token", 12, 0.75) == 0.75**13
    assert share_by_depth("model.layers.0.attention.query.key_tokens", 12, 0.75) == 0.75**12
    assert share_by_depth("model.layers.11.ffn.value_tokens", 12, 0.75) == 0.75
    assert share_by_depth("model.norm.weight", 12, 0.75) == share_by_depth("classifier.bias", 12, 0.75) == 1


def test_a_run_s_rates_are_scaled_and_scheduled(tmp_path):
    """With weights that hardly move, one step of Adam moves each by its rate."""
    recipe = write_recipe(
        tmp_path,
        model={"attention_dropout": 0.0},
        growth={"stages": [{"steps": 1}], "warmup_steps": 0, "schedule": "cosine"},
        training={"learning_rate": 1e-4, "layer_decay": 0.5, "weight_decay": 0.0},
    )
    run(recipe, tmp_path / "run")
    before, after = (
        load_file(tmp_path / "run" / "stage-1" / f"checkpoint-{step}" / "model.safetensors") for step in (0, 1)
    )
    for name, share in (
        ("model.norm.weight", 1.0),
        ("model.layers.1.ffn.value_tokens", 0.5),
        ("model.layers.0.ffn.value_tokens", 0.25),
        ("model.embed_tokens.weight", 0.125),
    ):
        step = (after[name] - before[name]).abs().max().item()
        assert step == pytest.approx(1e-4 * share, rel=0.02), name
    assert metrics(tmp_path / "run")[0]["lr"] == pytest.approx(1e-4)
