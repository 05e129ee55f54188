"""Parameters, FLOPs, KV cache and training memory of a model. Enters: a configuration. Leaves: whole numbers.

Every kind is matrices in blocks, attention between tokens, an embedding and an output layer: see shapes.py.

Memory is an estimate. What the blocks keep is worked out from what autograd keeps of the fused Pattention, and of
transformers' GPT-NeoX and ViT with sdpa, the exact GELU and no dropout; tests hold it to within 2 % of that. The few
numbers per row that norms and attention keep as statistics are left out.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import BadRequestError, did_you_mean
from ..models.config import TokenFormerBaseConfig, TokenFormerConfig
from ..models.language import LOSS_CHUNK
from .shapes import Config, LanguageConfig, Shape, VisionConfig, refuse_below, shape_of, shape_of_images, shape_of_text

# Numbers that an optimizer keeps for each parameter, of tokens and of all others. Muon has AdamW for the others.
OPTIMIZER_STATES = {"adamw": (2, 2), "muon": (1, 2), "sgd": (0, 0)}


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model holds, by role. `head` is 0 when the output layer is tied to the embedding.

    In a GPT-NeoX, qkv is query_key_value, out is attention.dense, ffn is both layers of the MLP, each with its bias; in
    a ViT likewise. For images, the embedding is the patches' projection, the class token and the positions.
    """

    embedding: int
    qkv: int
    out: int
    ffn: int
    norm: int
    head: int

    @property
    def non_embedding(self) -> int:
        """Without the embedding and the output layer."""
        return self.qkv + self.out + self.ffn + self.norm

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head


def parameters(config: Config) -> Parameters:
    """The parameters of a model, counted as the model holds them: keys and values are two matrices."""
    shape = shape_of(config)
    return Parameters(
        embedding=shape.embedding,
        **{role: numbers + shape.biases.get(role, 0) for role, numbers in shape.matrices.items()},
        norm=shape.norms + 2 * shape.width,
        head=shape.head,
    )


def forward_flops_per_token(config: LanguageConfig, length: int) -> int:
    """FLOPs of one forward pass over sequences of `length` tokens, logits included, divided by the tokens."""
    refuse_below(0, length=length)
    shape = shape_of_text(config)
    return block_flops(shape, length) + 2 * shape.outputs * shape.width


def training_flops_per_token(config: LanguageConfig, length: int) -> int:
    """Three times the forward pass: backward takes two products for each of forward's.

    What gradient checkpointing or a fused attention computes a second time is not counted.
    """
    return 3 * forward_flops_per_token(config, length)


def forward_flops_per_image(config: VisionConfig, image_size: int | None = None) -> int:
    """FLOPs of one forward pass over an image, of the model's size or of another; patches and logits included."""
    shape, images = shape_of_images(config, image_size)
    ends = images.patches * images.patch_numbers + shape.outputs
    return images.tokens * block_flops(shape, images.tokens) + 2 * ends * shape.width


def training_flops_per_image(config: VisionConfig, image_size: int | None = None) -> int:
    """Three times the forward pass, without the gradient of the pixels, which is not computed."""
    shape, images = shape_of_images(config, image_size)
    patches = 2 * images.patches * images.patch_numbers * shape.width
    return 3 * forward_flops_per_image(config, image_size) - patches


def tokens_per_image(config: VisionConfig, image_size: int | None = None) -> int:
    """Rows that an image becomes: patches, and the class token if there is one."""
    return shape_of_images(config, image_size)[1].tokens


def kv_cache_bytes(config: LanguageConfig, length: int, batch: int = 1, bytes_per_number: int = 2) -> int:
    """The keys and values of `length` tokens, which generation keeps. Parameter tokens add nothing to it."""
    refuse_below(0, length=length)
    refuse_below(1, batch=batch, bytes_per_number=bytes_per_number)
    shape = shape_of_text(config)
    return 2 * shape.layers * shape.width * length * batch * bytes_per_number


def block_flops(shape: Shape, length: int) -> int:
    """FLOPs per token of all blocks in one forward pass over `length` tokens."""
    return 2 * sum(shape.matrices.values()) + shape.layers * 4 * length * shape.width


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training step needs at its peak, by what they are for."""

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
    the logits with their log-probabilities and gradients, of LOSS_CHUNK rows with `chunked_loss`, which is on by
    default for a TokenFormer language model and off for the others, whose classes have none. Not counted:
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
    counted = parameters(config)
    of_tokens, of_others = OPTIMIZER_STATES[optimizer]
    tokens = counted.non_embedding - counted.norm if isinstance(config, TokenFormerBaseConfig) else 0
    states = of_tokens * tokens + of_others * (counted.total - tokens)
    weights = counted.total * bytes_per_number
    logit_rows = min(rows, LOSS_CHUNK) if chunked_loss else rows
    return TrainingMemory(
        weights=weights,
        gradients=weights,
        optimizer=states * bytes_per_number,
        activations=rows * kept,
        logits=logit_rows * shape.outputs * (bytes_per_number + 2 * max(4, bytes_per_number)),
    )


def activation_bytes_per_token(
    config: LanguageConfig, bytes_per_number: int = 4, *, gradient_checkpointing: bool = False
) -> int:
    """Bytes that autograd keeps of a forward pass for one token, the logits left out.

    The same at every length, with attention that never holds its [length, length] weights. With
    `gradient_checkpointing` every block keeps only its input, and one block at a time is computed again.
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
