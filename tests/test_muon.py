"""Muon beside AdamW: which parameters each has, in one's own loop and in a ladder, killed and over processes."""

import copy
import signal

import pytest
import torch
from safetensors.torch import load_file

from conftest import make_tiny, train_step
from tokenformer import BadRequestError, TokenFormerConfig, cost, grow, grow_optimizer
from tokenformer.pattention import TOKENS
from tokenformer.training import load_recipe, muon
from tokenformer.training import trainer as trainer_module
from tokenformer.training.muon import MuonWithAdamW
from training_runs import assert_same, kill_at, run, run_in_child, weights, write_recipe

IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def made_for(model, **options):
    tokens = [parameter for name, parameter in model.named_parameters() if name.endswith(TOKENS)]
    return MuonWithAdamW([{"params": list(model.parameters())}], tokens=tokens, weight_decay=0.0, **options)


def step(model, optimizer):
    return train_step(model, optimizer, IDS)


def test_each_parameter_has_the_step_of_its_optimizer():
    model, peer = make_tiny(), make_tiny()
    named = dict(peer.named_parameters())
    theirs = {name: p for name, p in named.items() if name.endswith(TOKENS)}
    apart = [
        torch.optim.Muon(theirs.values(), lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in named.items() if n not in theirs], 1e-2, (0.9, 0.95), weight_decay=0.0),
    ]
    optimizer = made_for(model, lr=1e-2)
    for _ in range(3):
        step(model, optimizer)
        peer(IDS, labels=IDS).loss.backward()
        for one in apart:
            one.step()
            one.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_its_state_is_saved_and_loaded():
    model = make_tiny()
    optimizer = made_for(model)
    step(model, optimizer)
    again = copy.deepcopy(model)
    loaded = made_for(again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [step(model, optimizer) for _ in range(3)] == [step(again, loaded) for _ in range(3)]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("size", [{"factor": 2}, {"depth": 3}])
def test_momentum_follows_growth(inplace, size):
    model, name = make_tiny(), "model.layers.0.ffn.value_tokens"
    optimizer = made_for(model)
    before = [step(model, optimizer) for _ in range(3)]
    momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"].clone()
    larger = grow(model, **size, method="rotate", inplace=inplace, optimizer=optimizer if inplace else None)
    grown = optimizer if inplace else grow_optimizer(optimizer, model, larger)
    assert {p for group in grown.param_groups for p in group["params"]} == set(larger.parameters())
    carried = grown.state[larger.get_parameter(name)]["momentum_buffer"]
    assert torch.equal(carried[: len(momentum)], momentum)
    assert not carried[len(momentum) :].any()
    after = [step(larger, grown) for _ in range(3)]
    assert before[-1] > after[0] > after[-1]


def test_it_keeps_one_number_for_each_of_a_token():
    model = make_tiny()
    optimizer = made_for(model)
    step(model, optimizer)
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    assert kept == cost.training_memory(TokenFormerConfig.preset("tiny"), 1, 8, optimizer="muon").optimizer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    growth = {"stages": [{"steps": 10}, {"factor": 2, "depth": 3, "steps": 8}, {"factor": 2, "steps": 9}]}
    recipe = write_recipe(folder, training={"optimizer": "muon"}, growth=growth)
    run(recipe, folder / "run")
    return recipe, folder / "run"


def test_a_ladder_trains_with_it(uninterrupted):
    _, out = uninterrupted
    state = load_file(out / "stage-3" / "checkpoint-27" / "optimizer.safetensors")
    for name in weights(out, 3):
        if not name.endswith("tau"):
            assert (f"{name}/momentum_buffer" in state) == name.endswith(TOKENS), name
            assert (f"{name}/exp_avg_sq" in state) != name.endswith(TOKENS), name


@pytest.mark.parametrize("seals", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_and_carried_on_to_the_same_bits(uninterrupted, tmp_path, seals):
    recipe, reference = uninterrupted
    killed = kill_at(trainer_module, "seal_folder", seals)
    assert run_in_child(recipe, tmp_path / "run", before=killed) == -signal.SIGKILL
    assert run_in_child(recipe, tmp_path / "run") == 0
    assert_same(tmp_path / "run", reference)


def test_new_tokens_alone_can_be_trained(tmp_path):
    stages = [{"steps": 6}, {"factor": 2, "steps": 6, "trains": "new", "method": "rotate"}]
    run(write_recipe(tmp_path, training={"optimizer": "muon"}, growth={"stages": stages}), tmp_path / "run")
    before, after = weights(tmp_path / "run", 1), weights(tmp_path / "run", 2)
    for name, values in before.items():
        if values.dim():
            assert torch.equal(after[name][: len(values)], values), name


def test_what_cannot_be_is_one_line(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, training={"optimizer": "muon", "optim": "sgd"})
    with pytest.raises(BadRequestError, match=r"training.optimizer is muon, beside which adamw has the rest, and trai"):
        load_recipe(recipe)
    with pytest.raises(BadRequestError, match=r"training: optimizer is 'moun'; choose from adamw, muon|did you mean"):
        load_recipe(write_recipe(tmp_path, training={"optimizer": "moun"}))
    monkeypatch.delattr(muon.torch.optim, "Muon")
    with pytest.raises(BadRequestError, match=r"muon, which needs torch 2\.9 or newer; .* is installed: use adamw"):
        load_recipe(write_recipe(tmp_path, training={"optimizer": "muon"}))
