"""Adam's moments follow the tokens: old tokens move as they would have moved, new ones start from what is known."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import AutoModelForCausalLM

from conftest import make_tiny, relative_error
from tokenformer import BadRequestError, Pattention, grow, grow_optimizer, plan_growth

IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def trained(optimizer_class=torch.optim.AdamW, steps=6, **options):
    """A model that has been trained a little, with a decayed and an undecayed group."""
    model = make_tiny()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-4}]
    optimizer = optimizer_class(groups, lr=3e-3, **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("inplace", [False, True])
def test_zero_old_rows_move_as_they_would_have_moved(inplace):
    model, optimizer = trained()
    twin, twin_optimizer = trained()
    grown = grow(model, 2, inplace=inplace)
    grown_optimizer = grow_optimizer(optimizer, model, grown)
    assert (grown_optimizer is optimizer) == inplace
    step(grown, grown_optimizer)
    step(twin, twin_optimizer)
    for name, expected in twin.named_parameters():
        rows = dict(grown.named_parameters())[name][: expected.shape[0]]
        # Adam divides by the root of tiny second moments, so rounding in a gradient shows in the step.
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
    new_keys = grown.model.layers[0].ffn.key_tokens[256:]
    assert new_keys.ne(0).any(dim=1).all()


def test_groups_steps_and_settings_are_kept():
    model, optimizer = trained(betas=(0.9, 0.95), eps=1e-7)
    grown = grow(model, 2)
    new = grow_optimizer(optimizer, model, grown)
    assert type(new) is torch.optim.AdamW
    assert new is not optimizer
    assert [len(group["params"]) for group in new.param_groups] == [len(g["params"]) for g in optimizer.param_groups]
    for ours, theirs in zip(new.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert {id(p) for group in new.param_groups for p in group["params"]} == {id(p) for p in grown.parameters()}
    assert all(state["step"] == 6 for state in new.state.values())


def test_zero_rows_start_without_moments():
    model, optimizer = trained()
    grown = grow(model, 2)
    new = grow_optimizer(optimizer, model, grown)
    old_state = optimizer.state[model.model.layers[0].ffn.key_tokens]
    state = new.state[grown.model.layers[0].ffn.key_tokens]
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[moment][:256], old_state[moment])
        assert state[moment][256:].eq(0).all()


def test_split_first_moments_are_the_gradients_the_chain_rule_gives():
    """With momentum 0 a first moment is the last gradient: compare with the gradient the grown layer really has."""
    layer = nn.Sequential(Pattention(6, 5, 8, dtype=torch.float64))
    x = torch.randn(9, 6, dtype=torch.float64)
    grown = grow(layer, 3, method="split", noise=0.0)
    (layer(x).square().sum() / 2).backward()
    (grown(x).square().sum() / 2).backward()
    for key in ("key_tokens", "value_tokens"):
        old = getattr(layer[0], key).grad
        state = {"state": {f"0.{key}": {"exp_avg": old, "exp_avg_sq": old**2, "step": torch.tensor(1.0)}}}
        new = grow_optimizer(state, layer, grown)["state"][f"0.{key}"]
        expected = getattr(grown[0], key).grad
        assert relative_error(new["exp_avg"], expected) < 1e-10
        assert relative_error(new["exp_avg_sq"], expected**2) < 1e-10


def test_split_moments_on_average_over_the_noise():
    """The random parts add to a key's gradient: nothing on average, and the stated share to its square."""
    torch.manual_seed(1)
    layer = nn.Sequential(Pattention(32, 64, 64, dtype=torch.float64))
    x, target = torch.randn(256, 32, dtype=torch.float64), torch.randn(256, 64, dtype=torch.float64)
    (layer(x) * target).sum().backward()
    old = layer[0].key_tokens.grad
    gradients = []
    for seed in range(40):
        grown = grow(layer, 2, method="split", seed=seed)
        (grown(x) * target).sum().backward()
        gradients.append(grown[0].key_tokens.grad)
    gradients = torch.stack(gradients)
    state = {"state": {"0.key_tokens": {"exp_avg": old, "exp_avg_sq": old**2}}}
    new = grow_optimizer(state, layer, grown)["state"]["0.key_tokens"]
    spread = gradients.std(0) / 40**0.5
    assert ((gradients.mean(0) - new["exp_avg"]).abs() < 5 * spread).double().mean() > 0.99
    assert (gradients**2).mean().item() == pytest.approx(new["exp_avg_sq"].mean().item(), rel=0.1)


def test_from_a_state_dict_on_disk(tmp_path):
    """The way a checkpoint is grown: names, files, no live optimizer on the way."""
    model, optimizer = trained()
    model.save_pretrained(tmp_path / "model")
    torch.save(get_optimizer_state_dict(model, optimizer), tmp_path / "optimizer.pt")
    grow(model, 2, method="split", seed=5).save_pretrained(tmp_path / "grown")

    old = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    grown_state = grow_optimizer(state, old, new)
    fresh = torch.optim.AdamW(
        [
            {"params": [p for p in new.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in new.parameters() if p.dim() <= 1]},
        ],
        lr=1.0,
    )
    set_optimizer_state_dict(new, fresh, grown_state)

    live_model = grow(model, 2, method="split", seed=5)
    live = grow_optimizer(optimizer, model, live_model)
    assert fresh.param_groups[0]["lr"] == 3e-3
    for p, q in zip(new.parameters(), live_model.parameters(), strict=True):
        for key, value in live.state[q].items():
            assert torch.equal(fresh.state[p][key], value)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {})],
)
@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
def test_other_optimizers(optimizer_class, options, method):
    model, optimizer = trained(optimizer_class, **options)
    grown = grow(model, 2, method=method)
    step(grown, grow_optimizer(optimizer, model, grown))


def test_a_chain_of_growths_in_place():
    model, optimizer = trained()
    for method in ("zero", "split", "rotate"):
        grow(model, 2, method=method, inplace=True)
        optimizer = grow_optimizer(optimizer, model, model)
        step(model, optimizer)
    assert optimizer.state[model.model.layers[0].ffn.key_tokens]["exp_avg"].shape == (2048, 64)


def test_bad_requests():
    model, optimizer = trained()
    grown = grow(model, 2, method="split")
    with pytest.raises(BadRequestError, match=r"holds 23 parameters that are not old_model's"):
        grow_optimizer(optimizer, grown, grown)
    with pytest.raises(BadRequestError, match=r"does not remember a growth step; give growth=plan_growth"):
        grow_optimizer(optimizer, model, copy.deepcopy(model))
    with pytest.raises(BadRequestError, match=r"keyed by 0, not by parameter names"):
        grow_optimizer(optimizer.state_dict(), model, grown)
    with pytest.raises(BadRequestError, match=r"the state has 'model.layers.0.fnn.key_tokens', new_model does not"):
        grow_optimizer({"state": {"model.layers.0.fnn.key_tokens": {}}}, model, grown)
    odd = {"state": {"model.layers.0.ffn.key_tokens": {"row_average": torch.zeros(256)}}}
    with pytest.raises(BadRequestError, match=r"'row_average' of model.layers.0.ffn.key_tokens has shape \(256,\)"):
        grow_optimizer(odd, model, grown)
    unknown = {"state": {"model.layers.0.ffn.key_tokens": {"hessian": torch.zeros(256, 64)}}}
    with pytest.raises(BadRequestError, match=r"how state 'hessian' .* follows a split is not known"):
        grow_optimizer(unknown, model, grown)
    assert grow_optimizer(unknown, model, grow(model, 2))["state"]["model.layers.0.ffn.key_tokens"][
        "hessian"
    ].shape == (512, 64)


def test_growth_can_be_given():
    model, optimizer = trained()
    growth = plan_growth(model, 2, method="split")
    grown = grow(model, 2, method="split")
    del grown.last_growth
    grown.config.growth_history = None
    grow_optimizer(optimizer, model, grown, growth=growth)
