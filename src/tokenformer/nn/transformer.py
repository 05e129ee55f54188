"""Drop-ins for torch.nn.TransformerEncoderLayer and TransformerDecoderLayer with Pattention inside.

They take the arguments, shapes and masks of torch's own layers and stand inside torch.nn.TransformerEncoder and
TransformerDecoder. One Pattention of `dim_feedforward` tokens is the whole feed-forward block; `num_tokens` sets
the tokens of each attention projection (d_model by default).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import BadRequestError
from ..pattention import Pattention
from .attention import MultiheadAttention

Activation = str | Callable[[Tensor], Tensor]


class _TransformerLayer(nn.Module):
    """What both layers share: the arguments, the blocks, and where the norms stand."""

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
