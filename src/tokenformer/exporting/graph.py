"""What of a model is exported: a function of tensors, whose sizes may change from call to call.

Enters: a model of transformers, with the token groups that are on. Leaves: a `Graph`: that function, inputs to trace it
with, which of their sizes are free, and other inputs, with which the exported program is compared.

A language model that generates becomes one function for prompts and for decoding. It takes the cache as tensors and
returns it one step longer; a prompt comes with a cache of length zero. The names are those of other exporters of
language models, so that their programs find what they look for.

    input_ids             [batch, length]
    attention_mask        [batch, total length], of the tokens in the cache and the new ones; 0 for padding
    position_ids          [batch, length]
    past_key_values.0.key [batch, heads, past length, width of a head], and .value, of every layer
    logits                [batch, length, vocabulary]
    present.0.key         [batch, heads, total length, width of a head], and .value, of every layer

Any other model takes what it takes, and returns all its tensors: logits, or hidden states.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import BadRequestError
from ..pattention.groups import switch_of

# A call: tensors by name, of the cache in two levels more.
Inputs = dict[str, Any]
Runner = Callable[[Inputs], dict[str, Any]]

BATCH, LENGTH, PAST, TOTAL = Dim("batch"), Dim("length"), Dim("past_length"), Dim("total_length")
# All different and none of them 1, so that the tracer cannot take one size for another, or for fixed.
SIZES = {"batch": 2, "past": 3, "length": 4}


class CachedStep(nn.Module):
    """A language model whose cache is tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: dict[str, dict[str, Tensor]],
    ) -> dict[str, Any]:
        cache = DynamicCache([(layer["key"], layer["value"]) for layer in past_key_values.values()])
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        layers = out.past_key_values.layers
        present = {str(i): {"key": layer.keys, "value": layer.values} for i, layer in enumerate(layers)}
        return {"logits": out.logits, "present": present}


class OneCall(nn.Module):
    """A model that is called once for an input: all tensors that it returns."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.more = {"use_cache": False} if "use_cache" in takes else {}

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        out = self.model(**inputs, **self.more, return_dict=True)
        return {name: value for name, value in out.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Graph:
    """A function to export. `cache`: heads and width of a head of every layer's cache; None if it has no cache."""

    module: nn.Module
    inputs: Inputs
    dims: Inputs
    cache: tuple[tuple[int, int], ...] | None
    model: PreTrainedModel

    def comparisons(self) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Inputs of other sizes than those it is traced with, each with the positions that count; None: all.

        Of a function with a cache those of prompts, whose cache is empty.
        """
        for batch, length in ((1, 1), (3, 6)):
            call = _prompt(self.model, batch, length) if self.takes_text else _images(self.model, batch)
            if not self.takes_text:
                yield call, None
                continue
            mask = call["attention_mask"]
            mask[0, : length // 3] = 0  # padding on the left, as for generating
            if self.cache is not None:
                call |= self.beside(mask, 0)
                call["past_key_values"] = self.empty_cache(batch)
            yield call, mask.bool()

    def next_step(self, call: Inputs, present: dict[str, Any]) -> Inputs:
        """After a call with a cache, the one with a further token for each row."""
        mask, batch = call["attention_mask"], call["input_ids"].shape[0]
        longer = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        ids = _ids(self.model, batch, 1, seed=2)
        return {"input_ids": ids, **self.beside(longer, mask.shape[1]), "past_key_values": present}

    def beside(self, mask: Tensor, past: int) -> Inputs:
        """Mask and positions of the tokens behind the first `past`; padding has position 0 and is counted for none."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:].contiguous()
        return {"attention_mask": mask, "position_ids": positions}

    def empty_cache(self, batch: int) -> dict[str, dict[str, Tensor]]:
        """The cache before the first token."""
        assert self.cache is not None
        like = next(self.model.parameters())
        return {
            str(i): {name: like.new_empty(batch, heads, 0, width) for name in ("key", "value")}
            for i, (heads, width) in enumerate(self.cache)
        }

    @property
    def takes_text(self) -> bool:
        return self.model.main_input_name == "input_ids"


def graph_of(model: PreTrainedModel) -> Graph:
    """The function of a model. Nothing of the model is changed."""
    _check(model)
    batch, past, length = SIZES["batch"], SIZES["past"], SIZES["length"]
    if model.main_input_name == "pixel_values":
        return Graph(OneCall(model), _images(model, batch), {"pixel_values": {0: BATCH}}, None, model)
    cache = _cache_of(model)
    if cache is None:
        text = {0: BATCH, 1: Dim.AUTO}  # up to whatever length the model has positions for
        dims = {"input_ids": text, "attention_mask": text}
        return Graph(OneCall(model), _prompt(model, batch, length), dims, None, model)
    inputs = _prompt(model, batch, past + length)
    inputs["input_ids"] = inputs["input_ids"][:, past:].contiguous()
    inputs["position_ids"] = torch.arange(past, past + length, device=model.device).repeat(batch, 1)
    like = next(model.parameters())
    inputs["past_key_values"] = {
        str(i): {name: like.new_zeros(batch, heads, past, width) for name in ("key", "value")}
        for i, (heads, width) in enumerate(cache)
    }
    dims = {
        "input_ids": {0: BATCH, 1: LENGTH},
        "attention_mask": {0: BATCH, 1: TOTAL},
        "position_ids": {0: BATCH, 1: LENGTH},
        "past_key_values": pytree.tree_map(lambda _: {0: BATCH, 2: PAST}, inputs["past_key_values"]),
    }
    return Graph(CachedStep(model), inputs, dims, cache, model)


def _check(model: PreTrainedModel) -> None:
    if model.main_input_name not in ("input_ids", "pixel_values"):
        raise BadRequestError(
            f"export: {type(model).__name__} takes {model.main_input_name}; models that take input_ids or pixel_values "
            "can be exported"
        )
    if model.device.type == "meta":
        raise BadRequestError("export: the model is on the meta device and has no numbers; load it first")
    switch = switch_of(model)
    if switch is not None and switch.rows is not None:
        raise BadRequestError(
            "export: every row of a batch has token groups of its own, and an exported model has the same for all; "
            "switch on those that it should have with use_tokens, and export one file for each choice"
        )


def _cache_of(model: PreTrainedModel) -> tuple[tuple[int, int], ...] | None:
    """Heads and width of a head of every layer's cache, by running the model once; None if it keeps none."""
    if not model.can_generate():
        return None
    with torch.no_grad():
        out = model(**_prompt(model, 1, 2), use_cache=True, return_dict=True)
    layers = getattr(out.get("past_key_values"), "layers", ())
    if not layers:
        return None
    if not all(isinstance(layer, DynamicLayer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise BadRequestError(f"export: {type(model).__name__} keeps a cache of {kinds}; keys and values are expected")
    return tuple((layer.keys.shape[1], layer.keys.shape[3]) for layer in layers)


def _prompt(model: PreTrainedModel, batch: int, length: int) -> Inputs:
    ids = _ids(model, batch, length, seed=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _ids(model: PreTrainedModel, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch, length), generator=generator).to(model.device)


def _images(model: PreTrainedModel, batch: int) -> Inputs:
    size, generator = model.config.image_size, torch.Generator().manual_seed(1)
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(batch, model.config.num_channels, height, width, generator=generator)
    return {"pixel_values": pixels.to(model.device, model.dtype)}
