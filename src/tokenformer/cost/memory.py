"""Memory of a training step, an estimate. Enters: a configuration and a batch. Leaves: bytes, by what they are for.

What the blocks keep is worked out from what autograd keeps of the fused Pattention, and of transformers' GPT-NeoX and
ViT with sdpa, the exact GELU and no dropout; tests hold it to within 2 % of that. The few numbers a row that norms and
attention keep as statistics are left out.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import BadRequestError, did_you_mean
from ..models.config import TokenFormerConfig
from ..models.language import LOSS_CHUNK
from .counts import parameters
from .shapes import Config, LanguageConfig, Shape, VisionConfig, refuse_below, shape_of, shape_of_images, shape_of_text

# Numbers that an optimizer keeps for each parameter.
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training step needs at its fullest, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def training_memory(
    config: Config,
    batch: int,
    length: int | None = None,
    bytes_per_number: int = 4,
    *,
    image_size: int | None = None,
    optimizer: str = "adamw",
    gradient_checkpointing: bool = False,
    chunked_loss: bool | None = None,
) -> TrainingMemory:
    """An estimate of what a training step on one device needs, on sequences of `length` tokens or on images.

    Counted: weights, gradients and optimizer states, all of `bytes_per_number`; what autograd keeps of every block; and
    the logits with their log-probabilities and gradients, of LOSS_CHUNK rows with `chunked_loss`, which is on for a
    TokenFormer language model and off for the others, whose classes have none, unless you say otherwise. Not counted:
    the optimizer's and the kernels' scratch space, the allocator's gaps, the framework itself. Images have the model's
    size, or `image_size` pixels.
    """
    refuse_below(1, batch=batch, length=length, bytes_per_number=bytes_per_number)
    if optimizer not in OPTIMIZER_STATES:
        raise BadRequestError(f"optimizer={optimizer!r} is not known; {did_you_mean(optimizer, OPTIMIZER_STATES)}")
    shape = shape_of(config)
    if (length is None) != (shape.images is not None):
        needed = "length" if length is None else "image_size, if anything,"
        raise BadRequestError(
            f"training_memory of a {config.model_type} was given length={length}; give {needed} instead"
        )
    options: Any = {"bytes_per_number": bytes_per_number, "gradient_checkpointing": gradient_checkpointing}
    if length is None:
        rows = batch
        kept = activation_bytes_per_image(config, image_size=image_size, **options)  # type: ignore[arg-type]
    else:
        rows = batch * length
        kept = activation_bytes_per_token(config, **options)  # type: ignore[arg-type]
    if chunked_loss is None:
        chunked_loss = isinstance(config, TokenFormerConfig)
    weights = parameters(config).total * bytes_per_number
    logit_rows = min(rows, LOSS_CHUNK) if chunked_loss else rows
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=weights * OPTIMIZER_STATES[optimizer],
        activations=rows * kept,
        logits=logit_rows * shape.outputs * (bytes_per_number + 2 * max(4, bytes_per_number)),
    )


def activation_bytes_per_token(
    config: LanguageConfig, bytes_per_number: int = 4, *, gradient_checkpointing: bool = False
) -> int:
    """Bytes that autograd keeps of a forward pass for one token, the logits left out.

    The same at every length, with attention that never holds its [length, length] weights. With
    `gradient_checkpointing` every block keeps its input only, and one block at a time is computed again.
    """
    shape = shape_of_text(config)
    # The final norm and the output layer keep their inputs.
    return _kept_by_blocks(shape, bytes_per_number, gradient_checkpointing) + 2 * shape.width * bytes_per_number


def activation_bytes_per_image(
    config: VisionConfig,
    bytes_per_number: int = 4,
    *,
    gradient_checkpointing: bool = False,
    image_size: int | None = None,
) -> int:
    """Bytes that autograd keeps of a forward pass for one image, the logits left out."""
    shape, images = shape_of_images(config, image_size)
    blocks = images.tokens * _kept_by_blocks(shape, bytes_per_number, gradient_checkpointing)
    # The final norm keeps its input. The classifier keeps what was pooled, and of a class token, which is a slice, all
    # tokens with it. The projection of patches keeps the pixels.
    pooled = images.tokens if images.pooling == "cls" else 1
    return blocks + bytes_per_number * ((images.tokens + pooled) * shape.width + images.pixels)


def _kept_by_blocks(shape: Shape, bytes_per_number: int, gradient_checkpointing: bool) -> int:
    """Bytes that autograd keeps of all blocks for one token."""
    kept = shape.kept * bytes_per_number + shape.kept_wide * max(4, bytes_per_number)
    inputs = shape.layers * shape.width * bytes_per_number
    return inputs + kept // shape.layers if gradient_checkpointing else kept
