"""Growth is exact: the grown model computes what the model computed, and every new token can learn."""

import copy
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import make_tiny, relative_error
from tokenformer import (
    KINDS,
    Growth,
    Pattention,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    grow,
    pattention_layers,
    plan_growth,
)

# Exact growth changes the order of sums, no more.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
EXACT = [(kind, method) for kind in KINDS for method in ("zero", "split") if (kind, method) != ("softmax", "zero")]
EXACT += [(kind, "rotate") for kind in KINDS if kind.startswith("l2_")]
# Whole models take longer; the other kinds differ from l2_gelu in one function.
PAPERS = [(kind, method) for kind, method in EXACT if kind in ("l2_gelu", "gelu_l2", "softmax")]
IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def train(model, steps=5, lr=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    model.train()
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "method"), PAPERS)
def test_repeated_growth_with_training_between_is_exact(kind, method, dtype):
    """1x -> 2x -> 4x -> 16x, each step on a model that has just been trained."""
    model = make_tiny(pattention_kind=kind).to(dtype)
    for factor in (2, 2, 4):
        before = train(model)(IDS).logits
        model = grow(model, factor, method=method)
        assert relative_error(model(IDS).logits, before) <= TOLERANCE[dtype]
    assert model.config.num_tokens == {"qkv": 1024, "out": 1024, "ffn": 4096}
    assert len(model.config.growth_history) == 3


@pytest.mark.parametrize(("kind", "method"), PAPERS)
def test_sixteenfold_without_training_stays_exact_from_the_start(kind, method):
    model = train(make_tiny(pattention_kind=kind).double())
    grown = model
    for factor in (2, 2, 4):
        grown = grow(grown, factor, method=method)
    assert relative_error(grown(IDS).logits, model(IDS).logits) <= 1e-10


@pytest.mark.parametrize(("kind", "method"), PAPERS)
def test_cached_generation_after_growth(kind, method):
    model = train(make_tiny(pattention_kind=kind).double())
    grown = grow(model, 2, method=method)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS[:, :8], use_cache=False, **options)
    assert torch.equal(grown.generate(IDS[:, :8], use_cache=True, **options), expected)
    assert torch.equal(grown.generate(IDS[:, :8], cache_implementation="static", **options), expected)


@given(
    kind_method=st.sampled_from(EXACT),
    before=st.integers(1, 24),
    factor=st.one_of(st.integers(2, 9), st.floats(1.01, 9)),
    d_in=st.integers(1, 9),
    d_out=st.integers(1, 9),
    tau=st.sampled_from([None, 0.7, 30.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    noise=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    biases=st.sampled_from([(), ("key_bias",), ("bias",), ("key_bias", "bias")]),
    seed=st.integers(0, 2**16),
)
def test_any_layer_to_any_size(kind_method, before, factor, d_in, d_out, tau, dtype, noise, biases, seed):
    kind, method = kind_method
    torch.manual_seed(seed)
    layer = Pattention(d_in, d_out, before, kind, tau, dtype=dtype, **dict.fromkeys(biases, True))
    for name in biases:
        nn.init.normal_(getattr(layer, name))
    after = max(round(before * factor), before + 1)
    if kind == "softmax":
        after = before * max(2, round(factor))
    x = torch.randn(7, d_in, dtype=dtype)
    grown = grow(nn.Sequential(layer), num_tokens={"0": after}, method=method, seed=seed, noise=noise)[0]
    assert grown.num_tokens == after
    # Outputs are sums over tokens that may cancel; values that are shared out with noise are this large.
    size = layer.tau * layer.value_tokens.abs().max() * (1 + noise) * math.sqrt(after)
    if layer.key_bias is not None:  # which may all but cancel a row's scores, and leave their rounding
        size *= 1 + layer.key_bias.norm() / (x @ layer.key_tokens.T + layer.key_bias).norm(dim=-1).min()
    assert (grown(x) - layer(x)).abs().max() <= TOLERANCE[dtype] * size
    assert grown(x).dtype == dtype
    assert layer.bias is None or torch.equal(grown.bias, layer.bias)


@pytest.mark.parametrize(("kind", "method"), EXACT)
def test_gradients_with_respect_to_the_input_are_exact_too(kind, method):
    layer = nn.Sequential(Pattention(8, 6, 12, kind, dtype=torch.float64, key_bias=True))
    nn.init.normal_(layer[0].key_bias)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    (before,) = torch.autograd.grad(layer(x).square().sum(), x)
    (after,) = torch.autograd.grad(grow(layer, 3, method=method)(x).square().sum(), x)
    assert relative_error(after, before) < 1e-10


def test_zero_is_what_the_paper_says():
    layer = nn.Sequential(Pattention(8, 6, 12))
    grown = grow(layer, num_tokens={"0": 20}, method="zero")[0]
    assert torch.equal(grown.key_tokens[:12], layer[0].key_tokens)
    assert torch.equal(grown.value_tokens[:12], layer[0].value_tokens)
    assert grown.key_tokens[12:].eq(0).all()
    assert grown.tau == layer[0].tau
    biased = nn.Sequential(Pattention(8, 6, 12, key_bias=True))
    nn.init.normal_(biased[0].key_bias)
    grown = grow(biased, 2, method="zero")[0]
    assert torch.equal(grown.key_bias[:12], biased[0].key_bias)
    assert grown.key_bias[12:].eq(0).all()
    large = nn.Sequential(Pattention(8, 64, 500))
    large[0].value_tokens.data *= 7.0
    new = grow(large, 2, method="zero")[0].value_tokens[500:]
    assert new.std().item() == pytest.approx(large[0].value_tokens.std().item(), rel=0.02)


def test_split_is_c_copies_whose_values_sum():
    layer = nn.Sequential(Pattention(8, 6, 12, dtype=torch.float64))
    grown = grow(layer, num_tokens={"0": 41}, method="split")[0]  # 3 · 12 + 5
    keys, values = grown.key_tokens, grown.value_tokens
    for copy_ in range(3):
        assert torch.equal(keys[12 * copy_ : 12 * (copy_ + 1)], layer[0].key_tokens)
    torch.testing.assert_close(values[:36].view(3, 12, 6).sum(0), layer[0].value_tokens)
    assert (values[:12] - layer[0].value_tokens / 3).abs().mean() > 0.1 * layer[0].value_tokens.std()
    assert keys[36:].eq(0).all()
    assert values[36:].ne(0).all()
    assert grown.tau.item() == pytest.approx(math.sqrt(36))


def test_split_keeps_tau_at_root_n():
    model = grow(grow(make_tiny(), 2, method="split"), 3, method="split")
    for _, layer in pattention_layers(model):
        assert layer.tau.item() == pytest.approx(math.sqrt(layer.num_tokens), rel=1e-6)


def test_rotate_gives_new_keys_the_second_moments_of_the_old():
    layer = nn.Sequential(Pattention(8, 6, 12, dtype=torch.float64))
    grown, old = grow(layer, num_tokens={"0": 30}, method="rotate")[0], layer[0]
    keys = grown.key_tokens[12:]
    assert torch.equal(grown.key_tokens[:12], old.key_tokens)
    assert torch.equal(grown.value_tokens[:12], old.value_tokens)
    assert relative_error(keys.T @ keys, 18 / 12 * old.key_tokens.T @ old.key_tokens) < 1e-12
    assert grown.value_tokens[12:].eq(0).all()
    assert grown.tau.item() == pytest.approx(old.tau.item() * math.sqrt(30 / 12))
    # No key is a copy of another: neither of an old one nor among the new.
    unit = nn.functional.normalize(grown.key_tokens)
    assert (unit @ unit.T - torch.eye(30)).abs().max() < 0.99


@pytest.mark.parametrize("tokens", [6, 40])
def test_models_that_are_nearly_equal_rotate_alike(tokens):
    """So the average of the weights goes on averaging the same keys; with more tokens than channels too."""
    layer = nn.Sequential(Pattention(5, 5, tokens, dtype=torch.float64))
    near = copy.deepcopy(layer)
    with torch.no_grad():  # an entry on either side of zero turns the signs that a QR decomposition happens to have
        layer[0].key_tokens[0, 0], near[0].key_tokens[0, 0] = 1e-9, -1e-9
    ours, theirs = (grow(model, 2, method="rotate")[0] for model in (layer, near))
    torch.testing.assert_close(ours.key_tokens, theirs.key_tokens, atol=1e-6, rtol=0)


def test_rotate_needs_as_many_new_tokens_as_dimensions():
    wide, narrow = Pattention(8, 6, 6), Pattention(4, 6, 6)
    for layer, rotated in ((wide, False), (narrow, True)):
        grown = grow(nn.Sequential(layer), num_tokens={"0": 11}, method="rotate")[0]
        assert grown.key_tokens[6:].ne(0).all() == rotated
        assert grown.value_tokens[6:].eq(0).all() == rotated
        assert (grown.tau != layer.tau) == rotated


def test_random_is_the_authors_way_and_changes_the_function():
    model = train(make_tiny())
    grown = grow(model, 2, method="random", exact=False)
    assert relative_error(grown(IDS).logits, model(IDS).logits) > 0.05
    layer, old = grown.model.layers[0].ffn, model.model.layers[0].ffn
    assert layer.tau.item() == pytest.approx(math.sqrt(512))
    assert torch.equal(layer.key_tokens[:256], old.key_tokens)
    assert layer.key_tokens[256:].std().item() == pytest.approx(old.key_tokens.std().item(), rel=0.05)


@pytest.mark.parametrize("method", ["zero", "split"])
def test_every_new_token_learns_from_the_first_step(method):
    """Zero keys with zero values would be dead for ever."""
    model = grow(train(make_tiny()), 2, method=method)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model(IDS, labels=IDS).loss.backward()
    for name, layer in pattention_layers(model):
        new = slice(layer.num_tokens // 2, None)
        assert layer.key_tokens.grad[new].ne(0).any(dim=1).all(), name
    optimizer.step()
    for name, layer in pattention_layers(model):
        new = slice(layer.num_tokens // 2, None)
        assert (layer.key_tokens[new] != before[f"{name}.key_tokens"][new]).any(dim=1).all(), name


def test_every_rotated_token_learns_from_the_first_step():
    """Its value first; its key as soon as the value is not zero."""
    model = grow(train(make_tiny()), 2, method="rotate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model(IDS, labels=IDS).loss.backward()
    for name, layer in pattention_layers(model):
        assert layer.value_tokens.grad[layer.num_tokens // 2 :].ne(0).any(dim=1).all(), name
    optimizer.step()
    optimizer.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    for name, layer in pattention_layers(model):
        assert layer.key_tokens.grad[layer.num_tokens // 2 :].ne(0).any(dim=1).all(), name


def test_the_copies_of_a_split_go_different_ways():
    model = grow(train(make_tiny()), 2, method="split")
    model(IDS, labels=IDS).loss.backward()
    first, second = model.model.layers[0].ffn.key_tokens.grad.chunk(2)
    assert relative_error(first, second) > 0.1


@pytest.mark.parametrize(("method", "tolerance"), [("zero", 0.0), ("split", 0.02), ("rotate", 0.02)])
def test_bf16(method, tolerance):
    """zero adds exact zeros; split's shared values and rotate's new keys are rounded to bf16."""
    model = train(make_tiny().bfloat16())
    grown = grow(model, 2, method=method)
    assert grown.model.layers[0].ffn.key_tokens.dtype == torch.bfloat16
    assert relative_error(grown(IDS).logits, model(IDS).logits) <= tolerance


@pytest.mark.parametrize("inplace", [False, True])
def test_meta(inplace):
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig.preset("124m"))
    grown = grow(model, to="1b4", method="split", inplace=inplace)
    assert (grown is model) == inplace
    assert grown.model.layers[0].ffn.value_tokens.is_meta
    with torch.device("meta"):
        expected = TokenFormerForCausalLM(TokenFormerConfig.preset("1b4"))
    assert grown.num_parameters() == expected.num_parameters()


def test_the_whole_ladder_of_presets():
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig.preset("124m"))
    for rung in ("354m", "757m", "1b4"):
        model = grow(model, to=rung, method="split")
        assert model.config.num_tokens == TokenFormerConfig.preset(rung).num_tokens


def test_a_seed_means_the_same_tokens_everywhere():
    model = make_tiny()
    a, b, other = grow(model, 2, seed=1), grow(model, 2, seed=1), grow(model, 2, seed=2)
    name = "model.layers.1.ffn.key_tokens"
    assert torch.equal(a.state_dict()[name], b.state_dict()[name])
    assert not torch.equal(a.state_dict()[name], other.state_dict()[name])
    alone = grow(model, num_tokens={"ffn": 512}, seed=1)
    assert torch.equal(a.state_dict()[name], alone.state_dict()[name])
    twins = [a.state_dict()[f"model.layers.{i}.ffn.key_tokens"][256:] for i in (0, 1)]
    assert not torch.equal(*twins)


def test_growth_leaves_the_original_and_the_random_state_alone():
    model = make_tiny()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    grow(model, 2, method="split")
    assert model.config.num_tokens == {"qkv": 64, "out": 64, "ffn": 256}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_inplace_keeps_the_parameters_themselves():
    model = train(make_tiny())
    parameters, expected = dict(model.named_parameters()), grow(model, 2, method="split")
    model.model.layers[0].ffn.key_tokens.requires_grad_(False)
    loss = model(IDS, labels=IDS).loss  # a loss that is still held must not stand in the way
    loss.backward()
    logits = model(IDS).logits
    assert grow(model, 2, method="split", inplace=True) is model
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not model.model.layers[0].ffn.key_tokens.requires_grad
    assert relative_error(model(IDS).logits, logits) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[1].ffn.key_tokens.grad.shape == (512, 64)


@pytest.mark.parametrize(
    "method", ["rotate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero", "split"))]
)
def test_inplace_growth_needs_little_more_memory_than_the_grown_model(method):
    """In a process of its own, by the high-water mark that the kernel keeps."""
    script = textwrap.dedent("""
        import resource, torch
        from torch import nn
        from tokenformer import Pattention, grow
        megabytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        grow(nn.Sequential(Pattention(64, 64, 64)), 2, method="METHOD")  # whatever torch loads on first use
        model = nn.Sequential(*(Pattention(512, 512, 1024) for _ in range(24)))  # 96 MB
        before = megabytes()
        grow(model, 2, method="METHOD", inplace=True)
        print(megabytes() - before)
    """)
    command = [sys.executable, "-c", script.replace("METHOD", method)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 96 + 40  # the 96 MB that are new, and one layer's worth of work


def test_a_model_inside_a_wrapper():
    model = nn.ModuleDict({"lm": make_tiny(), "head": Pattention(64, 3, 10)})
    grown = grow(model, 2)
    assert grown["lm"].config.num_tokens == {"qkv": 128, "out": 128, "ffn": 512}
    assert grown["head"].num_tokens == 20


def test_a_shared_layer_grows_once():
    shared = Pattention(4, 4, 8)
    grown = grow(nn.Sequential(shared, nn.ReLU(), shared), 2)
    assert grown[0] is grown[2]
    assert grown[0].num_tokens == 16


def test_an_all_zero_layer_does_not_stay_dead():
    layer = nn.Sequential(Pattention(4, 4, 8))
    nn.init.zeros_(layer[0].value_tokens)
    assert grow(layer, 2, method="zero")[0].value_tokens[8:].std() > 0.1
    nn.init.zeros_(layer[0].key_tokens)
    assert grow(layer, 2, method="rotate")[0].value_tokens[8:].std() > 0.1


@pytest.mark.parametrize(
    ("kind", "method"), [("l2_gelu", "rotate"), ("l2_silu", "rotate"), ("gelu_l2", "split"), ("softmax", "split")]
)
def test_the_method_that_trains_best_is_taken_unless_another_is_given(kind, method):
    model = make_tiny(pattention_kind=kind)
    assert plan_growth(model, 2).method == method == model.config.growth_method
    assert plan_growth(nn.Sequential(Pattention(4, 4, 8, kind)), 2).method == method


def test_the_plan_can_be_kept_as_json():
    growth = plan_growth(make_tiny(), 2.5, method="split", seed=4)
    assert Growth.from_dict(growth.to_dict()) == growth
    step = growth.layers["model.layers.0.ffn"]
    assert (step.before, step.after, step.copies, step.appended) == (256, 640, 2, 128)
