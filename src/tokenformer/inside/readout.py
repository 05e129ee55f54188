"""From the stream of hidden states to logits: what a value token promotes in the vocabulary.

Enters: a model with a stack of blocks, a final norm and an output layer: ours, and the hosts of models/blocks.py,
adopted or not. Leaves: `Readout`, which has the names of what writes to the stream, and reads vectors of it as logits.

The final norm is taken at a fixed scale, that of a row: it is then linear, and what tokens add to a logit adds up.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadRequestError
from ..models import growth_records
from ..models.adopted import blocks_of
from ..models.blocks import Blocks, host_blocks
from .places import bare


@dataclass(frozen=True)
class Readout:
    """How the stream becomes logits.

    writers: the names of the modules that add to the stream. norm: the final one. rows: of the output layer, [V, d].
    """

    writers: tuple[str, ...]
    norm: Any
    rows: Tensor
    centred: bool

    def directions(self, targets: Tensor) -> Tensor:
        """What a vector of the stream is multiplied with to give these logits, but for the norm's scale: [..., d]."""
        rows = self.rows[targets].float()
        if getattr(self.norm, "weight", None) is not None:
            rows = rows * self.norm.weight.detach().float()
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows

    def scale(self, stream: Tensor) -> Tensor:
        """What the norm divides rows of the stream by: [..., 1]."""
        stream = stream.float()
        if self.centred:
            stream = stream - stream.mean(-1, keepdim=True)
        return (stream.square().mean(-1, keepdim=True) + _eps(self.norm)).sqrt()

    def logits(self, vectors: Tensor) -> Tensor:
        """What vectors [n, d] of the stream add to every logit, at a scale of 1: [n, V]."""
        return vectors.float() @ self.directions(torch.arange(len(self.rows), device=self.rows.device)).mT


def find_readout(model: nn.Module, what: str) -> Readout:
    """The readout of a model; a one-line error if it has none that is known. `what` is how errors begin."""
    model = bare(model)
    base = getattr(model, "base_model", None)
    head = _head(model)
    if base is None or head is None or base is model:
        raise BadRequestError(
            f"{what}: a {type(model).__name__} has no output layer that reads single positions; give a causal language "
            "model, or a classifier of images with a class token"
        )
    norms = [module for module in base.children() if _is_norm(module)]
    if not norms:
        raise BadRequestError(f"{what}: no final norm was found in a {type(base).__name__}")
    names = {id(module): name for name, module in model.named_modules()}
    writers = _blocks(model, what)
    stack = base.get_submodule(writers.stack)
    named = tuple(names[id(module)] for block in stack for module in writers.writers_in(block))
    return Readout(named, norms[-1], head.weight.detach(), isinstance(norms[-1], nn.LayerNorm))


def _head(model: Any) -> Any:
    """The output layer over the vocabulary, or over the classes of images, which are read off a class token."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None and getattr(model, "main_input_name", "") == "pixel_values":
        pooled = getattr(model.config, "pooling", "cls") != "cls"
        head = None if pooled else getattr(model, "classifier", None)
    return head if isinstance(head, nn.Linear) else None


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def _eps(norm: Any) -> float:
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0))
    return torch.finfo(norm.weight.dtype).eps if eps is None else float(eps)


def _blocks(model: Any, what: str) -> Blocks:
    for part, record in growth_records(model):
        return blocks_of(part, record)
    try:
        return host_blocks(model.config.get_text_config())
    except BadRequestError as error:
        raise BadRequestError(
            f"{what}: it is not known what writes to the stream of a {model.config.model_type} model"
        ) from error
