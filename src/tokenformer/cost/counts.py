"""Parameters, FLOPs and KV cache of a model. Enters: a configuration. Leaves: whole numbers.

Every kind is matrices in blocks, attention between tokens, an embedding and an output layer: see shapes.py.
"""

from dataclasses import dataclass

from .shapes import Config, LanguageConfig, Shape, VisionConfig, refuse_below, shape_of, shape_of_images, shape_of_text


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model holds, by role. `head` is 0 when the output layer is tied to the embedding.

    Of a GPT-NeoX, qkv is query_key_value, out is attention.dense, ffn is both layers of the MLP, each with its bias; of
    a ViT alike. Of images, the embedding is the patches' projection, the class token and the positions.
    """

    embedding: int
    qkv: int
    out: int
    ffn: int
    norm: int
    head: int

    @property
    def non_embedding(self) -> int:
        """Without the embedding and without an output layer of its own."""
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
    """Three times the forward pass, without the gradient of the pixels, which nobody asks for."""
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
    """FLOPs a token of all blocks in one forward pass over `length` tokens."""
    return 2 * sum(shape.matrices.values()) + shape.layers * 4 * length * shape.width
