"""Torch's attention and Transformer layers with Pattention inside: change the import, keep the code.

They take the arguments, shapes and masks of torch's own classes, and the Transformer layers fit into
torch.nn.TransformerEncoder and TransformerDecoder. The four projections of attention are Pattentions of `num_tokens`
tokens (the width by default), and one Pattention of `dim_feedforward` tokens is the whole feed-forward block.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import BadRequestError
from .pattention import Pattention

__all__ = ["MultiheadAttention", "Pattention", "TransformerDecoderLayer", "TransformerEncoderLayer"]

Activation = str | Callable[[Tensor], Tensor]


class MultiheadAttention(nn.Module):
    """Attention of `query` over `key` and `value`, each projected by a Pattention of `num_tokens` tokens.

    Shapes and masks are torch's: [L, N, E] or [N, L, E] with `batch_first`, or [L, E] without a batch; True in
    a boolean mask hides a position, a float mask is added to the scores. `is_causal` without `attn_mask` makes
    the causal mask; with one it is a hint that the mask is causal, and the mask itself is used.

    `bias` gives each projection an output bias; the paper's have none, so that here, unlike in torch, there is none
    unless asked for. `add_bias_kv` adds a learnable key and value to those projected, `add_zero_attn` a zero one.
    """

    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_tokens: int | None = None,
        kind: str = "l2_gelu",
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise BadRequestError(
                f"MultiheadAttention: embed_dim={embed_dim} is not divisible by num_heads={num_heads}"
            )
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first

        def projection(d_in: int) -> Pattention:
            return Pattention(d_in, embed_dim, num_tokens or embed_dim, kind, bias=bias, device=device, dtype=dtype)

        self.query = projection(embed_dim)
        self.key = projection(kdim or embed_dim)
        self.value = projection(vdim or embed_dim)
        self.out = projection(embed_dim)
        self.add_zero_attn = add_zero_attn
        for name in ("bias_k", "bias_v"):
            extra = nn.Parameter(torch.empty(1, 1, embed_dim, device=device, dtype=dtype)) if add_bias_kv else None
            self.register_parameter(name, extra)
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attended values, and the attention weights if `need_weights`."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        q, k, v = self._heads(self.query(query)), self._heads(self.key(key)), self._heads(self.value(value))
        mask = self._mask(q, k, attn_mask, key_padding_mask, is_causal)  # [N or 1, H or 1, L, S]
        k, v = self._extended(k, self.bias_k), self._extended(v, self.bias_v)
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[-2] - mask.shape[-1]))
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            weights = scores.softmax(-1) if mask is None else (scores + mask).softmax(-1)  # [N, H, L, S]
            weights = F.dropout(weights, p, self.training)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)  # [N, H, L, E/H]
        out = self.out(attended.transpose(1, 2).flatten(2))  # [N, L, E]

        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [N, H, L, E/H]

    def _extended(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values, followed by those that come from no input."""
        if bias is not None:
            x = torch.cat([x, self._heads(bias).expand(len(x), -1, -1, -1)], dim=-2)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """All masks as one, to be added to the scores."""
        length, source = q.shape[-2], k.shape[-2]
        if attn_mask is None and is_causal:
            attn_mask = torch.ones(length, source, dtype=torch.bool, device=q.device).triu(1)
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, q.dtype)
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(-1, self.num_heads, length, source)
        if key_padding_mask is None:
            return attn_mask
        padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
        return padding if attn_mask is None else attn_mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))


class _TransformerLayer(nn.Module):
    """What both layers share: the arguments, the blocks, and where the norms go."""

    reads_memory: bool

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_tokens: int | None = None,
        kind: str = "l2_gelu",
    ) -> None:
        super().__init__()
        if not (activation in ("gelu", F.gelu) or isinstance(activation, nn.GELU)):
            raise BadRequestError(
                f"{type(self).__name__}: activation={activation!r} was given; Pattention's is chosen by kind: "
                "leave it out, and say kind='l2_relu' or 'l2_silu' for another than GeLU"
            )

        def new_attention() -> MultiheadAttention:
            return MultiheadAttention(
                d_model,
                nhead,
                dropout,
                num_tokens=num_tokens,
                kind=kind,
                batch_first=batch_first,
                device=device,
                dtype=dtype,
            )

        def new_norm() -> nn.LayerNorm:
            return nn.LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        self.norm_first = norm_first
        self.self_attn = new_attention()
        self.norm1, self.norm2 = new_norm(), new_norm()
        if self.reads_memory:
            self.multihead_attn = new_attention()
            self.norm3 = new_norm()
        self.ffn = Pattention(d_model, d_model, dim_feedforward, kind, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def _residual(self, x: Tensor, norm: nn.Module, block: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(block(norm(x)))
        return norm(x + self.dropout(block(x)))

    def _self_attend(self, mask: Tensor | None, padding: Tensor | None, is_causal: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: self.self_attn(x, x, x, padding, False, mask, is_causal=is_causal)[0]


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and feed-forward, called as torch.nn.TransformerEncoderLayer is."""

    reads_memory = False

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        attend = self._self_attend(src_mask, src_key_padding_mask, is_causal)
        x = self._residual(src, self.norm1, attend)
        return self._residual(x, self.norm2, self.ffn)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention over `memory`, and feed-forward, called as torch.nn.TransformerDecoderLayer is."""

    reads_memory = True

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        def attend_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(
                x, memory, memory, memory_key_padding_mask, False, memory_mask, is_causal=memory_is_causal
            )[0]

        attend = self._self_attend(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        x = self._residual(tgt, self.norm1, attend)
        x = self._residual(x, self.norm2, attend_memory)
        return self._residual(x, self.norm3, self.ffn)
