"""The shapes that have names. Each language model's parameter count matches its name within 2 %."""

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
