"""The authors' YAML settings and our configuration: read, checked, translated both ways.

Enters: CONFIG.yml, or a TokenFormerConfig. Leaves: the other, if both codes compute the same model from it.
Settings that only concern training are passed over.
"""

import math
from pathlib import Path
from typing import Any

import yaml

from ..errors import BadFileError, BadRequestError, one_line
from ..models import TokenFormerConfig

COUNTS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "qkv_slot_num": "qkv_tokens",
    "proj_slot_num": "out_tokens",
    "ffn_slot_num": "ffn_tokens",
    "max_position_embeddings": "max_position_embeddings",
}
KINDS = {"l2_norm_gelu": "l2_gelu", "gelu_l2_norm": "gelu_l2", "softmax": "softmax"}

# Settings of which our model computes one value. The norms must be given, for the authors' defaults differ;
# the rest have this value if they are not given (pos_emb because rotary_pct must be).
NORMS = {"norm": "layernorm_nonparam", "final_norm": "layernorm"}
FIXED = {
    **NORMS,
    "pos_emb": "rotary",
    "gpt_j_residual": False,
    "model_parallel_size": 1,
    "use_mup": False,
    "sliding_window_width": None,
}
NEEDED = (*COUNTS, *NORMS, "norm_activation_type", "rotary_pct", "no_weight_tying")

HEADER = "# The model's settings for the authors' code. Add those of training, data and hardware.\n"


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file: none that is needed is missing, and our model can compute them all."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadFileError(f"{path} is not YAML: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise BadFileError(f"{path} holds a {type(loaded).__name__}, not a mapping of settings to values")
    settings = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    missing = [key for key in NEEDED if key not in settings]
    if missing:
        raise BadFileError(f"{path} lacks {', '.join(missing)}; without them the model is not determined")
    _check_numbers(settings, path)
    _check_supported(settings, path)
    return settings


def to_config(settings: dict[str, Any], vocab_size: int, eos_token_id: int | None) -> TokenFormerConfig:
    """Our configuration for checked settings."""
    rope = {
        "rope_type": "default",
        "rope_theta": settings["rotary_emb_base"],
        "partial_rotary_factor": settings["rotary_pct"],
    }
    return TokenFormerConfig(
        **{ours: settings[theirs] for theirs, ours in COUNTS.items()},
        vocab_size=vocab_size,
        pattention_kind=KINDS[settings["norm_activation_type"]],
        rope_parameters=rope,
        layer_norm_eps=settings["layernorm_epsilon"],
        tie_word_embeddings=not settings["no_weight_tying"],
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )


def from_config(config: TokenFormerConfig, source: Path) -> dict[str, Any]:
    """The authors' settings for our configuration; `source` is named in the error if there are none."""
    rope: Any = config.rope_parameters
    if rope["rope_type"] != "default":
        raise BadRequestError(f"{source}: rope_type is {rope['rope_type']!r}; the authors' code knows 'default' only")
    if config.parametric_norm:
        raise BadRequestError(
            f"{source}: the blocks' norms have weights and biases (parametric_norm); the authors' have none"
        )
    theta, kinds = rope["rope_theta"], {ours: theirs for theirs, ours in KINDS.items()}
    settings = {theirs: getattr(config, ours) for theirs, ours in COUNTS.items()}
    settings |= {
        "seq_length": config.max_position_embeddings,
        "pos_emb": FIXED["pos_emb"],
        "rotary_pct": float(rope["partial_rotary_factor"]),
        # Their code wants a whole number here.
        "rotary_emb_base": int(theta) if theta == int(theta) else theta,
        "no_weight_tying": not config.tie_word_embeddings,
        **NORMS,
        "layernorm_epsilon": config.layer_norm_eps,
        "gpt_j_residual": FIXED["gpt_j_residual"],
        "attention_config": [[["tokenformer"], config.num_hidden_layers]],
        "norm_activation_type": kinds.get(config.pattention_kind, config.pattention_kind),
    }
    _check_supported(settings, source)
    return settings


def write_settings(settings: dict[str, Any], path: Path) -> None:
    """Write settings as the authors' code reads them."""
    path.write_text(HEADER + yaml.safe_dump(settings, sort_keys=False, default_flow_style=None), encoding="utf-8")


def _check_numbers(settings: dict[str, Any], path: Path) -> None:
    """Every number is one; the two that may be left out are filled in with the authors' defaults."""
    for key in COUNTS:
        if type(settings[key]) is not int or settings[key] < 1:
            raise BadFileError(f"{path}: {key} is {settings[key]!r}; a whole number of at least 1 is needed")
    for key, default in (("rotary_pct", None), ("rotary_emb_base", 10000), ("layernorm_epsilon", 1e-5)):
        given: Any = settings.get(key, default)
        try:
            # YAML reads 1e-5, which has no point, as a text.
            settings[key] = float(given)
        except (TypeError, ValueError):
            settings[key] = 0.0
        if isinstance(given, bool) or not 0 < settings[key] < math.inf:
            raise BadFileError(f"{path}: {key} is {given!r}; a number above 0 is needed")
    if not isinstance(settings["no_weight_tying"], bool):
        given = settings["no_weight_tying"]
        raise BadFileError(f"{path}: no_weight_tying is {given!r}; true or false is needed")


def _check_supported(settings: dict[str, Any], source: Path) -> None:
    for key, supported in FIXED.items():
        given = settings.get(key, supported)
        if given != supported:
            raise BadRequestError(f"{source}: {key} is {given!r}; only {supported!r} is supported")
    kind = settings["norm_activation_type"]
    if str(kind) not in KINDS:
        raise BadRequestError(f"{source}: norm_activation_type is {kind!r}; supported are {', '.join(KINDS)}")
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    if width % heads:
        raise BadRequestError(f"{source}: hidden_size is {width}; it must divide by {heads} attention heads")
    head, rotary_pct = width // heads, settings["rotary_pct"]
    rotated = int(head * rotary_pct)
    if rotary_pct > 1 or rotated < 2 or rotated % 2:
        raise BadRequestError(
            f"{source}: rotary_pct is {rotary_pct:g}, which rotates {rotated} of a head's {head} entries; "
            f"they rotate in pairs, so an even number from 2 to {head} is supported"
        )
