"""What a model of images costs: the formulas against real models, torch's FLOP counter and what autograd keeps."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification, ViTConfig

from conftest import kept_for_backward
from test_cost import neox
from tokenformer import (
    KINDS,
    VISION_PRESETS,
    BadRequestError,
    TokenFormerConfig,
    TokenFormerVisionConfig,
    adopt,
    cost,
    grow,
)

# Odd sizes: every dimension that could be mistaken for another has its own number.
ODD = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_channels": 2, "num_labels": 7}
ODD |= {"qkv_tokens": 5, "out_tokens": 11, "ffn_tokens": 13, "image_size": 30, "patch_size": 6}
OURS = {
    "usual": {},
    "mean": {"pooling": "mean"},
    "sincos": {"position_embedding": "sincos", "parametric_norm": True},
    "odd": ODD,
    "odd, softmax, mean": {**ODD, "pooling": "mean", "pattention_kind": "softmax"},
}
VITS = {
    "usual": {},
    "odd": {"hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 97}
    | {"image_size": (30, 48), "patch_size": (6, 8), "num_channels": 2, "num_labels": 7},
    "no bias": {"qkv_bias": False},
}


def vit(name="usual", **changes) -> ViTConfig:
    usual = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    usual |= {"image_size": 32, "patch_size": 4, "num_labels": 10}
    return ViTConfig(**{**usual, **VITS[name], **changes})


def ours(name="usual", **changes) -> TokenFormerVisionConfig:
    return TokenFormerVisionConfig.preset("tiny32", **{**OURS[name], **changes})


CONFIGS = [
    *(pytest.param(ours(name), id=name) for name in OURS),
    *(pytest.param(vit(name), id=f"ViT, {name}") for name in VITS),
]


def on_meta(config, **options):
    with torch.device("meta"):
        return AutoModelForImageClassification.from_config(config, **options)


def images_for(config, batch, **options):
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    return torch.randn(batch, config.num_channels, height, width, **options)


@pytest.mark.parametrize("name", VISION_PRESETS)
def test_parameters_of_presets(name):
    config = TokenFormerVisionConfig.preset(name)
    assert cost.parameters(config).total == on_meta(config).num_parameters()


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_by_role(config):
    model, counted = on_meta(config), cost.parameters(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def total(*parts):
        return sum(size for name, size in sizes.items() if any(part in name for part in parts))

    assert counted.qkv == total(".query.", ".key.", ".value.", ".q_proj.", ".k_proj.", ".v_proj.")
    assert counted.out == total(".out.", ".o_proj.")
    assert counted.ffn == total(".ffn.", ".mlp.")
    assert counted.norm == total("norm.", "norm_before.", "norm_after.")
    assert counted.embedding == total(".embeddings.")
    assert counted.head == total("classifier")
    assert counted.total == sum(sizes.values()) == model.num_parameters()


def test_parameters_of_the_usual_vit():
    assert cost.parameters(ViTConfig(num_labels=1000)).total == on_meta(ViTConfig(num_labels=1000)).num_parameters()


def counted_flops(model, training, size=None):
    """FLOPs per image by torch's counter, with the plain form of sdpa."""
    images = images_for(model.config, 2, device=model.device)
    if size is not None:
        images = torch.randn(2, model.config.num_channels, size, size, device=model.device)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        labels = torch.zeros(2, dtype=torch.long, device=model.device)
        loss = model(images, labels=labels, interpolate_pos_encoding=size is not None).loss
        if training:
            loss.backward()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS)
def test_flops_are_those_that_torch_counts(config, attention):
    model = on_meta(config, attn_implementation=attention)
    assert cost.forward_flops_per_image(config) == pytest.approx(counted_flops(model, False), rel=0.01)
    assert cost.training_flops_per_image(config) == pytest.approx(counted_flops(model, True), rel=0.01)


@pytest.mark.parametrize("size", [4, 48, 62])
@pytest.mark.parametrize("config", [ours(), ours("mean"), vit()], ids=["cls", "mean", "ViT"])
def test_flops_at_another_resolution(config, size):
    model = on_meta(config)
    assert cost.forward_flops_per_image(config, size) == pytest.approx(counted_flops(model, False, size), rel=0.01)
    assert cost.training_flops_per_image(config, size) == pytest.approx(counted_flops(model, True, size), rel=0.01)
    expected = (size // 4) ** 2 + (0 if getattr(config, "pooling", "cls") == "mean" else 1)
    assert cost.tokens_per_image(config, size) == expected


def test_flops_of_a_large_and_of_a_grown_model():
    large = on_meta(TokenFormerVisionConfig.preset("b16"))
    assert cost.forward_flops_per_image(large.config) == pytest.approx(counted_flops(large, False), rel=0.01)
    small = on_meta(ours())
    grown = grow(small, 3, method="split")
    assert cost.parameters(grown.config).total == grown.num_parameters()
    assert cost.training_flops_per_image(grown.config) == pytest.approx(counted_flops(grown, True), rel=0.01)
    # Two FLOPs for each new number and token, three times in training.
    new = grown.num_parameters() - small.num_parameters()
    more = cost.training_flops_per_image(grown.config) - cost.training_flops_per_image(small.config)
    assert more == 3 * 2 * new * cost.tokens_per_image(small.config)


def kept_by_autograd(model, batch) -> int:
    images = images_for(model.config, batch, dtype=model.dtype)
    return kept_for_backward(model, lambda: model.train()(images).logits)


@pytest.mark.parametrize("ballast", ["spread", "single"])
@pytest.mark.parametrize("parts", [("ffn",), ("ffn", "qkv")], ids="+".join)
def test_an_adopted_vit_is_counted_as_a_whole(parts, ballast):
    model = AutoModelForImageClassification.from_config(vit(hidden_size=96), attn_implementation="sdpa")
    config = adopt(model, parts, ballast=ballast).config
    assert cost.parameters(config).total == model.num_parameters()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(images_for(config, 3))
    assert 3 * cost.forward_flops_per_image(config) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert cost.training_memory(config, 3).activations == pytest.approx(kept_by_autograd(model, 3), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(ours(pattention_kind=kind, ffn_tokens=300), id=kind) for kind in KINDS),
        pytest.param(ours("mean", drop_path_rate=0.3), id="mean"),
        pytest.param(ours("sincos"), id="sincos"),
        pytest.param(ours(pattention_recompute=True, hidden_size=256), id="recompute"),
        pytest.param(vit(), id="ViT"),
        pytest.param(vit(intermediate_size=91, hidden_size=96), id="ViT, odd"),
    ],
)
def test_activations_are_what_autograd_keeps(config, dtype):
    model = AutoModelForImageClassification.from_config(config, attn_implementation="sdpa").to(dtype)
    estimate = cost.training_memory(config, 3, bytes_per_number=dtype.itemsize)
    assert estimate.activations == 3 * cost.activation_bytes_per_image(config, dtype.itemsize)
    assert estimate.activations == pytest.approx(kept_by_autograd(model, 3), rel=0.02)


@pytest.mark.parametrize("kind", ["tokenformer", "vit"])
def test_checkpointing_keeps_the_input_of_every_block(kind):
    kept, estimated = [], []
    for layers in (2, 6):
        config = vit(num_hidden_layers=layers) if kind == "vit" else ours(num_hidden_layers=layers)
        model = AutoModelForImageClassification.from_config(config)
        model.gradient_checkpointing_enable()
        kept.append(kept_by_autograd(model, 2))
        estimated.append(cost.training_memory(config, 2, gradient_checkpointing=True).activations)
    assert estimated[1] - estimated[0] == kept[1] - kept[0] == 4 * 2 * 65 * 64 * 4


def test_training_memory_by_part():
    config = TokenFormerVisionConfig.preset("b16")
    weights = cost.parameters(config).total * 4
    memory = cost.training_memory(config, 8)
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, weights, 2 * weights)
    assert memory.logits == 8 * 1000 * 3 * 4
    assert cost.training_memory(config, 8, image_size=384).activations > 2.9 * memory.activations


@pytest.mark.parametrize("name", VISION_PRESETS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_vit_of_as_many_parameters(name, pooling):
    config = TokenFormerVisionConfig.preset(name, pooling=pooling)
    peer = cost.equal_vit(config)
    assert on_meta(peer).num_parameters() == pytest.approx(cost.parameters(config).total, rel=0.02)
    assert peer.intermediate_size == 4 * peer.hidden_size
    assert cost.image_flops_ratio(config) == pytest.approx(cost.image_flops_ratio(config, peer=peer), rel=0.04)
    for field in ("num_hidden_layers", "image_size", "patch_size", "num_channels", "num_labels", "id2label"):
        assert getattr(peer, field) == getattr(config, field), field


def test_the_papers_smaller_models_are_matched_by_the_usual_vits():
    widths = {name: cost.equal_vit(TokenFormerVisionConfig.preset(name)) for name in ("b16-86m", "l16-307m")}
    assert {name: (peer.hidden_size, peer.num_attention_heads) for name, peer in widths.items()} == {
        "b16-86m": (768, 12),
        "l16-307m": (1024, 16),
    }


def test_another_depth_and_refusals():
    config = TokenFormerVisionConfig.preset("b16")
    deep = cost.equal_vit(config, layers=24)
    assert deep.num_hidden_layers == 24
    assert cost.parameters(deep).total == pytest.approx(cost.parameters(config).total, rel=0.02)
    assert cost.equal_vit(config, heads=7).num_attention_heads == 7
    with pytest.raises(BadRequestError, match=r"no ViT of 12 layers and 5000 heads has 108,859,392 parameters"):
        cost.equal_vit(config, heads=5000)
    with pytest.raises(BadRequestError, match="heads=0 was given; at least 1 is needed"):
        cost.equal_vit(config, heads=0)


@pytest.mark.parametrize("size", [32, 64, 256])
def test_a_grown_model_is_cheaper_than_its_vit(size):
    """Growth keeps the width, and a ViT of as many parameters is wider: the more patches, the more it costs."""
    config = grow(on_meta(ours()), 4).config
    peer = cost.equal_vit(config)
    assert peer.hidden_size > config.hidden_size
    ratios = [cost.image_flops_ratio(config, at) for at in (size, 2 * size)]
    assert ratios[1] > ratios[0]


def test_each_kind_is_counted_in_its_own_unit():
    with pytest.raises(BadRequestError, match="a tokenformer_vision is counted per image, not per token"):
        cost.forward_flops_per_token(ours(), 10)
    with pytest.raises(BadRequestError, match="a vit is counted per image"):
        cost.kv_cache_bytes(vit(), 10)
    with pytest.raises(BadRequestError, match="a gpt_neox does not take images"):
        cost.forward_flops_per_image(neox())
    with pytest.raises(BadRequestError, match="of a tokenformer was given length=None; give length"):
        cost.training_memory(TokenFormerConfig.preset("tiny"), 3)
    with pytest.raises(BadRequestError, match="of a tokenformer_vision was given length=9; give image_size"):
        cost.training_memory(ours(), 3, 9)
    with pytest.raises(BadRequestError, match="image_size=3 was given; a patch has 4 pixels"):
        cost.forward_flops_per_image(ours(), 3)
