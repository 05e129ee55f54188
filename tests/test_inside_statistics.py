"""What tokens do over data, how old they are, and what they add to a logit."""

import math

import pytest
import torch

import tokenformer
from conftest import make_tiny, make_tiny_vision, relative_error, train_step
from hosts import make_host
from inside_models import CLOSE, IDS, outputs_of, with_groups
from tokenformer import BadRequestError, ablate, attribute, pattention_layers, token_statistics, watch
from tokenformer.inside import ablation_effects, agreement, neighbours, token_ages
from tokenformer.inside.statistics import Tally


def test_use_is_what_shrinking_ranks_by(tiny):
    found = token_statistics(tiny, [IDS, IDS[:1]])
    for name, scores in tokenformer.rank_tokens(tiny, [IDS, IDS[:1]]).items():
        assert relative_error(found[name].use, scores) < CLOSE
        assert found[name].rows == 36


def test_statistics_are_those_of_the_weights(tiny):
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    found = token_statistics(tiny, [{"input_ids": IDS, "attention_mask": mask}], "layers.1.ffn")["model.layers.1.ffn"]
    with watch(tiny, "layers.1.ffn") as seen:
        tiny(IDS, attention_mask=mask)
    (layer,) = seen.values()
    weights = layer.weights[mask != 0].double()
    assert relative_error(found.mean, weights.mean(0)) < CLOSE
    assert relative_error(found.largest, weights.abs().amax(0)) < CLOSE
    density = weights.square().mean(0) ** 2 / (weights**4).mean(0)
    assert relative_error(found.density, density) < CLOSE
    # All ids differ, so that every row is a context of its own.
    share = weights.square() / weights.square().sum(0)
    assert relative_error(found.selectivity, torch.special.xlogy(share, share * len(weights)).sum(0)) < CLOSE


def test_a_token_that_fires_for_one_context_is_selective():
    """One of four contexts, all of them, none; and both of two halves."""
    contexts = torch.arange(4).repeat(5)
    weights = torch.stack([(contexts == 2) * -3.0, torch.ones(20), torch.zeros(20), (contexts > 1) * 0.5], dim=1)
    tally = Tally(4)
    tally.add(weights[:7], contexts[:7], torch.eye(4))
    tally.add(weights[7:], contexts[7:], torch.eye(4))
    found = tally.statistics(torch.zeros(4))
    expected = torch.tensor([math.log(4), 0, 0, math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(found.selectivity, expected)
    torch.testing.assert_close(found.density, torch.tensor([0.25, 1, 0, 0.5], dtype=torch.float64))
    assert found.alive.tolist() == [True, True, False, True]
    again = Tally(4)
    again.load(tally.state())
    assert torch.equal(again.statistics(found.age).selectivity, found.selectivity)


def test_groups_and_images_have_statistics_too():
    model = with_groups(make_tiny(), "own")
    found = token_statistics(model, [IDS])
    assert found["model.layers.0.ffn.token_groups.law"].use.all()
    assert "model.layers.0.ffn.token_groups.off" not in found
    vision = make_tiny_vision()
    for statistics in token_statistics(vision, [{"pixel_values": torch.randn(2, 3, 32, 32)}]).values():
        assert statistics.use.isfinite().all()
        assert statistics.selectivity.isfinite().all()


def test_age_is_the_step_that_a_token_came_with(tiny):
    n = tiny.config.ffn_tokens
    grown = tokenformer.grow(tokenformer.grow(tiny, 2), num_tokens={"ffn": 3 * n})
    ages = token_ages(grown, "*.ffn")["model.layers.0.ffn"]
    assert ages.tolist() == [0] * n + [1] * n + [2] * n
    deeper = tokenformer.grow(grown, depth=4)
    ages = token_ages(deeper, "*.ffn")
    assert [found.unique().tolist() for found in ages.values()] == [[0, 1, 2], [3], [0, 1, 2], [3]]
    assert token_statistics(deeper, [IDS])["model.layers.1.ffn"].age.unique().tolist() == [3]
    shrunk = tokenformer.grow(tokenformer.shrink(tiny, 0.5, data=[IDS]), 2)
    assert token_ages(shrunk)["model.layers.0.ffn"].tolist() == [-1] * (n // 2) + [2] * (n // 2)
    kept = tokenformer.grow(tiny, 2, as_group="second")
    assert token_ages(kept)["model.layers.0.ffn.token_groups.second"].unique().tolist() == [1]
    adopted = tokenformer.adopt(make_host("gpt2"))
    assert all(found.unique().tolist() == [0] for found in token_ages(adopted).values())


def test_neighbours_are_those_of_the_nearest_values(tiny):
    ffn = tiny.model.layers[1].ffn
    with torch.no_grad():
        ffn.value_tokens[9] = 2 * ffn.value_tokens[4]
    (first, second) = neighbours(tiny, "layers.1.ffn", 4, k=2)
    assert first == (9, pytest.approx(1))
    assert second[1] < 0.9
    assert neighbours(tiny, "layers.1.ffn", 4, k=1, by="keys")[0][0] != 9
    with pytest.raises(BadRequestError, match="by='value' is not known; did you mean 'values'"):
        neighbours(tiny, "layers.1.ffn", 4, by="value")


def test_the_mean_weight_can_stand_in_for_tokens(tiny):
    name = "model.layers.1.ffn"
    mean = {name: statistics.mean for name, statistics in token_statistics(tiny, [IDS]).items()}
    layer = tiny.model.layers[1].ffn
    with ablate(tiny, {name: [3, 8]}, mean=mean):
        found = outputs_of(tiny, lambda: tiny(IDS))[name]
        with watch(tiny, name) as seen:
            tiny(IDS)
    constant = mean[name][[3, 8]].float() @ layer.value_tokens[[3, 8]]
    assert relative_error(found, seen[name].total() + constant) < CLOSE
    assert not seen[name].contributions(3, 8).any()


MODELS = {
    "ours": make_tiny,
    "gpt_neox": lambda: make_host("gpt_neox"),
    "adopted gpt_neox": lambda: tokenformer.adopt(make_host("gpt_neox")),
    "llama": lambda: make_host("llama"),
    "adopted gpt2": lambda: tokenformer.adopt(make_host("gpt2")),
    "with groups": lambda: with_groups(make_tiny(), "own"),
    "vision": make_tiny_vision,
    "adopted vit": lambda: tokenformer.adopt(make_host("vit")),
}


@pytest.mark.parametrize("name", MODELS)
def test_direct_effects_add_up_to_the_logit(name):
    model = MODELS[name]()
    size = getattr(model.config, "image_size", 0)
    inputs = {"pixel_values": torch.randn(2, 3, size, size)} if size else {"input_ids": IDS}
    effects = attribute(model, inputs, 3)
    # The rest is found once more: what the same readout makes of the stream without the tokens' contributions.
    with torch.no_grad():
        logits = model(**inputs).logits
    readout = tokenformer.inside.readout.find_readout(model, "test")
    streams = []
    hook = readout.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    with watch(model, readout.writers) as seen, torch.no_grad():
        model(**inputs)
    hook.remove()
    length = effects.logits.shape[1]
    stream = streams[0][:, :length]
    left = stream - sum(seen[part].contributions().sum(-2)[:, :length] for part in seen if seen[part].calls)
    rest = (left * readout.directions(torch.tensor(3)) / readout.scale(stream)).sum(-1)
    shift, head = getattr(readout.norm, "bias", None), getattr(model, "classifier", None)
    rest = rest + (0 if shift is None else shift @ readout.rows[3]) + (0 if head is None else head.bias[3])
    assert relative_error(effects.rest, rest) < 10 * CLOSE  # what is left of larger sums
    assert torch.equal(effects.logits, logits[..., 3] if logits.dim() == 3 else logits[:, 3:4])
    best = effects.top(3)
    assert effects[best[0].layer][0, -1, best[0].token].item() == pytest.approx(best[0].effect)
    assert abs(best[0].effect) == pytest.approx(max(found[0, -1].abs().max().item() for found in effects.values()))


@pytest.fixture(scope="module")
def trained():
    """A model that has learnt a text of few words."""
    words = torch.randint(97, 123, (40, 5), generator=torch.Generator().manual_seed(1))
    spaced = torch.cat([words, torch.full((40, 1), 32)], dim=1)
    generator = torch.Generator().manual_seed(2)
    text = spaced[torch.randint(40, (6000,), generator=generator)].flatten()
    model = make_tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        batch = text[step * 256 : step * 256 + 8 * 32].view(8, 32)
        train_step(model, optimizer, batch)
    return model.eval(), text[-512:].view(8, 64)


def test_direct_effects_agree_with_ablation_on_a_trained_model(trained):
    """Nothing but the final norm follows the last layer; what the first one writes is read by others."""
    model, ids = trained
    first, last = agreement(model, ids, tokens=6, layers="*.ffn", keep_norm=True, frozen_norm=True).values()
    assert last.correlation > 0.9999
    assert last.ratio == pytest.approx(1, rel=1e-3)
    assert 0.3 < first.correlation < last.correlation
    # With a norm that follows its input, what is taken away makes the rest larger.
    *_, last = agreement(model, ids, tokens=6, layers="*.ffn").values()
    assert last.correlation > 0.5
    assert 0.2 < last.ratio < 1


def test_ablation_effects_are_differences_of_logits(tiny):
    lost = ablation_effects(tiny, IDS, {"layers.0.ffn": [3]}, 5)["layers.0.ffn"]
    with torch.no_grad(), ablate(tiny, {"layers.0.ffn": [3]}):
        without = tiny(IDS).logits[..., 5]
    assert torch.equal(lost[..., 0], tiny(IDS).logits[..., 5] - without)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda model: attribute(model, IDS, layers="*.query"), "does not write to the stream"),
        (lambda model: attribute(model, IDS, 256), "logits go from 0 to 255"),
        (lambda model: attribute(model, IDS, 0.5), "give an id"),
        (lambda model: attribute(model.model, IDS), "no output layer"),
        (lambda model: attribute(make_host("bert"), IDS), "no final norm was found in a BertModel"),
        (lambda model: token_statistics(model, IDS), "give a list of batches"),
    ],
)
def test_a_bad_request_is_one_line(tiny, asked, said):
    with pytest.raises(BadRequestError, match=said) as caught:
        asked(tiny)
    assert "\n" not in str(caught.value)
    assert not any(layer._forward_hooks for _, layer in pattention_layers(tiny))
