"""Smaller models: the ranking is what the weights say, sorting is exact, and the tokens that do least cost least."""

import copy
import math

import pytest
import torch
from torch import nn

from conftest import make_small, make_tiny_vision, relative_error
from hosts import make_host
from tokenformer import (
    KINDS,
    BadRequestError,
    Pattention,
    TokenFormerForCausalLM,
    add_tokens,
    adopt,
    grow,
    grow_optimizer,
    merge_tokens,
    parameter_groups,
    pattention_layers,
    rank_tokens,
    record_token_weights,
    shrink,
    sort_tokens,
    ungrow,
)
from tokenformer.growth.grow_folder import taus
from tokenformer.growth.rates import shape_at_birth
from tokenformer.models.card import CardFacts, growth_steps, render_card
from tokenformer.shrinking import search
from tokenformer.shrinking.measure import mean_loss, measure
from tokenformer.shrinking.plan import plan_shrink, sizes_asked
from tokenformer.shrinking.search import as_if

IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))


def bigrams(rows, seed):
    """Ids of which nine in ten follow from the one before by a fixed table."""
    table = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 64, (rows, 32), generator=generator)
    surprising = torch.rand(rows, 32, generator=generator) < 0.1
    for i in range(1, 32):
        random[:, i] = torch.where(surprising[:, i], random[:, i], table[random[:, i - 1]])
    return random


@pytest.fixture(scope="module")
def trained():
    """A model that has learnt the table, its optimizer, batches to rank on and batches to score on."""
    model = make_small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    model.train()
    for step in range(250):
        batch = bigrams(16, seed=step)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer, [bigrams(32, seed=10_000)], [bigrams(64, seed=20_000)]


def other_choice(growth, uses, scores):
    """The same step with other tokens, whose tau is fitted in the same way."""
    plan = copy.deepcopy(growth)
    for name, step in growth.layers.items():
        kept = scores(name).argsort(descending=True)[: step.after].sort().values
        factor = math.sqrt(uses[name].shares[kept].sum())
        plan.layers[name] = type(step)(step.before, step.after, 1, kept=tuple(kept.tolist()), tau_factor=factor)
    return plan


def rise(model, growth, scored_on):
    """By how much a step raises the loss."""
    before = mean_loss(model, scored_on)
    with as_if(model, growth):
        return mean_loss(model, scored_on) - before


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranking_is_what_recorded_weights_say(kind):
    model = make_small(pattention_kind=kind)
    batches = [IDS[:3], {"input_ids": IDS[3:], "labels": IDS[3:]}]
    with torch.no_grad(), record_token_weights(model) as weights:
        model(IDS)
    model.model.layers[0].train()
    ranking = rank_tokens(model, iter(batches))
    assert [module.training for module in model.model.layers] == [True, False]
    assert ranking.keys() == weights.keys()
    for name, layer in pattention_layers(model):
        recorded = weights[name][0].flatten(0, -2).double()
        naive = recorded.abs().mean(0) * layer.value_tokens.double().norm(dim=1)
        torch.testing.assert_close(ranking[name], naive, rtol=1e-4, atol=1e-9)
        assert not ranking[name].requires_grad


def test_padding_does_not_count():
    model = make_small()
    padded = {"input_ids": IDS.clone(), "attention_mask": torch.ones_like(IDS)}
    padded["input_ids"][:, 10:], padded["attention_mask"][:, 10:] = 0, 0
    ranking, expected = rank_tokens(model, [padded]), rank_tokens(model, [IDS[:, :10]])
    for name, scores in expected.items():
        torch.testing.assert_close(ranking[name], scores, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["l2_gelu", "gelu_l2", "softmax"])
def test_sorting_is_exact_and_an_optimizer_follows(kind):
    model = make_small(pattention_kind=kind).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sort_tokens(model, rank_tokens(model, [IDS]), optimizer=optimizer)
    assert relative_error(model(IDS).logits, twin(IDS).logits) < 1e-10
    for scores in rank_tokens(model, [IDS]).values():
        assert (scores.diff() <= 1e-9).all()
    assert not torch.equal(model.model.layers[0].ffn.key_tokens, twin.model.layers[0].ffn.key_tokens)
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):  # also after a step on the moments
        each(IDS, labels=IDS).loss.backward()
        its_optimizer.step()
    assert relative_error(model(IDS).logits, twin(IDS).logits) < 1e-6


def test_what_does_most_stays_and_tau_makes_up_for_the_norm(trained):
    """Half of the tokens, by what they do, by the length of their values, and at random; with tau as it was."""
    model, _, ranked_on, scored_on = trained
    uses, layers = measure(model, ranked_on, "test"), dict(pattention_layers(model))
    growth = plan_shrink(model, uses, sizes_asked(model, 0.5, None))
    generator = torch.Generator().manual_seed(0)
    by_size = other_choice(growth, uses, lambda name: layers[name].value_tokens.detach().norm(dim=1))
    random = other_choice(growth, uses, lambda name: torch.rand(layers[name].num_tokens, generator=generator))
    as_it_was = copy.deepcopy(growth)
    for name, step in growth.layers.items():
        as_it_was.layers[name] = type(step)(step.before, step.after, 1, kept=step.kept)
    ours, *others = (rise(model, each, scored_on) for each in (growth, by_size, random, as_it_was))
    assert all(ours < 0.8 * other for other in others), (ours, others)


def test_dropping_tokens_without_values_is_exact_where_tau_is_right():
    """Half the tokens are copies of the others with values of zero: for every row they are half of the squared norm."""
    layer = nn.Sequential(Pattention(8, 6, 24, dtype=torch.float64, key_bias=True))
    nn.init.normal_(layer[0].key_bias)
    grown = grow(layer, 2, method="split", noise=0.0)
    with torch.no_grad():
        grown[0].value_tokens[24:] = 0
    x = torch.randn(5, 8, dtype=torch.float64)
    smaller = shrink(grown, 0.5, data=[x])
    assert smaller[0].num_tokens == 24
    assert smaller[0].key_bias.shape == (24,)
    assert smaller[0].tau.item() == pytest.approx(math.sqrt(24))
    assert relative_error(smaller(x), grown(x)) < 1e-10


def test_the_optimizer_follows_and_training_goes_on(trained):
    model, optimizer, ranked_on, _ = trained
    smaller = shrink(model, {"ffn": 0.25}, data=ranked_on)
    follower = grow_optimizer(optimizer, model, smaller)
    for name, step in smaller.last_growth.layers.items():
        for kind in ("key_tokens", "value_tokens"):
            old, new = (each.get_parameter(f"{name}.{kind}") for each in (model, smaller))
            kept = list(step.kept)
            assert torch.equal(new, old[kept])
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(follower.state[new][moment], optimizer.state[old][moment][kept])
    smaller(IDS, labels=IDS).loss.backward()
    follower.step()
    assert model.config.num_tokens == {"qkv": 32, "out": 32, "ffn": 128}


def test_adafactor_keeps_the_second_moment_of_every_token_that_stays():
    model = make_small()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    smaller = shrink(model, 0.5, data=[IDS])
    follower = grow_optimizer(optimizer, model, smaller)

    def estimate(state):
        return state["row_var"] @ state["col_var"] / state["row_var"].mean(dim=-2, keepdim=True)

    old, new = (each.model.layers[0].ffn.key_tokens for each in (model, smaller))
    kept = list(smaller.last_growth.layers["model.layers.0.ffn"].kept)
    torch.testing.assert_close(estimate(follower.state[new]), estimate(optimizer.state[old])[kept])


def test_in_place_with_rates_that_follow():
    model = make_small()
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1.0), lr=1.0)
    assert shrink(model, num_tokens={"ffn": 32}, data=[IDS], inplace=True, optimizer=optimizer) is model
    ffn = model.model.layers[0].ffn.value_tokens
    (group,) = [group for group in optimizer.param_groups if any(p is ffn for p in group["params"])]
    assert group["lr"] == 4.0  # as growth divides it by what it multiplies the tokens by
    assert shape_at_birth(model.config)["ffn"] == 128


def test_the_loss_decides_the_sizes(trained):
    model, _, _, scored_on = trained
    smaller = shrink(model, max_loss=0.05, data=scored_on)
    risen = mean_loss(smaller, scored_on) - mean_loss(model, scored_on)
    assert risen <= 0.05 + 1e-6
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())


def test_no_size_is_small_enough(monkeypatch):
    losses = iter([1.0, 1.3, 1.2, 1.4])
    monkeypatch.setattr(search, "mean_loss", lambda model, batches: next(losses))
    with pytest.raises(BadRequestError, match=r"within max_loss=0.1; out comes nearest, with a rise of 0.2000"):
        shrink(make_small(), max_loss=0.1, data=[IDS])


def test_saved_loaded_grown_and_not_taken_back(tmp_path):
    model = make_small()
    smaller = shrink(model, num_tokens={"ffn": 40, "out": 20}, data=[IDS])
    (step,) = smaller.config.growth_history
    assert (step["method"], step["before"]["ffn"], step["after"]["ffn"]) == ("shrink", 128, 40)
    assert growth_steps(smaller.config) == ["shrink: 32/32/128 -> 32/20/40"]
    assert "1. shrink: 32/32/128" in render_card(smaller, CardFacts())
    found = [layer.tau.item() for name, layer in pattention_layers(smaller) if name.endswith("ffn")]
    assert taus(smaller.config)["ffn"] == pytest.approx(math.sqrt(math.prod(found)), rel=1e-5)
    smaller.save_pretrained(tmp_path)
    loaded = TokenFormerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, smaller(IDS).logits)
    assert taus(loaded.config)["qkv"] == pytest.approx(math.sqrt(32))
    with pytest.raises(BadRequestError, match="which tokens a shrink kept is not in the model's record"):
        grow_optimizer(torch.optim.AdamW(model.parameters()), model, loaded)
    with pytest.raises(BadRequestError, match="ungrow: the last step was a shrink"):
        ungrow(loaded)
    grown = grow(loaded, 2)
    assert relative_error(grown(IDS).logits, loaded(IDS).logits) < 1e-4
    assert relative_error(ungrow(grown)(IDS).logits, loaded(IDS).logits) < 1e-4
    sort_tokens(grown, rank_tokens(grown, [IDS]))
    with pytest.raises(BadRequestError, match="ungrow: the tokens have been sorted since"):
        ungrow(grown)
    assert growth_steps(grown.config)[-1] == "sort"


def test_vision_models():
    model = make_tiny_vision()
    pixels = torch.randn(4, 3, 32, 32)
    data = [{"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}]
    smaller = shrink(model, 0.5, data=data)
    assert smaller.config.num_tokens == {"qkv": 24, "out": 24, "ffn": 96}
    assert smaller(pixels).logits.isfinite().all()


def test_adopted_models_keep_their_ballast(tmp_path):
    model = adopt(make_host("gpt_neox"), parts=["ffn"])
    record = model.config.adopted
    name, entry = next(iter(record.layers.items()))
    ballast, before = entry["ballast"], entry["num_tokens"]
    assert ballast
    ids = IDS % model.config.vocab_size
    old = model.base_model.get_submodule(name).key_tokens[before - ballast :]
    smaller = shrink(model, 0.5, data=[ids])
    layer = smaller.base_model.get_submodule(name)
    assert layer.num_tokens == smaller.config.adopted.layers[name]["num_tokens"] < before
    assert torch.equal(layer.key_tokens[-ballast:], old)
    assert smaller(ids).logits.isfinite().all()
    with pytest.raises(BadRequestError, match=f"{ballast} of which keep the norm constant, and 1 were asked for"):
        shrink(model, num_tokens=1, data=[ids])
    grown = grow(model, 2)
    with pytest.raises(BadRequestError, match="was adopted and has grown since"):
        shrink(grown, 0.5, data=[ids])


def test_groups_stay_as_they_are():
    model = make_small()
    add_tokens(model, "law", num_tokens=4, where="ffn")
    merge_tokens(model, "law")
    smaller = shrink(model, 0.5, data=[IDS])
    group = smaller.model.layers[0].ffn.token_groups["law"]
    assert torch.equal(group.key_tokens, model.model.layers[0].ffn.token_groups["law"].key_tokens)
    assert smaller.config.token_groups == model.config.token_groups
    add_tokens(model, "tax", num_tokens=4, where="ffn", norm="shared")
    with pytest.raises(BadRequestError, match=r"shrink: the token group 'tax' shares .*merge it first"):
        shrink(model, 0.5, data=[IDS])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"no size was given; give one of factor=0.5, num_tokens=\{…\}, max_loss=0.01"),
        ({"factor": 0.5, "max_loss": 0.1}, "factor and max_loss was given"),
        ({"factor": 1.0}, "factor=1.0 was given; it must lie between 0 and 1"),
        ({"factor": float("nan")}, "factor=nan was given"),
        ({"factor": {}}, "factor is empty"),
        ({"num_tokens": {"ffn": 128}}, r"layers.0.ffn has 128 tokens and 128 were asked for; ask for fewer"),
        ({"num_tokens": 0}, "0 were asked for; at least 1 are needed"),
        ({"num_tokens": {"fnn": 8}}, r"shrink: num_tokens has the key 'fnn'; did you mean 'ffn'\?"),
        ({"max_loss": -1.0}, "max_loss=-1.0 was given"),
        ({"max_loss": 0.1, "data": iter([IDS])}, "may be read once; give a list"),
        ({"max_loss": 0.1, "data": [{"input_ids": IDS}]}, "one has only input_ids; add labels"),
        ({"factor": 0.5, "data": IDS}, "the data is one Tensor; give a list of batches"),
        ({"factor": 0.5, "data": [[1, 2]]}, "a batch is a list"),
        ({"factor": 0.5, "data": []}, "no row of the data reached model.layers.0.attention.query"),
        ({"factor": 0.5, "optimizer": torch.optim.SGD([torch.zeros(1)])}, "shrink: optimizer= goes with inplace=True"),
    ],
)
def test_bad_requests(request_, message):
    model = make_small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadRequestError, match=message) as error:
        shrink(model, **{"data": [IDS], **request_})
    assert "\n" not in str(error.value)
    assert model.config.growth_history is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_rankings():
    model = make_small()
    with pytest.raises(BadRequestError, match="sort: the ranking has the layer 'fnn'"):
        sort_tokens(model, {"fnn": torch.zeros(3)})
    with pytest.raises(BadRequestError, match=r"has shape \(3,\); 128 finite numbers are needed"):
        sort_tokens(model, {"model.layers.0.ffn": torch.zeros(3)})
    model.model.layers[0].ffn.frozen_tokens = 5
    with pytest.raises(BadRequestError, match=r"the first 5 tokens of model.layers.0.ffn are frozen"):
        sort_tokens(model, rank_tokens(model, [IDS]))
