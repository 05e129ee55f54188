"""What a model computes for inputs that anybody can make: random ids, or random images.

Enters: any transformers model that takes ids or pixels. Leaves: inputs for it; its logits or hidden states for them,
in float64. Used to see that two models compute the same.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadRequestError, BadResultError, one_line
from .base import TokenFormerPreTrainedModel

LENGTH = 64  # tokens in a sequence, at most

# How far apart two models may be that should compute the same, relative to the largest entry: the promise of
# docs/growth-mathematics.md and docs/adopting.md. In half precision every new weight is rounded.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF_TOLERANCE = 5e-2


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that counts as rounding."""
    return TOLERANCES.get(dtype, HALF_TOLERANCE)


def sample_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A random sequence, or two random images; always the same ones for the same shape of model.

    One sequence, because models that classify sequences take no more without a padding token.
    """
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    name = model.main_input_name
    if name == "input_ids" and hasattr(config, "vocab_size"):
        # Not all models have a table of positions.
        positions = getattr(config, "max_position_embeddings", None) or LENGTH + 2
        length = min(LENGTH, max(1, positions - 2))  # RoBERTa's positions start at 2
        ids = torch.randint(config.vocab_size, (1, length), generator=generator)
        return {name: ids.to(model.device)}
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.randn(2, config.num_channels, height, width, generator=generator)
        return {name: pixels.to(model.device, model.dtype)}
    raise BadRequestError(
        f"{type(model).__name__} takes {name}; random inputs are made for input_ids and pixel_values of a known size"
    )


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """The model is in evaluation mode inside the `with` block."""
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model is in that mode inside the `with` block; afterwards each of its modules is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def sample_output(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """The first thing that the model returns for `inputs` in evaluation mode: logits, or hidden states."""
    with evaluating(model):
        return call_once(model, inputs).double()


def call_once(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """The first thing that the model returns for `inputs`, or a one-line error if it cannot take them."""
    try:
        return model(**inputs, return_dict=True)[0]
    except Exception as error:  # a model may raise anything when it is given inputs that it cannot take
        if isinstance(model, TokenFormerPreTrainedModel):  # whose inputs are made here
            raise
        raise BadRequestError(
            f"{type(model).__name__} could not be called with {', '.join(inputs)} to compare before and after: "
            f"{one_line(error)}; give adopt(inputs=…) what fits, or do not verify"
        ) from error


def checked_difference(
    model: PreTrainedModel, inputs: Mapping[str, Any], before: Tensor, *, exact: bool, tolerance: float, said: str
) -> float:
    """How far the output for `inputs` has moved from `before`. If it must be `exact` and is not, an error: `said`."""
    difference = relative_difference(sample_output(model, inputs), before)
    # Written so that NaN fails too.
    if exact and not difference <= tolerance:
        raise BadResultError(
            f"{said} by {difference:.2g} of the largest entry, and {tolerance:g} is allowed; nothing was written"
        )
    return difference


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest entry of `theirs` unless that is zero."""
    difference, largest = (ours.double() - theirs.double()).abs().max(), theirs.double().abs().max()
    return (difference / largest if largest > 0 else difference).item()
