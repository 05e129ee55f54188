"""The shapes of models, in transformers' idiom: their configurations, and the shapes that have names.

TokenFormerBaseConfig is what every kind shares, TokenFormerConfig the language model's, TokenFormerVisionConfig the
vision model's: a ViT whose linears are Pattentions.
"""

import dataclasses
from typing import Any, ClassVar, TypeVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from ..errors import BadRequestError, did_you_mean
from ..pattention import KINDS, pattention_layers
from ..pattention.functional import ACTIVATIONS
from ..pattention.operator import check_form
from .blocks import BlockGrowth, Blocks, record_depth
from .prefixes import after_growth


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

# Parameter counts match the names within 2 %.
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
"""The named shapes of `TokenFormerConfig.preset`: fields and their values, by name."""

_IMAGENET = {"image_size": 224, "patch_size": 16, "num_labels": 1000}
_SMALL_IMAGES = {"image_size": 32, "patch_size": 4, "num_labels": 10}

# No language model has the same name, so that the command line needs the name alone.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    # For tests and for images of 32 pixels; the first grows into the second. With tokens for three quarters of the
    # width, as in the 86M and 307M below, a block has as many parameters as a ViT's of the same width.
    "tiny32": _shape(64, 2, 4, 48, **_SMALL_IMAGES),
    "tiny32-2x": _shape(64, 2, 4, 96, **_SMALL_IMAGES),
    "small32": _shape(192, 6, 6, 144, **_SMALL_IMAGES),
    # The paper's: two of each width, the first with as many parameters as a ViT, so that it can grow into the second.
    "b16-86m": _shape(768, 12, 12, 576, **_IMAGENET),
    "b16": _shape(768, 12, 12, 728, **_IMAGENET),
    "l16-307m": _shape(1024, 24, 16, 768, **_IMAGENET),
    "l16": _shape(1024, 24, 16, 1024, **_IMAGENET),
}
"""The named shapes of `TokenFormerVisionConfig.preset`: fields and their values, by name."""


Config = TypeVar("Config", bound="TokenFormerBaseConfig")
# More would take minutes to build; the deepest Transformers that were trained have 1,000.
MOST_LAYERS = 1024


@strict
class TokenFormerBaseConfig(PreTrainedConfig):
    """What the configurations of all TokenFormers have in common.

    Growth changes `qkv_tokens`, `out_tokens`, `ffn_tokens` and, in depth, `num_hidden_layers`; it adds to
    `growth_history`, and leaves the rest alone.

    Attributes:
        hidden_size: width of the model.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads of each block's attention.
        qkv_tokens: parameter tokens of each query, key and value projection.
        out_tokens: parameter tokens of the output projection of attention.
        ffn_tokens: parameter tokens of the feed-forward block.
        pattention_kind: one of l2_gelu (the paper's), gelu_l2, softmax, l2_gelu_tanh, l2_silu, l2_relu.
        pattention_form: how Pattention is computed: auto, reference, fused or triton; see docs/performance.md.
        pattention_recompute: keep none of Pattention's scores for the backward pass, and compute them again there.
        parametric_norm: weight and bias in the LayerNorms of the blocks; the paper's models have none.
        attention_dropout: dropout of the attention weights, in training.
        layer_norm_eps: epsilon of the LayerNorms.
        initializer_range: standard deviation of new keys and of the embedding; None for 1 / √width, which trains
            better than the paper's 0.02 (docs/decisions.md).
        value_initializer_range: standard deviation of new value tokens; None for the paper's 2 / (layers · √width).
        growth_history: one entry per growth step: method, seed, token counts before and after, and blocks if it was in
            depth. Shrinking and sorting add one each as well.
        token_groups: named groups of tokens that are part of the model: of each its name, its norm, how many tokens it
            has beside which layers, and whether it is merged, which is to say cannot be switched off.
        token_prefixes: if the tokens are in an order of use, by layer and count the tau of its first tokens, of which
            from_pretrained(…, token_fraction=0.5) makes a smaller model.
        token_top_k: how many tokens of a feed-forward block, the heaviest of each row, mix their values; None: all.
    """

    # The style "parameter_tokens" is ours: see base.py.
    base_model_tp_plan: ClassVar = {
        **{f"layers.*.attention.{name}": "parameter_tokens" for name in ("query", "key", "value", "out")},
        "layers.*.ffn": "parameter_tokens",
    }
    # Whether a token attends only to those before it.
    is_causal: ClassVar[bool] = True
    # The shapes that have names.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Which layers, by the last part of their names, have each token count.
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
    token_groups: list | None = None
    token_prefixes: dict | None = None
    token_top_k: int | None = None

    @property
    def growth_method(self) -> str:
        """The exact way to grow that trains best: rotate, or split for kinds of which rotate is not exact."""
        return "rotate" if self.pattention_kind in ACTIVATIONS else "split"

    @classmethod
    def preset(cls: type[Config], name: str, **changes: Any) -> Config:
        """The configuration called `name`, with `changes` made to it."""
        if name not in cls.presets:
            raise BadRequestError(f"preset {name!r} is not known; {did_you_mean(name, cls.presets)}")
        shape = cls.presets[name]
        known = [*(field.name for field in dataclasses.fields(cls)), *shape, "num_labels"]
        for change in changes:
            # transformers would silently accept and keep an unknown name.
            if change not in known:
                raise BadRequestError(f"preset: {change!r} is not a field; {did_you_mean(change, known)}")
        return cls(**{**shape, **changes})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing, as for the models: see base.py."""

    @property
    def num_tokens(self) -> dict[str, int]:
        """Parameter tokens by role."""
        return {role: getattr(self, f"{role}_tokens") for role in self.token_roles}

    @property
    def blocks(self) -> Blocks:
        """Where the blocks are, and what in them writes to the stream of hidden states."""
        return Blocks("layers", (("attention.out",), ("ffn",)))

    def check_growth(self, model: nn.Module, method: str) -> None:
        """Nothing to refuse: a TokenFormer grows by every method. Adopted models do not; see adopted.py."""

    def record_growth(self, model: nn.Module, step: dict[str, Any]) -> None:
        """Note a growth step of `model`, its new token counts and its depth."""
        before = self.num_tokens
        if "blocks" in step:
            growth = BlockGrowth(**step["blocks"])
            record_depth(self, growth)
            for group in self.token_groups or []:
                group["layers"] = {growth.moved(name, self.blocks.stack): n for name, n in group["layers"].items()}
        for name, layer in pattention_layers(model):
            for role, suffixes in self.token_roles.items():
                if name.rpartition(".")[2] in suffixes:
                    setattr(self, f"{role}_tokens", layer.num_tokens)
        step = {**step, "before": before, "after": self.num_tokens}
        self.growth_history = [*(self.growth_history or []), step]
        self.token_prefixes = after_growth(self.token_prefixes, step, self.blocks.stack)

    def drop_path(self, layer_idx: int) -> float:
        """How often a block's branches are left out in training."""
        return 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.initializer_range is None and self.hidden_size > 0:  # a width below 1 is refused below
            self.initializer_range = self.hidden_size**-0.5
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers whenever a configuration is made."""
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} was given; at least 1 is needed")
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} was given; at most {MOST_LAYERS} are possible"
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout={self.attention_dropout} was given; it must be at least 0 and below 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
            )
        for role, count in self.num_tokens.items():
            if count < 1:
                raise ValueError(f"{role}_tokens={count} was given; at least 1 is needed")
        if self.pattention_kind not in KINDS:
            raise ValueError(
                f"pattention_kind={self.pattention_kind!r} is not known; {did_you_mean(self.pattention_kind, KINDS)}"
            )
        check_form(self.pattention_form, "pattention_form")
        if not all(self._is_growth_step(step) for step in self.growth_history or []):
            raise ValueError(
                "growth_history is damaged: a step has a method, a seed, and token counts before and after"
            )
        if not all(_is_group(group) for group in self.token_groups or []):
            raise ValueError("token_groups is damaged: a group has a name, a norm, layers with counts, and merged")
        if not all(_are_taus(points) for points in (self.token_prefixes or {}).values()):
            raise ValueError("token_prefixes is damaged: by layer, counts have a tau above 0")
        if self.token_top_k is not None and self.token_top_k < 1:
            raise ValueError(f"token_top_k={self.token_top_k} was given; at least 1 is needed")

    def _is_growth_step(self, step: Any) -> bool:
        if not isinstance(step, dict) or not isinstance(step.get("method"), str) or "seed" not in step:
            return False
        counts = (step.get("before"), step.get("after"))
        return all(isinstance(count, dict) and count.keys() >= self.token_roles.keys() for count in counts)


def _are_taus(points: Any) -> bool:
    return isinstance(points, dict) and all(
        str(count).isdecimal() and isinstance(tau, int | float) and tau > 0 for count, tau in points.items()
    )


def _is_group(group: Any) -> bool:
    if (
        not isinstance(group, dict)
        or not isinstance(group.get("name"), str)
        or group.get("norm") not in ("own", "shared")
    ):
        return False
    layers = group.get("layers")
    counted = isinstance(layers, dict) and all(type(n) is int and n > 0 for n in layers.values())
    return counted and isinstance(group.get("merged"), bool)


@strict
class TokenFormerConfig(TokenFormerBaseConfig):
    """Configuration of a TokenFormer language model.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        max_position_embeddings: longest context the model was made for.
        rope_parameters: transformers' rotary parameters; by default a quarter of each head is rotated, with base 10000.
        chunked_loss: compute the loss in chunks that never hold the [tokens, vocabulary] logits, which are then not
            returned. For training; see docs/tour.md.
        tie_word_embeddings: one matrix for the embedding and the output layer.
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    base_model_tp_plan: ClassVar = {
        "embed_tokens": "embedding_rowwise",
        **TokenFormerBaseConfig.base_model_tp_plan,
    }
    # What a stage of a pipeline needs of each part: what enters, and what leaves.
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
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


POOLINGS = ("cls", "mean")
POSITIONS = ("learned", "sincos")


@strict
class TokenFormerVisionConfig(TokenFormerBaseConfig):
    """Configuration of a TokenFormer vision model. Labels are given as in every classifier of transformers.

    Attributes:
        image_size: side of an image in pixels. Images of another size need `interpolate_pos_encoding`.
        patch_size: side of a patch in pixels.
        num_channels: channels of an image.
        pooling: cls, the last hidden state of a class token; or mean, the mean over all patches, without a class token.
        position_embedding: learned, or sincos: fixed sines and cosines of row and column.
        position_grid: patches along a side of the images that the positions were made for. It stays as it was when
            image_size changes: the positions are then interpolated, so that a trained model keeps what it learnt.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0 in the first.
    """

    model_type = "tokenformer_vision"
    # transformers' usual plan names a token embedding.
    base_model_fsdp_plan: ClassVar = {"layers.*": "free_full_weight", "norm": "keep_full_weight"}
    is_causal: ClassVar[bool] = False
    presets: ClassVar[dict[str, dict[str, Any]]] = VISION_PRESETS

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    pooling: str = "cls"
    position_embedding: str = "learned"
    position_grid: int | None = None
    drop_path_rate: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.position_grid is None and self.patch_size > 0:
            self.position_grid = self.image_size // self.patch_size

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "TokenFormerVisionConfig":
        """As for every TokenFormer. The names in `id2label` also say how many labels there are."""
        if changes.get("id2label"):
            changes.setdefault("num_labels", len(changes["id2label"]))
        return super().preset(name, **changes)

    def drop_path(self, layer_idx: int) -> float:
        return self.drop_path_rate * layer_idx / max(1, self.num_hidden_layers - 1)

    def validate_architecture(self) -> None:
        """Called by transformers whenever a configuration is made."""
        super().validate_architecture()
        if self.patch_size < 1 or self.image_size < 1 or self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} does not divide into patches of {self.patch_size} pixels; change "
                "image_size or patch_size"
            )
        if self.position_grid is not None and self.position_grid < 1:
            raise ValueError(f"position_grid={self.position_grid} was given; at least 1 is needed")
        for field, known in (("pooling", POOLINGS), ("position_embedding", POSITIONS)):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"{field}={value!r} is not known; {did_you_mean(value, known)}")
        if self.position_embedding == "sincos" and self.hidden_size % 4:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by 4, as position_embedding='sincos' needs"
            )
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"drop_path_rate={self.drop_path_rate} was given; it must be at least 0 and below 1")
