"""evaluate_text(): how well a language model predicts a text.

    tokenformer eval models/mine --text book.txt

Enters: a causal language model, its tokenizer and a text. Leaves: loss, perplexity and bits per byte. Windows of
`length` tokens move over the text by `stride`, and each predicts the tokens that follow its own. Every token but the
text's first is scored once, by the first window that reaches it: with all the text before it that fits into the window,
which is at least `length - stride` tokens, once there are as many.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..errors import BadFileError, BadRequestError
from ..models.sample import evaluating
from ..models.text import as_text, encode, reads_bytes

# Beyond this a perplexity is no longer a finite number.
LARGEST_LOSS = 700.0
# Models of long contexts and large vocabularies would need tens of gigabytes for the logits of a few windows.
LONGEST_DEFAULT, MOST_WINDOWS, MOST_LOGITS = 2048, 4, 2**28


@dataclass(frozen=True)
class TextScore:
    """How a text was predicted. `tokens` and `bytes` are what was scored: all of it without the first token.

    loss is in nats per token. bits_per_byte divides by bytes, which no tokenizer changes, so that it can be compared
    between models with different ones.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    length: int
    stride: int


@dataclass(frozen=True)
class Window:
    """The input ids [start, end), whose targets are one further on; those after input `scored_from` are scored."""

    start: int
    scored_from: int
    end: int


def evaluate_text(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | bytes,
    *,
    stride: int | None = None,
    length: int | None = None,
    batch_size: int | None = None,
) -> TextScore:
    """Score a text with a model. `tokenizer` is a transformers tokenizer; models/text.py makes one for raw bytes.

    `length` is the model's context unless given, 2048 tokens at the most, `stride` half of it. A smaller stride costs
    more and gives every token more context. `batch_size` windows are read at a time: four unless given, or fewer if
    their logits would be more than 2**28 numbers.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if length is None:
        if context is None:
            raise BadRequestError(f"a {config.model_type} model has no longest context; set a length")
        length = min(context, LONGEST_DEFAULT)
    stride = max(1, length // 2) if stride is None else stride
    if length < 1 or (context is not None and length > context):
        most = "be at least 1" if context is None else f"lie between 1 and the model's context of {context}"
        raise BadRequestError(f"length {length} was given; it must {most}")
    if not 1 <= stride <= length:
        raise BadRequestError(f"stride {stride} was given; it must lie between 1 and the length of {length}")
    if batch_size is None:
        batch_size = max(1, min(MOST_WINDOWS, MOST_LOGITS // (length * config.vocab_size)))
    if batch_size < 1:
        raise BadRequestError(f"batch size {batch_size} was given; at least 1 is needed")
    ids = encode(tokenizer, text, config.vocab_size)
    if len(ids) < 2:
        raise BadRequestError(f"the text has {len(ids)} tokens; at least 2 are needed, as the first is not scored")
    tokens = len(ids) - 1
    scored_bytes = _scored_bytes(tokenizer, text, ids)
    nats = _total_nats(model, torch.tensor(ids), windows(tokens, length, stride), batch_size)
    loss = nats / tokens
    if not loss < LARGEST_LOSS:  # NaN too
        raise BadFileError(f"the loss is {loss}, not a usable number; are the model's weights broken?")
    return TextScore(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=nats / math.log(2) / scored_bytes,
        tokens=tokens,
        bytes=scored_bytes,
        length=length,
        stride=stride,
    )


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """The windows that together score `tokens` tokens once each."""
    start = scored_from = 0
    while scored_from < tokens:
        end = min(start + length, tokens)
        yield Window(start, scored_from, end)
        start, scored_from = start + stride, end


def _scored_bytes(tokenizer: Any, text: str | bytes, ids: list[int]) -> int:
    """The bytes of a text without those of its first token, which has nothing before it to be predicted from."""
    if reads_bytes(tokenizer):
        return len(ids) - 1
    first = tokenizer.decode(ids[:1], skip_special_tokens=True)
    if first.endswith("\ufffd"):  # the first byte or bytes of a character: count one
        first = first[:-1] + " "
    return max(1, len(as_text(text).encode()) - len(first.encode()))


@torch.no_grad()
def _total_nats(model: PreTrainedModel, ids: Tensor, all_windows: Iterator[Window], batch_size: int) -> float:
    nats = 0.0
    with evaluating(model):
        for batch in _batches(all_windows, batch_size):
            inputs = torch.stack([ids[window.start : window.end] for window in batch])  # [batch, length]
            logits = model(inputs.to(model.device), use_cache=False).logits
            for window, row in zip(batch, logits, strict=True):
                targets = ids[window.scored_from + 1 : window.end + 1].to(row.device)
                scored = row[window.scored_from - window.start :]  # [scored, vocabulary]
                scored = scored.to(torch.promote_types(scored.dtype, torch.float32))
                nats += F.cross_entropy(scored, targets, reduction="none").double().sum().item()
    return nats


def _batches(all_windows: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    """Windows of one length together, so that nothing is padded: only the last is shorter."""
    for _, same in groupby(all_windows, key=lambda window: window.end - window.start):
        batch: list[Window] = []
        for window in same:
            batch.append(window)
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch
