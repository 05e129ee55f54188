"""A TokenFormer beside a Transformer with as many parameters and layers: a GPT-NeoX or a ViT with an FFN four times as
wide as the model.

Enters: the configuration of a TokenFormer, or a number of parameters. Leaves: the Transformer that matches it; the
length from which the TokenFormer is cheaper, and by how much it is at one length or on images.
"""

import math
from collections.abc import Iterable
from typing import Any

from transformers import GPTNeoXConfig, ViTConfig

from ..errors import BadRequestError
from ..models.config import TokenFormerConfig, TokenFormerVisionConfig
from .counts import forward_flops_per_image, forward_flops_per_token, parameters
from .shapes import LanguageConfig, VisionConfig, refuse_below, shape_of_images, shape_of_text

HEAD = 64  # the usual width of a head
WITHIN = 0.02  # of the parameters asked for


def neox_parameters(width: float, layers: int, vocab_size: int, *, tied: bool = True) -> float:
    """Matrices, biases and norms of a GPT-NeoX whose FFN is four times as wide as the model."""
    return _parameters(width, layers, (1 if tied else 2) * vocab_size)


def neox_width(total: float, layers: int, vocab_size: int, *, tied: bool = True) -> float:
    """The width, a real number, at which it has `total` parameters."""
    return _width(total, layers, (1 if tied else 2) * vocab_size)


def _parameters(width: float, layers: int, rows: int) -> float:
    """The parameters of a Transformer with `rows` · width numbers outside of its blocks and final norm."""
    return rows * width + layers * (12 * width**2 + 13 * width) + 2 * width


def _width(total: float, layers: int, rows: int) -> float:
    """The positive root of _parameters − total."""
    square, linear = 12 * layers, rows + 13 * layers + 2
    return 2 * total / (linear + math.sqrt(linear**2 + 4 * square * total))


def equal_neox(
    config_or_parameters: LanguageConfig | float,
    *,
    layers: int | None = None,
    vocab_size: int | None = None,
    heads: int | None = None,
    tie_word_embeddings: bool | None = None,
    max_position_embeddings: int | None = None,
) -> GPTNeoXConfig:
    """The GPT-NeoX that has as many parameters, within 2 %, and an FFN four times as wide as the model.

    Given a configuration, whatever you do not name is taken from it: depth, vocabulary, tied embedding, context, rotary
    share, special tokens, attention kernel. Given a number, name `layers` and `vocab_size`; the embedding is tied.

    Of the widths that fit, the one that suits the processor best (a multiple of 16, else of 8, …; then heads of a
    multiple of 8, else of 4, …), then the one whose heads are nearest to 64. Heads are 48 to 80 wide, or any width from
    8 on if none of those fits. Rotary embedding needs an even number of dimensions.
    """
    refuse_below(1, layers=layers, vocab_size=vocab_size, heads=heads, max_position_embeddings=max_position_embeddings)
    more: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if isinstance(config_or_parameters, int | float):
        wanted = config_or_parameters
        tied = True if tie_word_embeddings is None else tie_word_embeddings
    else:
        config = config_or_parameters
        wanted, layers = parameters(config).total, layers or config.num_hidden_layers
        vocab_size = vocab_size or config.vocab_size
        tied = config.tie_word_embeddings if tie_word_embeddings is None else tie_word_embeddings
        max_position_embeddings = max_position_embeddings or config.max_position_embeddings
        more = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        more |= {"rope_parameters": dict(config.rope_parameters or {})}
        more |= {"attn_implementation": config._attn_implementation}
    if wanted <= 0 or not layers or not vocab_size:
        given = f"{wanted:,.0f} parameters, layers={layers}, vocab_size={vocab_size}"
        raise BadRequestError(f"equal_neox was given {given}; all three must be given and be above 0")
    rotated = more.get("rope_parameters", {}).get("partial_rotary_factor", 0.25)
    named = f"GPT-NeoX of {layers} layers, {heads or 'any number of'} heads and a vocabulary of {vocab_size:,}"
    heads, head = _heads(wanted, layers, (1 if tied else 2) * vocab_size, rotated, heads, named)
    return GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=heads * head,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * heads * head,
        max_position_embeddings=max_position_embeddings or 2048,
        tie_word_embeddings=tied,
        **more,
    )


def equal_vit(config: VisionConfig, *, layers: int | None = None, heads: int | None = None) -> ViTConfig:
    """The ViT that has as many parameters, classifier included, within 2 %, and an MLP four times as wide as the model.

    Images, patches, labels and attention kernel are as in `config`, and depth too unless it is named. The width is
    chosen as by `equal_neox`. A ViT always has a class token and learned positions.
    """
    refuse_below(1, layers=layers, heads=heads)
    rows, classes = _vit_rows(config)
    wanted, layers = parameters(config).total, layers or config.num_hidden_layers
    named = f"ViT of {layers} layers and {heads or 'any number of'} heads"
    heads, head = _heads(wanted - classes, layers, rows, None, heads, named)
    same = ("image_size", "patch_size", "num_channels", "id2label", "label2id", "problem_type")
    return ViTConfig(
        hidden_size=heads * head,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * heads * head,
        **{field: getattr(config, field) for field in same},
        **{"attn_implementation": config._attn_implementation},
    )


def _vit_rows(config: VisionConfig) -> tuple[int, int]:
    """What a ViT for the images and classes of `config` has outside of its blocks and final norm: numbers for each unit
    of width, and the classifier's biases."""
    shape, images = shape_of_images(config)
    patches, class_token, positions = images.patch_numbers + 1, 1, images.patches + 1
    return patches + class_token + positions + shape.outputs, shape.outputs


def _heads(
    wanted: float, layers: int, rows: int, rotated: float | None, given: int | None, named: str
) -> tuple[int, int]:
    """How many heads, and how wide each: of the widths that fit, the one that `equal_neox` prefers."""
    near = _width(wanted, layers, rows)
    widest = int(near * (1 + WITHIN)) + 1

    def off(width: int) -> float:
        return abs(_parameters(width, layers, rows) / wanted - 1)

    def fitting(sizes: Iterable[int]) -> list[tuple[int, int]]:
        usable = [head for head in sizes if rotated is None or int(head * rotated) in range(2, head + 1, 2)]
        shapes = [(heads, head) for head in usable for heads in ([given] if given else range(1, widest // head + 1))]
        return [(heads, head) for heads, head in shapes if off(heads * head) <= WITHIN]

    def preference(shape: tuple[int, int]) -> tuple[float, ...]:
        heads, head = shape
        return -math.gcd(heads * head, 16), -math.gcd(head, 8), abs(head - HEAD), off(heads * head)

    shapes = fitting(range(HEAD - 16, HEAD + 17, 2)) or fitting(range(8, widest + 1))
    if not shapes:
        raise BadRequestError(
            f"no {named} has {wanted:,.0f} parameters within {WITHIN:.0%}: it would be {near:.4g} wide; "
            "ask for other layers or heads"
        )
    return min(shapes, key=preference)


def crossing_length(config: TokenFormerConfig, peer: GPTNeoXConfig | None = None) -> int | None:
    """The first length at which `config` takes fewer FLOPs per token than `peer`, as it does at all greater lengths.

    Both take a + b · length FLOPs, b = 4 · layers · width: ours fewer beyond (a_ours − a_peer) / (b_peer − b_ours).
    Without a peer: the GPT-NeoX with as many parameters and layers, its width a real number. With tied embeddings both
    take 2 FLOPs for each number in a matrix, so a_ours − a_peer is twice the peer's surplus of biases and norms.

    0: at every length. None: at no length, because the peer's layers · width are no more than ours. Training is
    three times the forward pass and has the same crossing.
    """
    (ours, by_length), (theirs, their_by_length) = _flops_line(config), _peer_line(config, peer)
    more, saved = ours - theirs, their_by_length - by_length
    if more < 0 <= saved:
        return 0
    return int(more // saved) + 1 if saved > 0 else None


def flops_ratio(config: TokenFormerConfig, length: int, peer: GPTNeoXConfig | None = None) -> float:
    """FLOPs of the peer, by default as in `crossing_length`, over those of `config`; above 1 ours is cheaper."""
    theirs, their_by_length = _peer_line(config, peer)
    return (theirs + their_by_length * length) / forward_flops_per_token(config, length)


def image_flops_ratio(
    config: TokenFormerVisionConfig, image_size: int | None = None, peer: ViTConfig | None = None
) -> float:
    """FLOPs of the peer on an image over those of `config`; above 1 ours is cheaper.

    Without a peer: the ViT with as many parameters and layers, its width a real number.
    """
    ours = forward_flops_per_image(config, image_size)
    if peer is not None:
        return forward_flops_per_image(peer, image_size) / ours
    shape, images = shape_of_images(config, image_size)
    (rows, classes), tokens, layers = _vit_rows(config), images.patches + 1, shape.layers
    width = _width(parameters(config).total - classes, layers, rows)
    blocks = tokens * layers * (24 * width**2 + 4 * tokens * width)
    return (blocks + 2 * (images.patches * images.patch_numbers + classes) * width) / ours


def _flops_line(config: LanguageConfig) -> tuple[int, int]:
    """FLOPs per token at length 0, and how many each token of length adds."""
    shape = shape_of_text(config)
    return forward_flops_per_token(config, 0), 4 * shape.layers * shape.width


def _peer_line(config: TokenFormerConfig, peer: GPTNeoXConfig | None) -> tuple[float, float]:
    if not isinstance(config, TokenFormerConfig):
        kind = getattr(config, "model_type", type(config).__name__)
        raise BadRequestError(f"a {kind} was given to compare with a GPT-NeoX; give a TokenFormerConfig")
    if peer is not None:
        return _flops_line(peer)
    layers, vocab_size = config.num_hidden_layers, config.vocab_size
    width = neox_width(parameters(config).total, layers, vocab_size, tied=config.tie_word_embeddings)
    return 2 * (12 * layers * width**2 + vocab_size * width), 4 * layers * width
