"""The named shapes: each has the parameters that its name says, counted on the meta device."""

import pytest
import torch

from tokenformer import PRESETS, BadRequestError, TokenFormerConfig, TokenFormerForCausalLM

MILLIONS = {
    "124m": 124,
    "354m": 354,
    "757m": 757,
    "1b4": 1400,
    "354m-d1024": 354,
    "757m-d1024": 757,
    "150m": 150,
    "450m": 450,
    "900m": 900,
}


def meta_model(name):
    with torch.device("meta"):
        return TokenFormerForCausalLM(TokenFormerConfig.preset(name))


@pytest.mark.parametrize("name", MILLIONS)
def test_parameter_counts_match_the_names(name):
    model = meta_model(name)
    assert model.config.vocab_size == 50304
    assert model.num_parameters() / 1e6 == pytest.approx(MILLIONS[name], rel=0.02)


def test_the_largest_pile_model_is_named_without_its_embedding():
    """The paper's 1.5B shape holds 1.51B parameters and 77M more in the embedding."""
    model = meta_model("1b5")
    assert model.num_parameters(exclude_embeddings=True) / 1e6 == pytest.approx(1500, rel=0.02)
    assert model.num_parameters() / 1e6 == pytest.approx(1587, rel=0.001)


def test_every_preset_is_counted():
    assert {name for name in PRESETS if not name.startswith("tiny")} == {*MILLIONS, "1b5"}
    assert [meta_model(name).num_parameters() for name in ("tiny", "tiny-2x", "tiny-4x")] == [147584, 278656, 540800]


def test_changes_and_typos():
    config = TokenFormerConfig.preset("124m", vocab_size=256, pattention_kind="gelu_l2")
    assert (config.vocab_size, config.pattention_kind, config.qkv_tokens) == (256, "gelu_l2", 576)
    with pytest.raises(BadRequestError, match=r"preset '124M' is not known; did you mean '124m'\?"):
        TokenFormerConfig.preset("124M")
    with pytest.raises(BadRequestError, match=r"preset: 'qkv_token' is not a field; did you mean 'qkv_tokens'\?"):
        TokenFormerConfig.preset("124m", qkv_token=3)
