"""What transformers needs to know of every TokenFormer: initialisation, saving, abilities, tensor parallelism."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import initialization as init
from transformers.distributed.tensor_parallel import TensorParallelLayer
from transformers.modeling_utils import PreTrainedModel

from ..errors import BadRequestError
from ..pattention import Pattention, default_tau, pattention_layers, record_token_weights
from .card import write_card
from .config import TokenFormerBaseConfig
from .kept_groups import give_methods
from .layers import TokenFormerAttention, TokenFormerLayer
from .prefixes import prefix_arguments
from .side_files import MODEL_KINDS, auto_map, write_loader
from .unquantised import warn_of_unquantised_tokens

# What save_pretrained takes for an upload, besides its own options.
HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


def name_in_transformers(kind: type) -> None:
    """Make a class an attribute of the module transformers.

    `transformers serve` looks there for the class that config.json names. transformers imports itself a second time
    under its own name, so that modules that were loaded early hold another object than those that come later.
    """
    held = (getattr(each, "__dict__", {}).get("transformers") for each in [*sys.modules.values()])
    for module in (sys.modules["transformers"], *held):
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            setattr(module, kind.__name__, kind)


class TokenModelMixin:
    """What ours and adopted models add to transformers': weights of tokens on request, and files beside the weights.

    To be named before transformers' class.
    """

    # What config.json names for each Auto class, and the module from which the loader imports it.
    loader_classes: dict[str, str]
    loader_module = "tokenformer"

    def __call__(self, *args: Any, output_token_weights: bool = False, **kwargs: Any) -> Any:
        """`forward`; with `output_token_weights` also the weights of every Pattention, as `token_weights`.

        A tuple of [batch, length, n], in the order of `pattention_layers(model)`, if every layer runs once;
        `record_token_weights` keeps their names. Not recorded by `_can_record_outputs` because that records what a
        module returns, and a Pattention does not return its weights.
        """
        model: Any = self
        if not output_token_weights:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with record_token_weights(model) as recorded:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        weights = tuple(tensor for calls in recorded.values() for tensor in calls)
        if isinstance(output, tuple):
            return (*output, weights)
        output["token_weights"] = weights
        return output

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: transformers would copy our source into every saved folder, which has the loader instead."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with a warning if the model is to be quantised and its tokens are not.

        With `token_fraction`, only the first tokens of every layer are read, of a folder whose tokens are sorted.
        """
        folder, token_fraction = None, kwargs.pop("token_fraction", None)
        if token_fraction is not None:
            folder = args[0] if args else kwargs.pop("pretrained_model_name_or_path")
            args, kwargs = prefix_arguments(cls, token_fraction, folder, *args[1:], **kwargs)
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if folder is not None:
            model.config.name_or_path = str(folder)
        quantizer = getattr(model, "hf_quantizer", None)
        if quantizer is not None and not any(layer.num_quantised for _, layer in pattention_layers(model)):
            warn_of_unquantised_tokens(model, type(quantizer.quantization_config).__name__)
        return loaded

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers, with the numbers of quantised tokens, which are never trained."""
        counted = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]
        model: Any = self
        layers = [layer for _, layer in pattention_layers(model) if layer.num_quantised]
        numbers = (layer.num_quantised * (layer.d_in + layer.d_out + (layer.key_bias is not None)) for layer in layers)
        return counted + (0 if only_trainable else sum(numbers))

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As in transformers, with a model card and a loader beside the weights."""
        model: Any = self
        hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        if push_to_hub and (kwargs.get("state_dict") is not None or kwargs.get("variant") is not None):
            raise BadRequestError(
                "save_pretrained: push_to_hub uploads the model as it is; with state_dict or variant, save the folder "
                "and upload it with huggingface_hub.upload_folder"
            )
        model.config.auto_map = auto_map(self.loader_classes)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            self._write_beside(save_directory)
        if push_to_hub:  # afterwards: transformers would upload its own files only
            if "max_shard_size" in kwargs:
                hub["max_shard_size"] = kwargs["max_shard_size"]
            model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def _write_beside(self, folder: str | os.PathLike) -> None:
        write_loader(folder, self.loader_module, self.loader_classes.values())
        write_card(self, folder)  # type: ignore[arg-type]


class TokenFormerPreTrainedModel(TokenModelMixin, PreTrainedModel):
    """The base of all models: with and without a head, for language and for images."""

    config: TokenFormerBaseConfig
    base_model_prefix = "model"
    # Parameters without weight decay, besides norms and biases, by the last part of their names.
    no_decay: tuple[str, ...] = ()
    supports_gradient_checkpointing = True
    _no_split_modules = ["TokenFormerLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": TokenFormerLayer, "attentions": TokenFormerAttention}

    def post_init(self) -> None:
        """As in transformers; a model that is built with token groups has their methods."""
        super().post_init()
        if self.config.token_groups:
            give_methods(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Pattention):
            depth, width = self.config.num_hidden_layers, self.config.hidden_size
            value_std = self.config.value_initializer_range or 2 / (depth * width**0.5)
            assert self.config.initializer_range is not None  # set when the configuration was made
            init.normal_(module.key_tokens, std=self.config.initializer_range)
            init.normal_(module.value_tokens, std=value_std)
            init.constant_(module.tau, default_tau(module.num_tokens, module.kind))

    @property
    def loader_classes(self) -> dict[str, str]:  # type: ignore[override]
        return MODEL_KINDS[self.config.model_type].classes


class TokenParallel(TensorParallelLayer):
    """Tensor parallelism for Pattention: every rank holds a slice of a layer's tokens; rows enter and leave whole.

    The configuration's plan names the layers. To apply it, under torchrun:
    `from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`. Only the normaliser and the output of a
    Pattention look across tokens, and DTensor adds both up over the ranks.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        tokens = module.get_parameter(param)
        # Without a source rank nothing is sent: every rank loads its own slice of the checkpoint later.
        slices = distribute_tensor(tokens, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(param, nn.Parameter(slices, requires_grad=tokens.requires_grad))

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:]), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[Replicate()]).to_local()
