"""Adam's moments follow the tokens: old tokens move as they would have moved, new ones start from what is known."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from conftest import make_tiny, relative_error
from tokenformer import BadRequestError, Pattention, grow, grow_optimizer, plan_growth
from tokenformer.training.held_rows import FrozenRows

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
    grown = grow(model, 2, method="zero", inplace=inplace)
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


def test_the_old_optimizer_may_go_on():
    """It has no state in common with the new one, not even of what does not grow."""
    model, optimizer = trained()
    new = grow_optimizer(optimizer, model, grow(model, 2))
    before = copy.deepcopy([*new.state.values()])
    step(model, optimizer)
    for state, expected in zip(new.state.values(), before, strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in expected)


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
    layer = nn.Sequential(Pattention(6, 5, 8, key_bias=True, bias=True, dtype=torch.float64))
    nn.init.normal_(layer[0].key_bias)
    x = torch.randn(9, 6, dtype=torch.float64)
    grown = grow(layer, 3, method="split", noise=0.0)
    (layer(x).square().sum() / 2).backward()
    (grown(x).square().sum() / 2).backward()
    for key in ("key_tokens", "value_tokens", "key_bias", "bias"):
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
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (Adafactor, {"relative_step": False}),
    ],
)
@pytest.mark.parametrize("method", ["zero", "split", "rotate"])
def test_other_optimizers(optimizer_class, options, method):
    model, optimizer = trained(optimizer_class, **options)
    grown = grow(model, 2, method=method)
    step(grown, grow_optimizer(optimizer, model, grown))


@pytest.mark.parametrize("method", ["zero", "split"])
def test_muon(method):
    """It takes matrices only; its momentum follows as SGD's does."""
    model = make_tiny()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)
    step(model, optimizer)
    grown = grow(model, 2, method=method)
    new = grow_optimizer(optimizer, model, grown)
    old_momentum, momentum = (
        each.state[of.model.layers[0].ffn.key_tokens]["momentum_buffer"]
        for each, of in ((optimizer, model), (new, grown))
    )
    copies = {"zero": [old_momentum, torch.zeros_like(old_momentum)], "split": [old_momentum / 2, old_momentum / 2]}
    assert torch.equal(momentum, torch.cat(copies[method]))
    step(grown, new)


FACTORED = {
    "transformers": (Adafactor, {"relative_step": False, "scale_parameter": False}, "exp_avg_sq_row", "exp_avg_sq_col"),
    "torch": (torch.optim.Adafactor, {}, "row_var", "col_var"),
}


@pytest.mark.parametrize("whose", FACTORED)
@pytest.mark.parametrize(("method", "copies"), [("zero", 1), ("split", 2)])
def test_adafactors_second_moments_of_every_entry_follow(whose, method, copies):
    """It keeps means over rows and columns; what it makes of both is what Adam's rule says of every entry."""
    optimizer_class, options, rows, columns = FACTORED[whose]
    model, optimizer = trained(optimizer_class, **options)
    grown = grow(model, 3 if method == "zero" else 2, method=method)
    new = grow_optimizer(optimizer, model, grown)

    def second_moments(of, parameter):
        by_token, by_column = of.state[parameter][rows].view(-1, 1), of.state[parameter][columns].view(1, -1)
        return by_token @ by_column / by_token.mean()

    old_layer, layer = model.model.layers[0].ffn, grown.model.layers[0].ffn
    for kind, factor in (("key_tokens", 1 if copies == 1 else 1 / 4 + 1 / 2), ("value_tokens", 1)):
        old = second_moments(optimizer, getattr(old_layer, kind))
        found = second_moments(new, getattr(layer, kind))
        for copy_of_old in found[: copies * 256].split(256):
            torch.testing.assert_close(copy_of_old, factor * old, rtol=1e-5, atol=0)
        assert found[copies * 256 :].eq(0).all()


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
    with pytest.raises(BadRequestError, match=r"has no record of a growth step; pass growth=plan_growth"):
        grow_optimizer(optimizer, model, copy.deepcopy(model))
    with pytest.raises(BadRequestError, match=r"keyed by 0, not by parameter names"):
        grow_optimizer(optimizer.state_dict(), model, grown)
    with pytest.raises(BadRequestError, match=r"the state has 'model.layers.0.fnn.key_tokens', new_model does not"):
        grow_optimizer({"state": {"model.layers.0.fnn.key_tokens": {}}}, model, grown)
    odd = {"state": {"model.layers.0.ffn.key_tokens": {"exp_avg": torch.zeros(256)}}}
    with pytest.raises(BadRequestError, match=r"'exp_avg' of model.layers.0.ffn.key_tokens has shape \(256,\)"):
        grow_optimizer(odd, model, grown)
    # It may be a copy of the tokens, or their own learning rates: rows of zeros would be wrong.
    unknown = {"state": {"model.layers.0.ffn.key_tokens": {"prev": torch.zeros(256, 64)}}}
    for bigger in (grown, grow(model, 2)):
        with pytest.raises(BadRequestError, match=r"no rule for how state 'prev' .* follows its tokens; use Adam, SGD"):
            grow_optimizer(unknown, model, bigger)


@pytest.mark.parametrize("name", ["Adamax", "Adadelta", "ASGD", "Rprop"])
def test_optimizers_without_rules_are_refused_before_anything_is_touched(name):
    model, optimizer = trained(getattr(torch.optim, name))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(BadRequestError, match=r"there is no rule for how state '\w+' of model.layers.0"):
        grow(model, 2, inplace=True, optimizer=optimizer)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_model_and_optimizer_grow_together():
    model, optimizer = trained()
    twin, twin_optimizer = trained()
    assert grow(model, 2, method="split", inplace=True, optimizer=optimizer) is model
    grow(twin, 2, method="split", inplace=True)
    grow_optimizer(twin_optimizer, twin, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(value, twin_optimizer.state[q][key]) for key, value in optimizer.state[p].items())


def test_neither_model_nor_optimizer_is_touched_when_the_state_cannot_follow():
    model, optimizer = trained()
    optimizer.state[model.model.layers[1].ffn.value_tokens]["exp_avg"] = torch.zeros(256, 64, dtype=torch.uint8)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(BadRequestError, match=r"'exp_avg' of model.layers.1.ffn.value_tokens is quantised \(uint8\)"):
        grow(model, 2, inplace=True, optimizer=optimizer)
    with pytest.raises(BadRequestError, match=r"optimizer= goes with inplace=True"):
        grow(model, 2, optimizer=optimizer)
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert model.config.growth_history is None


def test_growth_can_be_given():
    model, optimizer = trained()
    growth = plan_growth(model, 2, method="split")
    grown = grow(model, 2, method="split")
    del grown.last_growth
    grown.config.growth_history = None
    grow_optimizer(optimizer, model, grown, growth=growth)


def test_two_steps_at_once_are_refused_by_the_record(tmp_path):
    """Of two methods only the last would be read, and tokens that the first appended would get others' moments."""
    model, optimizer = trained(steps=1)
    grow(grow(model, 2, method="zero"), 2, method="split").save_pretrained(tmp_path)
    grown = type(model).from_pretrained(tmp_path)
    with pytest.raises(BadRequestError, match="new_model is 2 growth steps from old_model"):
        grow_optimizer(optimizer, model, grown)


def test_states_that_are_no_tensors_are_refused():
    model, optimizer = trained(steps=1)
    optimizer.state[model.model.layers[0].ffn.key_tokens]["GG"] = [torch.eye(3)]
    with pytest.raises(BadRequestError, match=r"state 'GG' of model.layers.0.ffn.key_tokens is a list"):
        grow(model, 2, inplace=True, optimizer=optimizer)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(BadRequestError, match="LBFGS keeps all parameters in one vector"):
        grow(model, 2, inplace=True, optimizer=optimizer)
    assert model.config.num_tokens == make_tiny().config.num_tokens


def test_rows_that_are_held_hold_their_biases_too():
    """Training only new tokens: old keys, values and key biases stay to the bit, and so does the output's bias."""
    model = nn.Sequential(Pattention(6, 5, 8, key_bias=True, bias=True))
    nn.init.normal_(model[0].key_bias)
    grow(model, 2, inplace=True)
    before = copy.deepcopy(model.state_dict())
    held = FrozenRows(model, model.last_growth)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(torch.randn(9, 6)).square().sum().backward()
        held.clear_gradients()
        optimizer.step()
        held.put_back()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        old = 8 if name in ("0.key_tokens", "0.value_tokens", "0.key_bias") else None
        assert torch.equal(value[:old] if old else value, before[name][:old] if old else before[name]), name
        assert old is None or value[old:].ne(before[name][old:]).any(), name
