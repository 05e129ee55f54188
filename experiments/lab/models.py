"""The models of the experiments, and how each kind of them grows.

Enters: the description of a model (spec.py). Leaves: a torch model; or a larger one with its optimizer.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, ViTConfig, ViTForImageClassification

from tokenformer import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForImageClassification,
    TokenFormerVisionConfig,
    adopt,
    cost,
    grow,
    grow_optimizer,
    replace_linears,
)
from tokenformer.growth.rates import rate_shares
from tokenformer.pattention import TOKENS, Pattention, default_tau, pattention_layers
from tokenformer.training.muon import MuonWithAdamW

from .adapters import adapter_shares
from .net2net import carry_moments, widen, widen_ffn
from .spec import Growth, NeoX, Run, Shape, TokenFormer, TokenViT, ViT

VOCABULARY = 256
COMMON = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
IMAGES = {"image_size": 32, "patch_size": 4, "num_labels": 10}
SPARED = ("class_token", "cls_token", "position_embeddings")  # from weight decay, as `tokenformer train` does


def config_of(shape: Shape, context: int = 256) -> PreTrainedConfig:
    """The configuration of a model."""
    common = {"hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    common |= {"initializer_range": shape.init, "attn_implementation": "sdpa"}
    if isinstance(shape, ViT):
        return ViTConfig(**common, **IMAGES, intermediate_size=4 * shape.width)
    text = {**COMMON, "max_position_embeddings": context}
    if isinstance(shape, TokenFormer):
        tokens = {"qkv_tokens": shape.tokens, "out_tokens": shape.tokens, "ffn_tokens": 4 * shape.tokens}
        kind = "gelu_l2" if shape.kind == "gelu_l1" else shape.kind
        fields = {**common, **tokens, "pattention_kind": kind, **dict(shape.changes)}
        if isinstance(shape, TokenViT):
            return TokenFormerVisionConfig(**IMAGES, **fields)
        return TokenFormerConfig(**text, **fields)
    return GPTNeoXConfig(
        **common,
        **text,
        intermediate_size=shape.ffn or 4 * shape.width,
        use_parallel_residual=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": rotary_factor(shape.width // shape.heads),
        },
    )


def rotary_factor(head: int) -> float:
    """About a quarter of a head, in an even number of dimensions, as rotary embedding needs."""
    dimensions = max(2, 2 * round(head / 8))
    return (dimensions + 0.01) / head


def build(shape: Shape, context: int = 256) -> Any:
    """The model, with fresh weights from torch's own random numbers."""
    config = config_of(shape, context)
    if isinstance(shape, ViT):
        return ViTForImageClassification(config)
    if isinstance(shape, NeoX):
        model = GPTNeoXForCausalLM(config)
        replace_parts(model, shape.replaced, shape.keys)
        return model
    model = (TokenFormerForImageClassification if isinstance(shape, TokenViT) else TokenFormerForCausalLM)(config)
    for _, layer in pattention_layers(model):
        layer.tau *= shape.tau
        layer.key_tokens.data *= shape.keys
        if shape.kind == "gelu_l1":
            layer.__class__ = GeluL1  # which the library has not: the same tokens, computed differently
    return model


class GeluL1(Pattention):
    """GeLU before an L1 norm, with the scale that softmax has: a step of the paper's ablation."""

    def forward(self, x: Tensor) -> Tensor:
        weights = F.gelu(x @ self.key_tokens.mT)  # [..., n]
        return self.num_tokens * F.normalize(weights, p=1, dim=-1) @ self.value_tokens


class SeparateProjections(nn.Module):
    """Query, key and value as three linears, with their results in the order in which GPT-NeoX reads them."""

    def __init__(self, width: int, heads: int, std: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value)]
        return torch.cat(parts, dim=-1).flatten(-2)


def replace_parts(model: GPTNeoXForCausalLM, parts: tuple[str, ...], key_std: float) -> None:
    """Put Pattentions of as many parameters where a GPT-NeoX has query, key, value or dense; one for the whole MLP."""
    config = model.config
    for layer in model.gpt_neox.layers:
        if {"query", "key", "value"} & set(parts):
            layer.attention.query_key_value = SeparateProjections(
                config.hidden_size, config.num_attention_heads, config.initializer_range
            )
        if "mlp" in parts:
            layer.mlp = Pattention(config.hidden_size, config.hidden_size, config.intermediate_size)
            layer.mlp.reset_parameters(value_std=2 / (config.num_hidden_layers * config.hidden_size**0.5))
    places = {"query": "query_key_value.query", "key": "query_key_value.key", "value": "query_key_value.value"}
    places["dense"] = "dense"
    linears = [f"gpt_neox.layers.*.attention.{places[part]}" for part in parts if part in places]
    if linears:
        replace_linears(model, linears)
    for _, layer in pattention_layers(model):
        layer.key_tokens.data *= key_std * layer.d_in**0.5  # new ones are N(0, 1/√d_in)


def equal_neox(shape: TokenFormer) -> NeoX:
    """The GPT-NeoX of the same depth and number of heads whose parameters are as many, within 2 %."""
    wanted = cost.parameters(config_of(shape)).total
    width = cost.neox_width(wanted, shape.layers, VOCABULARY)
    peer = NeoX(shape.heads * round(width / shape.heads), shape.layers, shape.heads)
    missing = wanted - cost.parameters(config_of(peer)).total
    if abs(missing) > 0.02 * wanted:
        # The width must divide into heads; the FFN makes up for the rest.
        peer = replace(peer, ffn=4 * peer.width + round(missing / shape.layers / (2 * peer.width + 1)))
    return peer


def equal_vit(shape: TokenViT) -> ViT:
    """The ViT of the same depth whose parameters are as many, within 2 %."""
    peer = cost.equal_vit(config_of(shape), heads=shape.heads)
    return ViT(peer.hidden_size, peer.num_hidden_layers, peer.num_attention_heads)


def optimizer_of(model: nn.Module, run: Run) -> Optimizer:
    """The paper's AdamW, or Muon. Weights decay, also tokens and embedding; biases, norms and positions do not.

    The rate of a group is its share of the scheduled rate; all have the whole of it, unless rates follow sizes.
    """
    shares = rate_shares(model, dict(run.base)) if run.base else {}
    if run.adapter is not None:
        shares |= adapter_shares(model, run.adapter)
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spared, share = parameter.ndim <= 1 or name.endswith(SPARED), shares.get(name, 1.0)
        group = {"params": [], "weight_decay": 0.0 if spared else run.weight_decay, "share": share}
        groups.setdefault((spared, share), group)["params"].append(parameter)
    ordered, betas = [groups[key] for key in sorted(groups)], (0.9, 0.95)
    if run.optimizer == "muon":
        tokens = [parameter for name, parameter in model.named_parameters() if name.endswith(TOKENS)]
        return MuonWithAdamW(ordered, lr=run.lr, tokens=tokens, betas=betas, fused=True)
    return AdamW(ordered, lr=run.lr, betas=betas, fused=True)


def muon_flops(model: TokenFormer) -> int:
    """Of a step of Muon, the FLOPs that depend on a matrix's shape alone: five Newton-Schulz iterations for each."""
    blocks = TokenFormerForCausalLM(config_of(model)).model
    return sum(_orthogonalised(p) for name, p in blocks.named_parameters() if name.endswith(TOKENS))


def _orthogonalised(matrix: Tensor) -> int:
    short, long = sorted(matrix.shape)
    return 5 * (4 * short * short * long + 2 * short**3)


def grow_both(model: Any, optimizer: Optimizer, growth: Growth, run: Run) -> tuple[Any, Optimizer]:
    """A larger model with its optimizer. The seed of the new tokens is made of the run's and of the step."""
    seed, sizes = 1000 * run.seed + growth.step, dict(growth.sizes)
    if growth.method == "net2net":
        how = {"seed": seed, "noise": growth.noise}
        larger = widen_ffn(model, sizes["ffn"], **how) if sizes else widen(model, **how)
        afresh = optimizer_of(larger, run)
        if growth.adam == "carry" and not sizes:
            carry_moments(optimizer, model, afresh, larger, noise=growth.noise)
        return larger, afresh
    if growth.method == "none":
        return model, optimizer_of(model, run) if growth.adam == "reset" else optimizer
    if growth.adopts:
        adopt(model, growth.adopts, ballast=growth.ballast)
    larger = grow(
        model,
        None if sizes or growth.factor == 1 else growth.factor,
        num_tokens=sizes or None,
        depth=growth.depth or None,
        new_blocks=growth.new_blocks,
        new_blocks_at=growth.new_blocks_at,
        method=growth.method,
        seed=seed,
        noise=growth.noise,
        exact=growth.method != "random",
    )
    afresh = optimizer_of(larger, run)
    if not (growth.adopts or growth.adam == "reset"):
        # The state only: the groups are by the rates of the grown size.
        named = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        grown = grow_optimizer({"state": named}, model, larger)["state"]
        afresh.state.update((p, grown[name]) for name, p in larger.named_parameters() if name in grown)
    return larger, afresh


def tau_targets(model: nn.Module) -> dict[str, tuple[float, float]]:
    """For every Pattention its tau and the one that a layer born at its size would have."""
    return {
        name: (layer.tau.item(), default_tau(layer.num_tokens, layer.kind)) for name, layer in pattention_layers(model)
    }


def set_tau(model: nn.Module, targets: dict[str, tuple[float, float]], part: float) -> None:
    """Bring every tau a part of the way to its target."""
    for name, layer in pattention_layers(model):
        old, new = targets[name]
        layer.tau.fill_(old + (new - old) * min(1.0, part))
