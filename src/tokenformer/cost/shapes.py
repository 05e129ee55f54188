"""What the formulas need to know about a model. Enters: a configuration, ours or a Transformer's. Leaves: a Shape.

The four kinds differ in the matrices of their blocks, in what comes before and after the blocks, and in what autograd
keeps; a GPT-NeoX or a ViT may have adopted layers, which are counted here too. counts.py knows one kind of model, the
Shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GPTNeoXConfig, ViTConfig

from ..errors import BadRequestError
from ..models.adopted import Adopted, record_of
from ..models.config import TokenFormerBaseConfig, TokenFormerConfig, TokenFormerVisionConfig

LanguageConfig = TokenFormerConfig | GPTNeoXConfig
VisionConfig = TokenFormerVisionConfig | ViTConfig
Config = LanguageConfig | VisionConfig

# Numbers in fp32 or wider that a Pattention keeps for each row, besides its scores.
ROW_STATS = 3


@dataclass(frozen=True)
class Images:
    """The images of a vision model: sides in pixels, channels, tokens besides the patches, and how it pools."""

    height: int
    width: int
    patch_height: int
    patch_width: int
    channels: int
    class_tokens: int
    pooling: str

    @property
    def patches(self) -> int:
        return (self.height // self.patch_height) * (self.width // self.patch_width)

    @property
    def tokens(self) -> int:
        """Rows that an image becomes."""
        return self.class_tokens + self.patches

    @property
    def patch_numbers(self) -> int:
        return self.channels * self.patch_height * self.patch_width

    @property
    def pixels(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Shape:
    """A model: `layers` blocks of `width`, an embedding before them, an output layer after them."""

    width: int
    layers: int
    matrices: dict[str, int]  # numbers in the matrices of all blocks, by role; each is multiplied once per token
    biases: dict[str, int]  # numbers in their biases, by role
    norms: int  # numbers in their norms
    kept: int  # numbers that autograd keeps of them for each token
    kept_wide: int  # numbers on top of those, which are fp32 or wider
    embedding: int  # numbers in the embedding
    outputs: int  # logits for each row: the vocabulary, or the classes
    head: int  # numbers that the output layer holds on its own
    images: Images | None = None


def refuse_below(least: int, **given: int | None) -> None:
    """Refuse a number that no model or batch can have; None is not checked."""
    for name, value in given.items():
        if value is not None and value < least:
            raise BadRequestError(f"{name}={value} was given; at least {least} is needed")


def shape_of(config: Config) -> Shape:
    """The shape of any of the four kinds; any other is refused."""
    if not isinstance(config, TokenFormerConfig | GPTNeoXConfig | TokenFormerVisionConfig | ViTConfig):
        kind = getattr(config, "model_type", type(config).__name__)
        raise BadRequestError(
            f"the cost of a {kind} cannot be counted; give a TokenFormerConfig or a GPTNeoXConfig, or for images a "
            "TokenFormerVisionConfig or a ViTConfig"
        )
    block = _tokens(config) if isinstance(config, TokenFormerBaseConfig) else _linears(config)
    ends = _of_images(config) if isinstance(config, TokenFormerVisionConfig | ViTConfig) else _of_text(config)
    layers = config.num_hidden_layers
    roles = {name: {role: layers * count for role, count in block.pop(name).items()} for name in ("matrices", "biases")}
    whole: dict[str, Any] = {**roles, **{name: layers * count for name, count in block.items()}, **ends}
    if isinstance(config, TokenFormerBaseConfig):
        _add_groups(whole, config)
    shape, record = Shape(width=config.hidden_size, layers=layers, **whole), record_of(config)
    return shape if record is None else _adopted(shape, config, record)


def shape_of_text(config: LanguageConfig) -> Shape:
    """The shape of a language model; a vision model is refused."""
    shape = shape_of(config)
    if shape.images is not None:
        raise BadRequestError(f"a {config.model_type} is counted per image, not per token; use …_per_image")
    return shape


def shape_of_images(config: VisionConfig, image_size: int | None = None) -> tuple[Shape, Images]:
    """The shape of a vision model, for images of another size if one is given; a language model is refused."""
    shape = shape_of(config)
    if shape.images is None:
        raise BadRequestError(f"a {config.model_type} does not take images; use …_per_token")
    images = shape.images
    if image_size is not None:
        if image_size < max(images.patch_height, images.patch_width):
            raise BadRequestError(f"image_size={image_size} was given; a patch has {images.patch_height} pixels")
        images = replace(images, height=image_size, width=image_size)
    return shape, images


def _tokens(config: TokenFormerBaseConfig) -> dict[str, Any]:
    """A block of Pattentions: two matrices each, no biases."""
    width, counts = config.hidden_size, config.num_tokens
    pattentions = [(len(names), counts[role]) for role, names in config.token_roles.items()]
    scores = 0 if config.pattention_recompute else sum(layers * tokens for layers, tokens in pattentions)
    return {
        "matrices": {role: len(names) * 2 * counts[role] * width for role, names in config.token_roles.items()},
        "biases": {},
        "norms": 4 * width if config.parametric_norm else 0,
        # The inputs of the two norms and what they give; query, key, value and output of the attention; the scores.
        "kept": 8 * width + scores,
        "kept_wide": ROW_STATS * sum(layers for layers, _ in pattentions),
    }


def _add_groups(whole: dict[str, Any], config: TokenFormerBaseConfig) -> None:
    """Count the token groups that are part of a model, which are two matrices beside a layer each."""
    roles = {name: role for role, names in config.token_roles.items() for name in names}
    for group in config.token_groups or []:
        for layer, count in group["layers"].items():
            whole["matrices"][roles[layer.rpartition(".")[2]]] += 2 * count * config.hidden_size
            whole["kept"] += 0 if config.pattention_recompute else count
            whole["kept_wide"] += ROW_STATS


def _linears(config: GPTNeoXConfig | ViTConfig) -> dict[str, Any]:
    """A block of a Transformer."""
    width, inner = config.hidden_size, config.intermediate_size
    if isinstance(config, ViTConfig):
        qkv_bias, out_bias = 3 * width if config.qkv_bias else 0, width
        # As in a block of Pattentions.
        attention = 8
    else:
        qkv_bias, out_bias = (3 * width, width) if config.attention_bias else (0, 0)
        # The input of the norms, which a parallel residual lets them share, and what they give; query, key and value in
        # one array, of which value is a view; query and key once more, rotated; the output of the attention, and a copy
        # of it with its heads side by side.
        attention = (3 if config.use_parallel_residual else 4) + 3 + 2 + 2
    return {
        "matrices": {"qkv": 3 * width**2, "out": width**2, "ffn": 2 * width * inner},
        "biases": {"qkv": qkv_bias, "out": out_bias, "ffn": inner + width},
        "norms": 4 * width,
        # What enters and what leaves the MLP's activation comes on top.
        "kept": attention * width + 2 * inner,
        "kept_wide": 0,
    }


def _adopted(shape: Shape, host: Any, record: Adopted) -> Shape:
    """A GPT-NeoX or a ViT with Pattentions in place of linears, which may differ from block to block."""
    matrices, biases, kept, wide = dict(shape.matrices), dict(shape.biases), shape.kept, shape.kept_wide
    roles = {name: "ffn" if ".mlp." in name else "qkv" for name in record.layers}
    biases |= dict.fromkeys(roles.values(), 0)
    for name, layer in record.layers.items():
        tokens, role = layer["num_tokens"], roles[name]
        matrices[role] += layer_numbers(layer) - layer["replaced"]
        biases[role] += layer_biases(layer)
        # In an FFN the scores replace what enters and what leaves the activation.
        kept += tokens - (2 * host.intermediate_size if role == "ffn" else 0)
        wide += ROW_STATS
    # An EqualLength has no weights, and keeps its rows in fp32 after it moved them, instead of its input, which the
    # norms of a parallel residual shared.
    replaced = len(record.norms)
    shared = shape.layers if replaced and getattr(host, "use_parallel_residual", False) else 0
    return replace(
        shape,
        matrices=matrices,
        biases=biases,
        norms=shape.norms - replaced * 2 * shape.width,
        kept=kept - (replaced - shared) * shape.width,
        kept_wide=wide + replaced * shape.width,
    )


def _of_text(config: LanguageConfig) -> dict[str, Any]:
    rows = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else rows
    return {"embedding": rows, "outputs": config.vocab_size, "head": head}


def _of_images(config: VisionConfig) -> dict[str, Any]:
    ours = isinstance(config, TokenFormerVisionConfig)
    images = Images(
        *_sides(config.image_size),
        *_sides(config.patch_size),
        channels=config.num_channels,
        class_tokens=1 if not ours or config.pooling == "cls" else 0,
        pooling=config.pooling if ours else "cls",
    )
    width, classes = config.hidden_size, config.num_labels or 0
    # A ViT's class token has a position too.
    positions = images.tokens
    if ours:
        positions = (config.position_grid or 0) ** 2 if config.position_embedding == "learned" else 0
    return {
        "embedding": width * (images.patch_numbers + 1 + images.class_tokens + positions),
        "outputs": classes,
        "head": width * classes + classes,
        "images": images,
    }


def _sides(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@dataclass(frozen=True)
class LayerCosts:
    """The adopted layers of a model: their parameters, numbers in their matrices, and FLOPs per token.

    `replaced_…` is the same for the linears that they replaced. `cost.parameters` counts the whole model, if it is a
    GPT-NeoX or a ViT.
    """

    parameters: int
    numbers: int
    flops_per_token: int
    replaced_numbers: int
    replaced_flops_per_token: int


def layer_numbers(layer: Mapping[str, Any]) -> int:
    """The numbers in a Pattention's keys and values."""
    return layer["num_tokens"] * (layer["d_in"] + layer["d_out"])


def layer_biases(layer: Mapping[str, Any]) -> int:
    """The numbers in its biases, if it has them."""
    return layer["num_tokens"] * layer["key_bias"] + layer["d_out"] * layer["bias"]


def layer_parameters(layer: Mapping[str, Any]) -> int:
    """All of them."""
    return layer_numbers(layer) + layer_biases(layer)


def adopted_layers(record: Adopted) -> LayerCosts:
    """The costs of all adopted layers together."""
    layers = list(record.layers.values())
    replaced = sum(layer["replaced"] for layer in layers)
    numbers = sum(map(layer_numbers, layers))
    return LayerCosts(
        parameters=sum(map(layer_parameters, layers)),
        numbers=numbers,
        flops_per_token=2 * numbers,
        replaced_numbers=replaced,
        replaced_flops_per_token=2 * replaced,
    )
