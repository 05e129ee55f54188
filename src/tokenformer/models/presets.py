"""The shapes that have names, of language and of vision models. Parameter counts match the names within 2 %."""

from typing import Any


def _shape(width: int, depth: int, heads: int, tokens: int, **more: Any) -> dict[str, Any]:
    """`tokens` for each of query, key, value and output projection; four times as many for the FFN."""
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "qkv_tokens": tokens,
        "out_tokens": tokens,
        "ffn_tokens": 4 * tokens,
        **more,
    }


_BYTES = {"vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}

PRESETS: dict[str, dict[str, Any]] = {
    # For tests and first steps: bytes in, bytes out; one width, so that each can grow into the next.
    "tiny": _shape(64, 2, 4, 64, **_BYTES),
    "tiny-2x": _shape(64, 2, 4, 128, **_BYTES),
    "tiny-4x": _shape(64, 2, 4, 256, **_BYTES),
    # The progressive ladder: one width and depth, more tokens at every rung.
    "124m": _shape(768, 12, 12, 576, max_position_embeddings=1024),
    "354m": _shape(768, 12, 12, 2140, max_position_embeddings=1024),
    "757m": _shape(768, 12, 12, 4850, max_position_embeddings=1024),
    "1b4": _shape(768, 12, 12, 9230, max_position_embeddings=1024),
    # The step whose code the authors released.
    "354m-d1024": _shape(1024, 24, 16, 768, max_position_embeddings=1024),
    "757m-d1024": _shape(1024, 24, 16, 1792, max_position_embeddings=1024),
    # The models trained on the Pile.
    "150m": _shape(768, 12, 12, 768),
    "450m": _shape(1024, 24, 16, 1024),
    "900m": _shape(1280, 32, 16, 1280),
    "1b5": _shape(1536, 40, 16, 1536),
}

_IMAGENET = {"image_size": 224, "patch_size": 16, "num_labels": 1000}
_SMALL_IMAGES = {"image_size": 32, "patch_size": 4, "num_labels": 10}

# No name is also a language model's, so that the command line needs no kind beside it.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    # For tests and for images of 32 pixels; the first grows into the second. With tokens for three quarters of the
    # width, as in the 86M and 307M below, a block has as many parameters as a ViT's of the same width.
    "tiny32": _shape(64, 2, 4, 48, **_SMALL_IMAGES),
    "tiny32-2x": _shape(64, 2, 4, 96, **_SMALL_IMAGES),
    "small32": _shape(192, 6, 6, 144, **_SMALL_IMAGES),
    # The paper's: of either width, one with as many parameters as a ViT, which can grow into the other.
    "b16-86m": _shape(768, 12, 12, 576, **_IMAGENET),
    "b16": _shape(768, 12, 12, 728, **_IMAGENET),
    "l16-307m": _shape(1024, 24, 16, 768, **_IMAGENET),
    "l16": _shape(1024, 24, 16, 1024, **_IMAGENET),
}
