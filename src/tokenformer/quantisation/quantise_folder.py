"""Quantisation of a saved model: a model folder in, a quantised one out.

    tokenformer quantize models/mine models/mine-int8 --to int8 --text book.txt

The request is checked before a weight is read, and what `score` says of the model before and after is shown before
anything is written.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ..errors import BadRequestError
from ..io import check_new, check_outside, write_new
from ..models import TokenFormerBaseConfig
from ..models.loading import empty_model, read_config, read_model
from ..models.side_files import copy_beside_weights
from ..pattention import pattention_layers
from ..pattention.quantised import Bits, QuantisedPattention
from .quantise import check_bits, check_quantisable, output_layers, quantize


@dataclass(frozen=True)
class FolderQuantisation:
    """Bytes of all tokens and of the whole model, before and after; the scores, if there were any."""

    token_bytes: tuple[int, int]
    model_bytes: tuple[int, int]
    scores: tuple[float, float] | None


def quantise_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    to: str,
    *,
    output_layer: bool = False,
    score: Callable[[Any], float] | None = None,
    show: Callable[[FolderQuantisation], None] = lambda found: None,
    trust_remote_code: bool = False,
) -> FolderQuantisation:
    """Quantise the model in `source` into the new folder `target`; its tokenizer or image processor is copied too."""
    source, target = Path(source), Path(target)
    check_new(target)
    check_outside(target, source)
    check_bits(to, "quantize")
    config = read_config(source, TokenFormerBaseConfig, or_adopted=True, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise BadRequestError(f"quantize: {source} is quantised already; give the folder that it was made from")
    empty = empty_model(config)
    check_quantisable(empty, cast(Bits, to))
    if output_layer:
        output_layers(empty)  # which may refuse
    model = read_model(source, trust_remote_code=trust_remote_code)
    before = (token_bytes(model), model.get_memory_footprint())
    first = None if score is None else score(model)
    quantize(model, to, output_layer=output_layer)
    after = (token_bytes(model), model.get_memory_footprint())
    scores = None if score is None or first is None else (first, score(model))
    found = FolderQuantisation((before[0], after[0]), (before[1], after[1]), scores)
    show(found)
    with write_new(target) as (partial,):
        model.save_pretrained(partial)
        copy_beside_weights(source, partial)
    return found


def token_bytes(model: nn.Module) -> int:
    """What the tokens of a model take, with their scales."""
    total = 0
    for _, layer in pattention_layers(model):
        tensors: list[Tensor | None] = [layer.key_tokens, layer.value_tokens, layer.key_bias]
        if isinstance(layer, QuantisedPattention):
            tensors += layer.quantised.buffers()
        total += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total
