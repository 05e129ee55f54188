"""Nested training: every prefix learns with a tau of its own, in a ladder, killed and resumed; what it costs."""

import math
import signal

import pytest
import torch
from torch.nn.functional import cross_entropy

from conftest import make_tiny, relative_error
from tokenformer import (
    BadRequestError,
    Pattention,
    TokenFormerForCausalLM,
    cost,
    grow,
    pattention_layers,
)
from tokenformer.models.loading import read_config
from tokenformer.models.prefixes import resized
from tokenformer.training import load_recipe
from tokenformer.training import trainer as trainer_module
from tokenformer.training.checkpoint import checkpoints
from tokenformer.training.dry_run import describe
from tokenformer.training.ladder import build_ladder
from tokenformer.training.nested import nest
from training_runs import assert_same, kill_at, run, run_in_child, write_recipe

SHARES = [0.25, 0.5, 1.0]
IDS = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "qkv_tokens": 16, "out_tokens": 16, "ffn_tokens": 64}


def test_each_part_of_the_rows_has_a_model_of_its_own(tmp_path):
    """Loss and gradients are those of the models that a share of the tokens is, each on its rows."""
    model = make_tiny(**SMALL)
    nest(model, SHARES)
    model.train()(IDS, labels=IDS).loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.save_pretrained(tmp_path)
    parts = [TokenFormerForCausalLM.from_pretrained(tmp_path, token_fraction=share) for share in (1.0, 0.5, 0.25)]
    for part, rows in zip(parts, IDS.tensor_split(3), strict=True):
        for _, layer in pattention_layers(part):
            assert layer.tau.item() == pytest.approx(math.sqrt(layer.num_tokens), rel=1e-5)
        logits = part(rows).logits[:, :-1]
        (cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / IDS[:, 1:].numel()).backward()
    for name, gradient in found.items():
        whole = torch.zeros_like(gradient)
        for part in parts:
            own = part.get_parameter(name).grad
            whole[: len(own)] += own
        assert relative_error(gradient, whole) < 1e-4, name


def test_evaluation_is_of_the_whole():
    model = make_tiny(**SMALL)
    before = model(IDS).logits
    nest(model, SHARES)
    assert torch.equal(model.eval()(IDS).logits, before)
    assert not torch.equal(model.train()(IDS).logits[4:], before[4:])


@pytest.mark.parametrize("method", ["rotate", "zero"])
def test_a_prefix_that_was_there_before_keeps_its_tau(method):
    model = make_tiny(**SMALL)
    nest(model, SHARES)
    old = {name: layer.nested for name, layer in pattention_layers(model)}
    grown = grow(model, 2, method=method)
    nest(grown, SHARES)
    for name, layer in pattention_layers(grown):
        before = model.get_submodule(name)
        for now, then in ((layer.nested[1], old[name][0]), (layer.nested[2], old[name][1])):
            assert now.num_tokens == then.num_tokens
            expected = pytest.approx((before.tau * then.tau_factor).item(), rel=1e-5)
            assert (layer.tau * now.tau_factor).item() == expected


def test_a_layer_by_itself_divides_its_rows():
    layer = Pattention(4, 3, 8)
    layer.nested = ()
    x = torch.randn(5, 2, 4)
    assert layer(x).shape == (5, 2, 3)
    model = torch.nn.Sequential(layer)
    assert torch.equal(model.eval()(x), layer(x))


def test_a_ladder_is_killed_and_resumed_and_every_checkpoint_has_all_sizes(tmp_path):
    recipe = write_recipe(
        tmp_path, training={"nested": SHARES, "global_batch": 8, "gradient_accumulation_steps": 2, "ema": 0.8}
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(recipe, whole)
    assert run_in_child(recipe, killed, before=kill_at(trainer_module, "seal_folder", 4)) == -signal.SIGKILL
    assert run_in_child(recipe, killed) == 0
    assert_same(killed, whole)
    for folder in ("stage-1/model", "stage-3/model", checkpoints(whole / "stage-2")[-1].relative_to(whole)):
        config = read_config(whole / folder)
        for share in (0.25, 0.5):
            part = TokenFormerForCausalLM.from_pretrained(whole / folder, token_fraction=share)
            assert part.config.num_tokens == resized(config, share).num_tokens
            assert part(IDS).logits.isfinite().all()


def test_the_plan_counts_what_is_computed(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, training={"nested": SHARES}))
    recipe.data.inspect(count_samples=False)
    (config, *_), flops = [stage.config for stage in build_ladder(recipe, 1).stages], cost.training_flops_per_token
    expected = sum(flops(resized(config, share), 32) * rows for share, rows in ((1.0, 3), (0.5, 3), (0.25, 2))) / 8
    assert build_ladder(recipe, 1).stages[0].flops_per_unit == pytest.approx(expected)
    (_, rows), *_ = describe(recipe)
    assert rows["nested"] == "0.25, 0.5, 1"
    assert f"{expected:.3g} training" in rows["FLOPs per token"]


@pytest.mark.parametrize(
    ("training", "growth", "message"),
    [
        ({"nested": [0.5]}, {}, r"nested is \[0.5\]; give 1 and at least one smaller share"),
        ({"nested": [0.0, 1.0]}, {}, "nested"),
        ({"nested": SHARES, "global_batch": 2}, {}, "divides the rows of a batch among 3 sizes, and a process has 2"),
        ({"nested": SHARES}, {"trains": "new"}, r"growth.stages\[1\] only the last; leave one of them out"),
        (
            {"nested": SHARES},
            {"method": "split"},
            r"growth.stages\[1\]: method is split, which changes the first tokens",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, training, growth, message):
    recipe = write_recipe(tmp_path, training=training, growth={**GROWTH, **growth})
    with pytest.raises(BadRequestError, match=message) as error:
        build_ladder(load_recipe(recipe), 1)
    assert "\n" not in str(error.value)


GROWTH = {"stages": [{"steps": 5}, {"factor": 2, "steps": 5}], "warmup_steps": 2, "new_token_warmup": 2}
