"""What transformers needs to know of every TokenFormer: initialisation, saving, abilities."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel

from ..pattention import Pattention, default_tau
from .config import TokenFormerBaseConfig
from .folder import auto_map, write_beside_weights
from .layers import TokenFormerAttention, TokenFormerLayer

# What save_pretrained takes for an upload, beside its own.
HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class TokenFormerPreTrainedModel(PreTrainedModel):
    """The base of the models with and without a head, of language and of images."""

    config: TokenFormerBaseConfig
    base_model_prefix = "model"
    # Parameters that weight decay spares, beside norms and biases, by the last part of their names.
    no_decay: tuple[str, ...] = ()
    supports_gradient_checkpointing = True
    _no_split_modules = ["TokenFormerLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": TokenFormerLayer, "attentions": TokenFormerAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Pattention):
            depth, width = self.config.num_hidden_layers, self.config.hidden_size
            value_std = self.config.value_initializer_range or 2 / (depth * width**0.5)
            assert self.config.initializer_range is not None  # made a number when the configuration was made
            init.normal_(module.key_tokens, std=self.config.initializer_range)
            init.normal_(module.value_tokens, std=value_std)
            init.constant_(module.tau, default_tau(module.num_tokens, module.kind))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would copy our files into a folder when it saves, and the loader is there for that."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As transformers does, with a model card and a loader beside the weights."""
        hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        self.config.auto_map = auto_map(self.config)
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self._write_beside(save_directory)
        if push_to_hub:  # afterwards: transformers would upload its own files only
            if "max_shard_size" in kwargs:
                hub["max_shard_size"] = kwargs["max_shard_size"]
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def _write_beside(self, folder: str | os.PathLike) -> None:
        write_beside_weights(self, folder)
