"""TokenFormerVisionConfig: the shape of a TokenFormer for images, a ViT whose linears are Pattentions."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from ..errors import did_you_mean
from .config import TokenFormerBaseConfig
from .presets import VISION_PRESETS

POOLINGS = ("cls", "mean")
POSITIONS = ("learned", "sincos")


@strict
class TokenFormerVisionConfig(TokenFormerBaseConfig):
    """Shape and training-relevant constants of a TokenFormer vision model; TokenFormerBaseConfig has the rest.

    image_size, patch_size: side of an image and of a patch, in pixels. Other images need `interpolate_pos_encoding`.
    pooling: cls, the last hidden state of a class token, or mean, that of all patches; then there is no class token.
    position_embedding: learned, or sincos: fixed sines and cosines of row and column.
    position_grid: patches along a side of the images that positions were made for. Fixed at birth: with another
        image_size they are stretched, and a trained model knows its way about.
    drop_path_rate: stochastic depth of the last block. It rises linearly from 0 in the first.
    num_labels, id2label, label2id, problem_type: as in every classifier of transformers.
    """

    model_type = "tokenformer_vision"
    # The usual plan of transformers names an embedding of tokens.
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
        """As of every TokenFormer. The names in `id2label` also say how many labels there are."""
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
                f"hidden_size={self.hidden_size} does not divide by 4, as position_embedding='sincos' needs"
            )
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"drop_path_rate={self.drop_path_rate} was given; it must be at least 0 and below 1")
