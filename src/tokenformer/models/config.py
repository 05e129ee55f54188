"""The shape of a model, in transformers' idiom: what every kind shares, and TokenFormerConfig, the language model's."""

import dataclasses
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from ..errors import BadRequestError, did_you_mean
from ..pattention import KINDS
from ..pattention.operator import check_form
from .presets import PRESETS

Kind = TypeVar("Kind", bound="TokenFormerBaseConfig")


@strict
class TokenFormerBaseConfig(PreTrainedConfig):
    """What every TokenFormer's configuration has.

    qkv_tokens, out_tokens, ffn_tokens: parameter tokens of each query, key and value projection, of the output
        projection, and of the feed-forward block. Growth changes these three numbers and nothing else.
    pattention_kind: one of l2_gelu (the paper's), gelu_l2, softmax, l2_gelu_tanh, l2_silu, l2_relu.
    pattention_form: how Pattention is computed: auto, reference, fused or triton; see docs/performance.md.
    pattention_recompute: keep none of Pattention's scores for the backward pass, and compute them again there.
    parametric_norm: weight and bias in the LayerNorms of the blocks; the paper's models have none.
    initializer_range: standard deviation of new keys and of the embedding; None for 1 / √width, which trains better
        than the paper's 0.02 (docs/decisions.md).
    value_initializer_range: standard deviation of new value tokens; None for the paper's 2 / (layers · √width).
    growth_history: one entry a growth step: method, seed, token counts before and after.
    """

    # The style "parameter_tokens" is ours: see parallel.py.
    base_model_tp_plan: ClassVar = {
        **{f"layers.*.attention.{name}": "parameter_tokens" for name in ("query", "key", "value", "out")},
        "layers.*.ffn": "parameter_tokens",
    }
    # Whether a token attends to those before it only.
    is_causal: ClassVar[bool] = True
    # The shapes that have names: see presets.py.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # The layers, by the last part of their name, that each token count is for.
    token_roles: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv": ("query", "key", "value"),
        "out": ("out",),
        "ffn": ("ffn",),
    }

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    qkv_tokens: int = 576
    out_tokens: int = 576
    ffn_tokens: int = 2304
    pattention_kind: str = "l2_gelu"
    pattention_form: str = "auto"
    pattention_recompute: bool = False
    parametric_norm: bool = False
    attention_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float | None = None
    value_initializer_range: float | None = None
    growth_history: list | None = None

    @classmethod
    def preset(cls: type[Kind], name: str, **changes: Any) -> Kind:
        """The configuration called `name` (see presets.py), with `changes` made to it."""
        if name not in cls.presets:
            raise BadRequestError(f"preset {name!r} is not known; {did_you_mean(name, cls.presets)}")
        shape = cls.presets[name]
        known = [*(field.name for field in dataclasses.fields(cls)), *shape]
        for change in changes:
            # transformers would take an unknown name in silence and keep it.
            if change not in known:
                raise BadRequestError(f"preset: {change!r} is not a field; {did_you_mean(change, known)}")
        return cls(**{**shape, **changes})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing, as for the models: see base.py."""

    @property
    def num_tokens(self) -> dict[str, int]:
        """Parameter tokens by role."""
        return {role: getattr(self, f"{role}_tokens") for role in self.token_roles}

    def drop_path(self, layer_idx: int) -> float:
        """How often a block's branches are left out in training."""
        return 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.initializer_range is None and self.hidden_size > 0:  # what is not is refused below
            self.initializer_range = self.hidden_size**-0.5
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers whenever a configuration is made."""
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} was given; at least 1 is needed")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout={self.attention_dropout} was given; it must be at least 0 and below 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide by num_attention_heads={self.num_attention_heads}"
            )
        for role, count in self.num_tokens.items():
            if count < 1:
                raise ValueError(f"{role}_tokens={count} was given; at least 1 is needed")
        if self.pattention_kind not in KINDS:
            raise ValueError(
                f"pattention_kind={self.pattention_kind!r} is not known; {did_you_mean(self.pattention_kind, KINDS)}"
            )
        check_form(self.pattention_form, "pattention_form")


@strict
class TokenFormerConfig(TokenFormerBaseConfig):
    """Shape and training-relevant constants of a TokenFormer language model; TokenFormerBaseConfig has the rest.

    chunked_loss: compute the loss in chunks that never hold the [tokens, vocabulary] logits, which are then not
        returned. For training; see docs/tour.md.
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    base_model_tp_plan: ClassVar = {
        "embed_tokens": "embedding_rowwise",
        **TokenFormerBaseConfig.base_model_tp_plan,
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS

    vocab_size: int = 50304
    max_position_embeddings: int = 2048
    rope_parameters: RopeParameters | dict | None = None
    chunked_loss: bool = False
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The paper rotates a quarter of each head."""
        kwargs.setdefault("partial_rotary_factor", 0.25)
        return super().convert_rope_params_to_dict(**kwargs)
