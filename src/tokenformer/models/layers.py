"""The block every TokenFormer is built of: norm, attention, norm, feed-forward, with Pattention for every linear.

Enters: hidden states [batch, length, width]; in a language model also a mask, rotary cosines and sines, a cache.
Leaves: hidden states. The configuration says whether attention is causal.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb, eager_attention_forward

from ..pattention import Pattention
from .config import TokenFormerBaseConfig


def new_pattention(config: TokenFormerBaseConfig, num_tokens: int) -> Pattention:
    """A Pattention from the model's width to its width."""
    return Pattention(
        config.hidden_size,
        config.hidden_size,
        num_tokens,
        config.pattention_kind,
        form=config.pattention_form,
        recompute=config.pattention_recompute,
    )


class BlockNorm(nn.LayerNorm):
    """LayerNorm with or without weights.

    Without weights torch's CPU kernel is not vectorised; with ones it takes half the time for the same output.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.weight is not None or input.device.type != "cpu":
            return super().forward(input)
        return F.layer_norm(input, self.normalized_shape, input.new_ones(self.normalized_shape), eps=self.eps)


class TokenFormerAttention(nn.Module):
    """Multi-head attention between tokens; query, key, value and output are Pattentions."""

    def __init__(self, config: TokenFormerBaseConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, config.is_causal
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.query = new_pattention(config, config.qkv_tokens)
        self.key = new_pattention(config, config.qkv_tokens)
        self.value = new_pattention(config, config.qkv_tokens)
        self.out = new_pattention(config, config.out_tokens)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, length, width]."""
        return self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch_length = hidden_states.shape[:-1]
        query, key, value = (
            projected.view(*batch_length, -1, self.head_dim)  # [batch, length, heads, d]
            for projected in self.project(hidden_states)
        )
        if position_embeddings is not None:
            # Rotated before heads and positions are transposed: the attention's output then needs no copy.
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=2)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [batch, heads, length, d]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            **kwargs,
        )
        return self.out(attended.reshape(*batch_length, -1).contiguous()), weights


class DropPath(nn.Module):
    """Stochastic depth: in training a branch is left out for a share `rate` of the rows, and scaled up for the rest."""

    def __init__(self, config: TokenFormerBaseConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx

    @property
    def rate(self) -> float:
        """Of this block in a model of the depth that it has now."""
        return self.config.drop_path(self.layer_idx)

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (kept / (1 - self.rate)).to(branch.dtype)

    def extra_repr(self) -> str:
        return f"{self.rate:.3g}"


class TokenFormerLayer(GradientCheckpointingLayer):
    """One pre-norm block. A single Pattention is the whole feed-forward network."""

    def __init__(self, config: TokenFormerBaseConfig, layer_idx: int) -> None:
        super().__init__()
        d, eps, affine = config.hidden_size, config.layer_norm_eps, config.parametric_norm
        self.attention_norm = BlockNorm(d, eps, elementwise_affine=affine)
        self.attention = TokenFormerAttention(config, layer_idx)
        self.ffn_norm = BlockNorm(d, eps, elementwise_affine=affine)
        self.ffn = new_pattention(config, config.ffn_tokens)
        self.ffn.top_k = config.token_top_k
        self.drop_path = DropPath(config, layer_idx)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.drop_path(self.attention(self.attention_norm(hidden_states), **kwargs)[0])
        return hidden_states + self.drop_path(self.ffn(self.ffn_norm(hidden_states)))
