"""The TokenFormer language model, native to transformers: Auto classes, generate, Trainer and pipeline all apply.

Enters: token ids [batch, length]. Leaves: hidden states (TokenFormerModel), logits and loss of the next token
(TokenFormerForCausalLM), or those of one of transformers' heads for classification and question answering.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..errors import BadRequestError
from ..pattention.module import WideBuffers
from .base import TokenFormerPreTrainedModel
from .config import TokenFormerConfig
from .inference import while_inferring
from .kept_groups import put_kept_groups
from .layers import TokenFormerLayer

# Rows of logits held at a time by the chunked loss: 256 rows of a 50k vocabulary are 51 MB in fp32.
LOSS_CHUNK = 256


class TokenFormerRotaryEmbedding(WideBuffers, GPTNeoXRotaryEmbedding):
    """transformers' partial rotary embedding; its frequencies stay in fp32, or far positions would drift in bf16."""


class TokenFormerLanguageModel(TokenFormerPreTrainedModel):
    """What the language model's classes with and without an output layer share."""

    config: TokenFormerConfig
    _skip_keys_device_placement = ["past_key_values"]

    def _write_beside(self, folder: str | os.PathLike) -> None:
        from .text import write_byte_tokenizer  # here, because importing the library should not import tokenizers

        super()._write_beside(folder)
        write_byte_tokenizer(self.config.vocab_size, folder)


class TokenFormerModel(TokenFormerLanguageModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TokenFormerLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = TokenFormerRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        put_kept_groups(self)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[misc]  # TransformersKwargs repeats position_ids
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states of `input_ids` [batch, length], or of `inputs_embeds` [batch, length, width]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(x, position_ids=position_ids)
        # All of them, unless generation with `assistant_early_exit` lowers this number for a while.
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(
                x,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class TokenFormerForCausalLM(TokenFormerLanguageModel, GenerationMixin):
    """The language model: TokenFormerModel and an output layer tied to the embedding."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.model = TokenFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, token_top_k: int | None = None, **kwargs: Any) -> Any:
        """As in transformers, by the layers of `for_inference`.

        With `token_top_k`, that many tokens of every feed-forward block mix their values.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(while_inferring(self))
            if token_top_k is not None:
                stack.enter_context(top_k_tokens(self, token_top_k))
            return super().generate(*args, **kwargs)  # type: ignore[misc]  # its self is a protocol

    @can_return_tuple
    def forward(  # type: ignore[misc]  # TransformersKwargs repeats position_ids
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits for the next token, and the loss if `labels` are given (-100 is ignored).

        With `config.chunked_loss` and labels, the loss comes without the logits.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = loss = None
        if labels is not None and self.config.chunked_loss:
            loss = self._chunked_loss(out.last_hidden_state, labels, **kwargs)
        else:
            logits = self.lm_head(kept_positions(out.last_hidden_state, logits_to_keep))
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def _chunked_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Tensor:
        """The loss function of transformers' causal models, without its logits."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        weight = self.lm_head.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()  # tensor parallelism has split the vocabulary
        rows, wanted = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)
        if not hasattr(F, "linear_cross_entropy"):  # before torch 2.13
            items = (wanted != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
            return _summed_by_chunks(rows, weight, wanted, ignore_index) / items
        loss = F.linear_cross_entropy(
            rows,
            weight,
            wanted,
            reduction="mean" if num_items_in_batch is None else "sum",
            ignore_index=ignore_index,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_CHUNK),
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class TokenFormerForSequenceClassification(GenericForSequenceClassification, TokenFormerLanguageModel):
    """The model with transformers' classifier of whole texts, which reads the last token. One label: a reward model."""


class TokenFormerForTokenClassification(GenericForTokenClassification, TokenFormerLanguageModel):
    """The model with transformers' classifier of every token."""


class TokenFormerForQuestionAnswering(GenericForQuestionAnswering, TokenFormerLanguageModel):
    """The model with transformers' head that finds where in a text the answer begins and ends."""


@contextlib.contextmanager
def top_k_tokens(model: nn.Module, count: int) -> Iterator[None]:
    """Within the `with`, the `count` heaviest tokens of every feed-forward block mix their values, for each row."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadRequestError(f"token_top_k={count!r} was given; a number of tokens from 1 on is needed")
    ffns = [block.ffn for block in model.modules() if isinstance(block, TokenFormerLayer)]
    before = [ffn.top_k for ffn in ffns]
    try:
        for ffn in ffns:
            ffn.top_k = count
        yield
    finally:
        for ffn, top_k in zip(ffns, before, strict=True):
            ffn.top_k = top_k


def _summed_by_chunks(rows: Tensor, weight: Tensor, wanted: Tensor, ignore_index: int) -> Tensor:
    """The cross entropy of all rows; the logits of a chunk are computed again in backward, so that none are kept."""

    def of_chunk(chunk: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(chunk, weight).float(), classes, ignore_index=ignore_index, reduction="sum")

    chunks = zip(rows.split(LOSS_CHUNK), wanted.split(LOSS_CHUNK), strict=True)
    return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def kept_positions(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """The positions whose logits are asked for, as transformers' newer minors choose them from `logits_to_keep`.

    A number keeps the last ones, 0 all; a vector of positions holds for every sample, a matrix has a row for each;
    a boolean mask [batch, length] gives rows without a batch.
    """
    if isinstance(keep, int):
        return hidden[:, -keep:]
    if keep.ndim == 1:
        return hidden[:, keep]
    return hidden[keep] if keep.dtype == torch.bool else torch.take_along_dim(hidden, keep[..., None], dim=1)
