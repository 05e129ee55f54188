"""Rates that follow the size of a layer: the rule, one's own loop, and growth that the training loss does not feel."""

import copy
import json
import shutil
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from command import ended
from command import run as run_command
from tokenformer import (
    BadRequestError,
    Growth,
    Pattention,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    grow,
    grow_optimizer,
    parameter_groups,
)
from tokenformer.growth.rates import rate_shares
from tokenformer.training.held_rows import NewTokenWarmup
from training_runs import assert_equal, run, weights, write_recipe


def tiny(**changes) -> TokenFormerForCausalLM:
    torch.manual_seed(0)
    return TokenFormerForCausalLM(TokenFormerConfig.preset("tiny", **changes))


def rates_of(optimizer, model) -> dict[str, float]:
    by_parameter = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: by_parameter[p] for name, p in model.named_parameters()}


class TestTheRule:
    def test_a_model_as_it_was_made_has_one_rate(self):
        assert set(rate_shares(tiny()).values()) == {1.0}

    def test_values_follow_the_number_of_tokens_and_nothing_else_does(self):
        shares = rate_shares(grow(tiny(), num_tokens={"ffn": 1024, "out": 128}, method="rotate"))
        for name, share in shares.items():
            expected = 0.25 if name.endswith("ffn.value_tokens") else 0.5 if "out.value_tokens" in name else 1.0
            assert share == expected, name

    def test_the_base_is_the_size_before_the_first_growth_step(self):
        model = grow(grow(tiny(), 2, method="rotate"), 2, method="rotate")
        assert rate_shares(model)["model.layers.0.ffn.value_tokens"] == 0.25

    def test_keys_and_output_layers_follow_the_width(self):
        wide = tiny(hidden_size=256, tie_word_embeddings=False)
        shares = rate_shares(wide, "tiny")
        assert shares["model.layers.0.ffn.key_tokens"] == shares["lm_head.weight"] == 0.25
        assert shares["model.layers.0.ffn.value_tokens"] == shares["model.embed_tokens.weight"] == 1.0
        assert rate_shares(tiny(hidden_size=256), {"hidden_size": 64})["model.embed_tokens.weight"] == 0.25

    def test_any_module_with_the_layer(self):
        module = nn.Sequential(Pattention(8, 8, 16), nn.Linear(8, 4))
        assert set(rate_shares(module).values()) == {1.0}
        assert rate_shares(module, {"0": 4})["0.value_tokens"] == 0.25

    @pytest.mark.parametrize(
        ("base", "words"),
        [
            ({"ffm": 4}, "base has the key 'ffm'; .*ffn"),
            ({"ffn": 0}, "base has ffn=0; a whole number of at least 1 is needed"),
            ("tinny", "preset 'tinny' is not known; .*tiny"),
        ],
    )
    def test_a_base_that_is_none_is_refused(self, base, words):
        with pytest.raises(BadRequestError, match=words):
            rate_shares(tiny(), base)


class TestOnesOwnLoop:
    def test_every_parameter_has_a_group_and_norms_do_not_decay(self):
        model = tiny(parametric_norm=True)
        groups = parameter_groups(model, 1e-3, weight_decay=0.1)
        found = [p for group in groups for p in group["params"]]
        assert len(found) == len(set(found)) == len(list(model.parameters()))
        assert all((p.ndim > 1) == (group["weight_decay"] == 0.1) for group in groups for p in group["params"])

    def test_frozen_parameters_are_left_out(self):
        model = tiny()
        model.model.embed_tokens.weight.requires_grad_(False)
        found = {p for group in parameter_groups(model, 1e-3) for p in group["params"]}
        assert model.model.embed_tokens.weight not in found

    @pytest.mark.parametrize("inplace", [True, False])
    def test_rates_follow_growth(self, inplace):
        model = tiny()
        optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        groups = len(optimizer.param_groups)
        if inplace:
            bigger = grow(model, num_tokens={"ffn": 1024}, method="rotate", inplace=True, optimizer=optimizer)
        else:
            bigger = grow(model, num_tokens={"ffn": 1024}, method="rotate")
            optimizer = grow_optimizer(optimizer, model, bigger)
        rates = rates_of(optimizer, bigger)
        for name, rate in rates.items():
            assert rate == pytest.approx(1e-3 * (0.25 if name.endswith("ffn.value_tokens") else 1)), name
        assert len(optimizer.param_groups) == groups  # a scheduler has a rate for each
        if inplace:
            scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step()
            assert rates_of(optimizer, bigger) == pytest.approx(rates)

    def test_groups_of_others_keep_their_rates(self):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        grow(model, 2, method="rotate", inplace=True, optimizer=optimizer)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


class TestGrowthIsSmooth:
    """On the same batches, the training loss after growth stays where that of the model that did not grow is."""

    STEPS, RATE, WARM = 20, 3e-3, 50

    @pytest.fixture
    def trained(self):
        text = Path(typing.__file__).read_bytes()
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(len(text) - 64, (160 + self.STEPS, 8), generator=generator).tolist()
        batches = [torch.tensor([list(text[i : i + 64]) for i in row]) for row in starts]
        model = tiny()
        optimizer = torch.optim.AdamW(parameter_groups(model, self.RATE), betas=(0.9, 0.95))
        self.losses(model, optimizer, batches[:160])
        return model, optimizer, batches[160:]

    def losses(self, model, optimizer, batches, new=None):
        found = []
        for step, ids in enumerate(batches):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            if new is not None:
                new.before_step()
            optimizer.step()
            if new is not None:
                new.scale_step((step + 1) / (self.WARM + 1))
            found.append(loss.item())
        return torch.tensor(found)

    def test_with_scaled_rates_and_a_warm_up_of_new_tokens(self, trained):
        model, optimizer, batches = trained
        twin = copy.deepcopy(model)
        twin_optimizer = grow_optimizer(optimizer, model, twin, growth=Growth("rotate", 0, 0.0, {}))
        alone = self.losses(twin, twin_optimizer, batches)
        above = {}
        for scaled in (True, False):
            larger = grow(model, 4)
            its_own = grow_optimizer(optimizer, model, larger)
            if not scaled:
                for group in its_own.param_groups:
                    group["lr"] = self.RATE
            new = NewTokenWarmup(larger, larger.last_growth) if scaled else None
            above[scaled] = self.losses(larger, its_own, batches, new) - alone
        assert above[True].max() < 0.02
        assert above[False].max() > 0.1


def test_a_ladder_s_rates_follow_its_sizes(tmp_path):
    """In the metrics the whole rate, in the weights each parameter's own; the base shape is written down."""
    growth = {"stages": [{"steps": 2}, {"factor": 2, "steps": 1}], "warmup_steps": 0, "new_token_warmup": 1}
    training = {"learning_rate": 1e-4, "weight_decay": 0.0, "adam_beta1": 0.0, "adam_beta2": 0.0, "adam_epsilon": 1e-30}
    recipe = write_recipe(
        tmp_path, model={"attention_dropout": 0.0}, growth={**growth, "decay_steps": 1}, training=training
    )
    run(recipe, tmp_path / "run")
    before, after = (
        load_file(tmp_path / "run" / "stage-2" / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3)
    )
    values, keys = "model.layers.0.ffn.value_tokens", "model.layers.0.ffn.key_tokens"
    moved = {name: (after[name] - before[name]).abs() for name in (values, keys)}
    # Without memory Adam moves every number by the rate. New tokens get half of that in the first of two steps.
    assert moved[values][:64].median().item() == pytest.approx(0.5e-4, rel=0.02)
    assert moved[values][64:].median().item() == pytest.approx(0.25e-4, rel=0.02)
    assert moved[keys][:64].median().item() == pytest.approx(1e-4, rel=0.02)
    start = json.loads((tmp_path / "run" / "stage-1" / "start.json").read_text())
    assert start["rate_base"] == {"hidden_size": 32, "qkv": 16, "out": 16, "ffn": 64}


def test_a_dry_run_shows_the_rates(tmp_path):
    stages = [{"steps": 9}, {"factor": 2, "steps": 9}, {"num_tokens": {"ffn": 256}, "steps": 9}]
    command = ("train", write_recipe(tmp_path, growth={"stages": stages}), "training.learning_rate=4e-4", "--dry-run")
    said = [line.partition("learning rate")[2].strip() for line in run_command(*command).stdout.splitlines()]
    rates = ["0.0004", "0.0004; value tokens 0.0002", "0.0004; value tokens qkv 0.0002, out 0.0002, ffn 0.0001"]
    assert [rate for rate in said if rate] == rates
    ended(
        run_command(*command, "training.rate_base={ffn: a}"), 2, "training.rate_base: base has ffn='a'; a whole number"
    )
    ended(run_command(*command, "training.rate_base=tinny"), 2, "training.rate_base: preset 'tinny' is not known")


def test_a_run_from_before_goes_on_as_it_began(tmp_path):
    """Its recipe.yaml has no such keys: then all rates were equal, and new tokens were not warmed up."""
    stages = [{"steps": 4}, {"factor": 2, "steps": 4}]
    recipe = write_recipe(tmp_path, growth={"stages": stages, "new_token_warmup": 0}, training={"rates": "equal"})
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "run")
    kept = tmp_path / "run" / "recipe.yaml"
    lines = [line for line in kept.read_text().splitlines() if "rates:" not in line and "new_token_warmup" not in line]
    kept.write_text("\n".join(lines))
    shutil.rmtree(tmp_path / "run" / "stage-2")
    run(write_recipe(tmp_path, growth={"stages": stages}), tmp_path / "run")
    assert_equal(weights(tmp_path / "run", 2), weights(tmp_path / "whole", 2))
    said = write_recipe(tmp_path, growth={"stages": stages}, training={"rates": "scaled"})
    with pytest.raises(BadRequestError, match=r"was started with training\.rates='?equal'?, and now it is '?scaled"):
        run(said, tmp_path / "run")
