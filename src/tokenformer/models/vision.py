"""The TokenFormer vision model: a ViT of the language model's own blocks, without the causal mask.

Enters: images [batch, channels, height, width]. Leaves: hidden states [batch, class token and patches, width]
(TokenFormerVisionModel), or logits and loss (TokenFormerForImageClassification).
"""

import os
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..errors import BadRequestError
from .base import TokenFormerPreTrainedModel
from .config import TokenFormerVisionConfig
from .images import image_processor_beside, write_image_processor
from .kept_groups import put_kept_groups
from .layers import TokenFormerLayer


class TokenFormerVisionEmbedding(nn.Module):
    """Patches with their positions, row by row, after a class token if there is one."""

    def __init__(self, config: TokenFormerVisionConfig) -> None:
        super().__init__()
        self.config = config
        width, side = config.hidden_size, config.position_grid or 0
        self.patch_embeddings = nn.Conv2d(config.num_channels, width, config.patch_size, stride=config.patch_size)
        # A class token needs no position: it is learned itself.
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if config.pooling == "cls" else None
        learned = config.position_embedding == "learned"
        self.position_embeddings = nn.Parameter(torch.zeros(1, side * side, width)) if learned else None

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = None) -> Tensor:
        self._check(pixel_values, bool(interpolate_pos_encoding))
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))
        rows, columns = patches.shape[-2:]
        tokens = patches.flatten(2).transpose(1, 2) + self.positions(rows, columns)  # [batch, patches, width]
        if self.class_token is None:
            return tokens
        return torch.cat([self.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)

    def positions(self, rows: int, columns: int) -> Tensor:
        """[1, rows · columns, width]: as trained, or the trained grid stretched over another number of patches."""
        side = self.config.position_grid or 0
        if self.position_embeddings is None:
            return _sincos(rows, columns, side, like=self.patch_embeddings.weight)
        if (rows, columns) == (side, side):
            return self.position_embeddings
        grid = self.position_embeddings.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [1, width, side, side]
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return grid.flatten(2).transpose(1, 2)

    def _check(self, pixel_values: Tensor, interpolate: bool) -> None:
        channels, size = self.config.num_channels, self.config.image_size
        if pixel_values.dim() != 4 or pixel_values.shape[1] != channels:
            raise BadRequestError(
                f"pixel_values of shape {tuple(pixel_values.shape)} were given; [batch, {channels}, height, width] is "
                "needed"
            )
        height, width = pixel_values.shape[-2:]
        if min(height, width) < self.config.patch_size:
            raise BadRequestError(
                f"images of {height} × {width} pixels were given, smaller than a patch of {self.config.patch_size} × "
                f"{self.config.patch_size}; enlarge them"
            )
        if not interpolate and (height, width) != (size, size):
            raise BadRequestError(
                f"images of {height} × {width} pixels were given, and the model has positions for {size} × {size}; "
                "resize them, or give interpolate_pos_encoding=True"
            )


def _sincos(rows: int, columns: int, side: int, like: Tensor) -> Tensor:
    """[1, rows · columns, width]: waves of the row, then of the column, in units of the trained grid's patches."""
    wide = torch.promote_types(like.dtype, torch.float32)
    down, across = (
        _waves((torch.arange(n, device=like.device, dtype=wide) + 0.5) * (side / n) - 0.5, like.shape[0] // 2)
        for n in (rows, columns)
    )
    grid = torch.cat([down[:, None].expand(-1, columns, -1), across[None].expand(rows, -1, -1)], dim=-1)
    return grid.flatten(0, 1)[None].to(like.dtype)


def _waves(positions: Tensor, width: int) -> Tensor:
    """[n] to [n, width]: sines, then cosines, of wavelengths from 2π to nearly 10000 · 2π."""
    steps = torch.arange(width // 2, device=positions.device, dtype=positions.dtype)
    angles = positions[:, None] * 10000 ** (-2 * steps / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TokenFormerVisionPreTrainedModel(TokenFormerPreTrainedModel):
    """What the vision model's classes with and without a classifier share."""

    config: TokenFormerVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    _no_split_modules = ["TokenFormerVisionEmbedding", "TokenFormerLayer"]
    _input_embed_layer = "patch_embeddings"
    no_decay = ("class_token", "position_embeddings")
    # Text of the preprocessor_config.json that the weights were loaded with. It is kept on the base model, so that a
    # model has the same one with and without its head, grown or not.
    loaded_processor: str | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the image processor's settings beside the weights are kept for saving."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if pretrained_model_name_or_path is not None:
            model.base_model.loaded_processor = image_processor_beside(pretrained_model_name_or_path, kwargs)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, TokenFormerVisionEmbedding):
            for parameter in (module.class_token, module.position_embeddings):
                if parameter is not None:
                    assert self.config.initializer_range is not None  # as for keys
                    init.normal_(parameter, std=self.config.initializer_range)

    def _write_beside(self, folder: str | os.PathLike) -> None:
        super()._write_beside(folder)
        base = cast(TokenFormerVisionPreTrainedModel, self.base_model)
        write_image_processor(self.config, base.loaded_processor, folder)


class TokenFormerVisionModel(TokenFormerVisionPreTrainedModel):
    """Embedding of patches, blocks, final norm and pooling."""

    def __init__(self, config: TokenFormerVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = TokenFormerVisionEmbedding(config)
        self.layers = nn.ModuleList(TokenFormerLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        put_kept_groups(self)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Hidden states of images, and the pooled one.

        With `interpolate_pos_encoding` the images may have another size than the model was made for.
        """
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        x = self.embeddings(pixel_values, interpolate_pos_encoding)
        for layer in self.layers:
            x = layer(x, **kwargs)
        x = self.norm(x)
        pooled = x[:, 0] if self.config.pooling == "cls" else x.mean(dim=1)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)


class TokenFormerForImageClassification(TokenFormerVisionPreTrainedModel):
    """The image classifier: TokenFormerVisionModel and a linear layer over what it pools."""

    # Every image has one label, so Trainer need not count them; given shares of classes it would count every number.
    accepts_loss_kwargs = False

    def __init__(self, config: TokenFormerVisionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.model = TokenFormerVisionModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels) if self.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Logits of the classes, and the loss if `labels` are given; `config.problem_type` says which.

        With "single_label_classification", labels are classes [batch], or shares of all classes [batch, classes].
        """
        out = self.model(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(out.pooler_output)
        loss = None
        if labels is not None:
            loss = self._loss(labels.to(logits.device), logits, **kwargs)
        return ImageClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def _loss(self, labels: Tensor, logits: Tensor, **kwargs: Any) -> Tensor:
        """transformers' loss, and one for shares of classes, which it does not support."""
        if labels.is_floating_point() and self.config.problem_type == "single_label_classification":
            wide = torch.promote_types(logits.dtype, torch.float32)
            return F.cross_entropy(logits.to(wide), labels.to(wide))
        return self.loss_function(labels, logits, self.config, **kwargs)
