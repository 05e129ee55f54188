"""A TokenFormer beside a Transformer of as many parameters: a GPT-NeoX of the same depth, its FFN four times as wide.

Enters: the configuration of a TokenFormer, or a number of parameters. Leaves: the GPT-NeoX that matches it; the length
from which the TokenFormer is cheaper, and by how much it is at one length.
"""

import math
from collections.abc import Iterable
from typing import Any

from transformers import GPTNeoXConfig

from ..errors import BadRequestError
from ..models.config import TokenFormerConfig
from .counts import Config, forward_flops_per_token, parameters, width_and_layers

HEAD = 64  # the usual width of a head
WITHIN = 0.02  # of the parameters asked for


def neox_parameters(width: float, layers: int, vocab_size: int, *, tied: bool = True) -> float:
    """Matrices, biases and norms of a GPT-NeoX whose FFN is four times as wide as the model."""
    return (1 if tied else 2) * vocab_size * width + layers * (12 * width**2 + 13 * width) + 2 * width


def neox_width(total: float, layers: int, vocab_size: int, *, tied: bool = True) -> float:
    """The width, a real number, at which it has `total` parameters: the positive root of neox_parameters − total."""
    square, linear = 12 * layers, (1 if tied else 2) * vocab_size + 13 * layers + 2
    return 2 * total / (linear + math.sqrt(linear**2 + 4 * square * total))


def equal_neox(
    config_or_parameters: Config | float,
    *,
    layers: int | None = None,
    vocab_size: int | None = None,
    heads: int | None = None,
    tie_word_embeddings: bool | None = None,
    max_position_embeddings: int | None = None,
) -> GPTNeoXConfig:
    """The GPT-NeoX that has as many parameters, within 2 %, and an FFN four times as wide as the model.

    Given a configuration, what is not named is as there: depth, vocabulary, tied embedding, context, rotary share,
    special tokens, attention kernel. Given a number, `layers` and `vocab_size` must be named; the embedding is tied.

    Of the widths that fit, the one that suits the processor best (a multiple of 16, else of 8, …; then heads of a
    multiple of 8, else of 4, …), then the one whose heads are nearest to 64. Heads are 48 to 80 wide, or any width from
    8 on if nothing fits so. Rotary embedding needs an even number of dimensions.
    """
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
        raise BadRequestError(f"equal_neox was given {given}; all three are needed, and above 0")
    rotated = more.get("rope_parameters", {}).get("partial_rotary_factor", 0.25)
    heads, head = _heads(wanted, layers, vocab_size, tied, rotated, heads)
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


def _heads(
    wanted: float, layers: int, vocab_size: int, tied: bool, rotated: float, given: int | None
) -> tuple[int, int]:
    """How many heads, and how wide each: of the widths that fit, the one that `equal_neox` prefers."""
    near = neox_width(wanted, layers, vocab_size, tied=tied)
    widest = int(near * (1 + WITHIN)) + 1

    def off(width: int) -> float:
        return abs(neox_parameters(width, layers, vocab_size, tied=tied) / wanted - 1)

    def fitting(sizes: Iterable[int]) -> list[tuple[int, int]]:
        even = [head for head in sizes if int(head * rotated) in range(2, head + 1, 2)]
        shapes = [(heads, head) for head in even for heads in ([given] if given else range(1, widest // head + 1))]
        return [(heads, head) for heads, head in shapes if off(heads * head) <= WITHIN]

    def preference(shape: tuple[int, int]) -> tuple[float, ...]:
        heads, head = shape
        return -math.gcd(heads * head, 16), -math.gcd(head, 8), abs(head - HEAD), off(heads * head)

    shapes = fitting(range(HEAD - 16, HEAD + 17, 2)) or fitting(range(8, widest + 1))
    if not shapes:
        shape = f"{layers} layers, {given or 'any number of'} heads and a vocabulary of {vocab_size:,}"
        raise BadRequestError(
            f"no GPT-NeoX of {shape} has {wanted:,.0f} parameters within {WITHIN:.0%}: it would be {near:.4g} wide; "
            "ask for other layers or heads"
        )
    return min(shapes, key=preference)


def crossing_length(config: TokenFormerConfig, peer: GPTNeoXConfig | None = None) -> int | None:
    """The first length at which `config` takes fewer FLOPs a token than `peer`, and does so ever after.

    Both take a + b · length FLOPs, b = 4 · layers · width: ours fewer beyond (a_ours − a_peer) / (b_peer − b_ours).
    Without a peer: the GPT-NeoX of as many parameters and layers, its width a real number. With tied embeddings both
    take 2 FLOPs for each number in a matrix, so a_ours − a_peer is twice what the peer has more in biases and norms.

    0: at every length. None: from no length on, because the peer's layers · width are no more than ours. Training is
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


def _flops_line(config: Config) -> tuple[int, int]:
    """FLOPs a token at length 0, and what every token of length adds."""
    width, layers = width_and_layers(config)
    return forward_flops_per_token(config, 0), 4 * layers * width


def _peer_line(config: TokenFormerConfig, peer: GPTNeoXConfig | None) -> tuple[float, float]:
    if not isinstance(config, TokenFormerConfig):
        kind = getattr(config, "model_type", type(config).__name__)
        raise BadRequestError(f"a {kind} was given to compare with a GPT-NeoX; give a TokenFormerConfig")
    if peer is not None:
        return _flops_line(peer)
    layers, vocab_size = config.num_hidden_layers, config.vocab_size
    width = neox_width(parameters(config).total, layers, vocab_size, tied=config.tie_word_embeddings)
    return 2 * (12 * layers * width**2 + vocab_size * width), 4 * layers * width
