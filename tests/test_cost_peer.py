"""A TokenFormer against a GPT-NeoX of as many parameters: the peer that is chosen, and where FLOPs cross."""

import contextlib
import io
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from test_cost import counted_flops, neox, on_meta
from tokenformer import PRESETS, BadRequestError, TokenFormerConfig, cost

ROOT = Path(__file__).parent.parent
LADDER = ["124m", "354m", "757m", "1b4"]


def former(width, layers, tokens, vocabulary=256, heads=2, **more) -> TokenFormerConfig:
    counts = {"qkv_tokens": tokens, "out_tokens": tokens, "ffn_tokens": 4 * tokens}
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return TokenFormerConfig.preset("tiny", vocab_size=vocabulary, **shape, **counts, **more)


@pytest.mark.parametrize("tied", [True, False])
def test_the_width_is_the_one_that_has_the_parameters(tied):
    config = neox(tie_word_embeddings=tied)
    total = cost.parameters(config).total
    assert cost.neox_parameters(64, 2, 256, tied=tied) == total
    assert cost.neox_width(total, 2, 256, tied=tied) == pytest.approx(64, rel=1e-12)
    width = cost.neox_width(1e9, 12, 50304, tied=tied)
    assert cost.neox_parameters(width, 12, 50304, tied=tied) == pytest.approx(1e9, rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_peer_of_a_preset(name, tied):
    config = TokenFormerConfig.preset(name, tie_word_embeddings=tied)
    peer = cost.equal_neox(config)
    assert on_meta(peer).num_parameters() == pytest.approx(cost.parameters(config).total, rel=0.02)
    assert peer.intermediate_size == 4 * peer.hidden_size
    same = ["num_hidden_layers", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_parameters"]
    for field in [*same, "bos_token_id", "eos_token_id"]:
        assert getattr(peer, field) == getattr(config, field), field


def test_a_small_peer_computes():
    peer = cost.equal_neox(former(24, 2, 53, 71))
    assert AutoModelForCausalLM.from_config(peer)(torch.zeros(1, 5).long()).logits.shape == (1, 5, 71)


def test_the_peer_of_a_number():
    peer = cost.equal_neox(354e6, layers=12, vocab_size=50304)
    assert cost.parameters(peer).total == pytest.approx(354e6, rel=0.02)
    assert (peer.num_hidden_layers, peer.vocab_size, peer.tie_word_embeddings) == (12, 50304, True)
    for heads in (4, 7):
        assert cost.equal_neox(354_000_000, layers=12, vocab_size=50304, heads=heads).num_attention_heads == heads
    untied = cost.equal_neox(354e6, layers=12, vocab_size=50304, tie_word_embeddings=False)
    assert cost.parameters(untied).total == pytest.approx(354e6, rel=0.02)
    assert untied.hidden_size < peer.hidden_size
    deep = cost.equal_neox(TokenFormerConfig.preset("354m"), layers=24, max_position_embeddings=99)
    assert cost.parameters(deep).total == pytest.approx(354e6, rel=0.03)
    assert (deep.num_hidden_layers, deep.max_position_embeddings) == (24, 99)


def test_the_widths_of_the_committed_benchmarks():
    """Their results are of these models, and stay comparable only as long as the choice does."""
    seen = 0
    for name in ("training_step", "long_context"):
        for line in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]:
            if "shapes" in line:
                ours, theirs = line["shapes"]["tokenformer"], line["shapes"]["gpt-neox"]
                config = former(ours["width"], ours["layers"], ours["qkv_tokens"], ours["vocabulary"], ours["heads"])
                peer = cost.equal_neox(config)
                assert (peer.hidden_size, peer.num_attention_heads) == (theirs["width"], theirs["heads"])
                assert cost.parameters(peer).total == theirs["parameters"]
                seen += 1
    assert seen > 10


def test_refusals():
    with pytest.raises(BadRequestError, match="354,000,000 parameters, layers=12, vocab_size=None; all three"):
        cost.equal_neox(354e6, layers=12)
    with pytest.raises(BadRequestError, match="was given -5 parameters"):
        cost.equal_neox(-5, layers=12, vocab_size=99)
    with pytest.raises(BadRequestError, match=r"no GPT-NeoX of 3 layers, any .* it would be 3.673 wide"):
        cost.equal_neox(1000, layers=3, vocab_size=99)
    with pytest.raises(BadRequestError, match="layers=0 was given; at least 1 is needed"):
        cost.equal_neox(TokenFormerConfig.preset("tiny"), layers=0)
    with pytest.raises(BadRequestError, match="5000 heads"):
        cost.equal_neox(354e6, layers=12, vocab_size=99, heads=5000)
    with pytest.raises(BadRequestError, match=r"a gpt_neox was given .* give a TokenFormerConfig"):
        cost.crossing_length(neox())


def real_width(config) -> float:
    """Of the GPT-NeoX of as many parameters, by bisection."""
    layers, rows = config.num_hidden_layers, config.vocab_size * (1 if config.tie_word_embeddings else 2)
    low, high = 0.0, 1e6
    for _ in range(100):
        width = (low + high) / 2
        total = rows * width + layers * (12 * width**2 + 13 * width) + 2 * width
        low, high = (width, high) if total < cost.parameters(config).total else (low, width)
    return width


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [*PRESETS, (48, 3, 500, 97), (32, 1, 33, 4001), (96, 2, 1, 50)], ids=str)
def test_the_crossing_is_where_the_flops_cross(config, tied):
    shape = PRESETS[config] if isinstance(config, str) else former(*config).to_dict()
    config = TokenFormerConfig(**{**shape, "tie_word_embeddings": tied})
    crossing, width, layers = cost.crossing_length(config), real_width(config), config.num_hidden_layers

    def theirs(length):
        return layers * (24 * width**2 + 4 * length * width) + 2 * config.vocab_size * width

    def cheaper(length):
        return cost.forward_flops_per_token(config, length) < theirs(length)

    for length in (1, 1024, 8192):
        ratio = theirs(length) / cost.forward_flops_per_token(config, length)
        assert cost.flops_ratio(config, length) == pytest.approx(ratio, rel=1e-9)
    if crossing is None:
        assert not any(cheaper(length) for length in (100, 10_000, 10**9))
    else:
        assert all(cheaper(crossing + more) for more in (0, 1, 7, 100, 10**6))
        assert not any(cheaper(length) for length in range(max(0, crossing - 20), crossing))


def test_the_crossing_with_a_given_peer():
    seen = set()
    for tokens, width, layers in itertools.product((20, 64, 200), (32, 64, 80, 128), (1, 2, 3)):
        config, peer = former(64, 2, tokens), neox(hidden_size=width, num_hidden_layers=layers)
        crossing = cost.crossing_length(config, peer)

        def cheaper(length, config=config, peer=peer):
            return cost.training_flops_per_token(config, length) < cost.training_flops_per_token(peer, length)

        if crossing is None:
            assert not cheaper(10**9)
        else:
            assert all(cheaper(crossing + more) for more in (0, 1, 100, 10**9))
            assert not any(cheaper(length) for length in range(max(0, crossing - 20), crossing))
            assert cost.flops_ratio(config, crossing, peer) > 1
        seen.add("never" if crossing is None else "always" if crossing == 0 else "from some length on")
    assert len(seen) == 3


def test_as_wide_a_peer_is_never_crossed():
    narrow = former(64, 2, 1)  # fewer parameters than a GPT-NeoX of its own width
    assert cost.crossing_length(narrow) is None
    assert cost.crossing_length(narrow, neox(hidden_size=64, tie_word_embeddings=True)) == 0


def test_torch_counts_fewer_flops_beyond_the_crossing():
    config = former(32, 2, 96, 601, tie_word_embeddings=False)
    peer = cost.equal_neox(config)
    crossing = cost.crossing_length(config, peer)
    assert 50 < crossing < 500
    for length, fewer in ((crossing // 2, False), (crossing - 1, False), (crossing, True), (2 * crossing, True)):
        for training in (False, True):
            ours, theirs = (counted_flops(on_meta(one), length, training) for one in (config, peer))
            assert (ours < theirs) == fewer, (length, training)


def test_growth_brings_the_crossing_nearer():
    ladder = [TokenFormerConfig.preset(name) for name in LADDER]
    crossings = [cost.crossing_length(config) for config in ladder]
    assert crossings[0] is None
    assert crossings[1:] == sorted(crossings[1:], reverse=True)
    ratios = [cost.flops_ratio(config, 65536) for config in ladder]
    assert ratios == sorted(ratios)
    caches = {cost.kv_cache_bytes(config, 1000) for config in ladder}
    assert len(caches) == 1


def test_the_table_in_the_docs():
    page = (ROOT / "docs" / "cost.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    lines = printed.getvalue().strip().splitlines()
    assert len(lines) == len(LADDER)
    for line in lines:
        assert line in page.splitlines(), line


def test_a_peer_may_be_a_saved_configuration(tmp_path):
    peer = cost.equal_neox(TokenFormerConfig.preset("354m"))
    peer.save_pretrained(tmp_path)
    read = GPTNeoXConfig.from_pretrained(tmp_path)
    assert cost.parameters(read) == cost.parameters(peer)
