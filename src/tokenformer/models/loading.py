"""Reading a model folder, with one line for whatever can be wrong with it.

Enters: a folder that `save_pretrained` wrote. Leaves: its configuration, or the model with every weight read. Nothing
that is missing is drawn at random, and nothing is downloaded, unless a peer is asked for by its name on the Hub.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PreTrainedModel,
)

from ..errors import BadFileError, BadRequestError, one_line
from .adopted import record_of
from .base import TokenFormerPreTrainedModel
from .config import TokenFormerBaseConfig, TokenFormerConfig
from .folder import TOKENIZER_FILES
from .language import TokenFormerForCausalLM
from .vision import TokenFormerForImageClassification
from .vision_config import TokenFormerVisionConfig

Config = TypeVar("Config", bound=TokenFormerBaseConfig)

# `owner/name`, or the name alone of the Hub's oldest models.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_FILES = ("*.json", "*.safetensors")


# Of each kind of configuration, the model with its head.
MODELS: dict[type[TokenFormerBaseConfig], type[TokenFormerPreTrainedModel]] = {
    TokenFormerConfig: TokenFormerForCausalLM,
    TokenFormerVisionConfig: TokenFormerForImageClassification,
}

# What a model may be asked to do: our kind for it, and how it is called.
USES: dict[Any, tuple[type[TokenFormerBaseConfig], str]] = {
    AutoModelForCausalLM: (TokenFormerConfig, "a causal language model"),
    AutoModelForImageClassification: (TokenFormerVisionConfig, "an image classifier"),
}


def read_config_of(folder: str | os.PathLike, kind: type[Config]) -> Config:
    """The configuration of a folder that must hold a TokenFormer of one kind, or of any."""
    config = read_any_config(Path(folder))
    if not isinstance(config, kind):
        what = next((f", {what}," for ours, what in USES.values() if ours is kind), "")
        raise BadRequestError(f"{folder} holds a {config.model_type} model, and a TokenFormer{what} is needed")
    return config


def read_config(folder: str | os.PathLike) -> TokenFormerConfig:
    """The configuration of a language model's folder; the weights are not looked at."""
    return read_config_of(folder, TokenFormerConfig)


def read_tokenformer_config(folder: str | os.PathLike) -> TokenFormerBaseConfig:
    """The configuration of any TokenFormer's folder, of language or of images."""
    return read_config_of(folder, TokenFormerBaseConfig)


def read_model(folder: str | os.PathLike, device: str | None = "cpu") -> TokenFormerForCausalLM:
    """The language model of a folder, as `read_tokenformer` reads it."""
    read_config(folder)
    return read_tokenformer(folder, device)


def read_tokenformer(folder: str | os.PathLike, device: str | None = "cpu", **options: Any) -> Any:
    """The model of a folder in its saved dtype, for use, not for training. A device of None is the fastest there is.

    Of from_pretrained's `options` a dtype and a configuration may be given.
    """
    kind = MODELS[type(read_tokenformer_config(folder))]
    target = _device(device)
    model, info = _weights(kind, folder, **options)
    # transformers only warns of these, and draws what is missing at random.
    wrong = wrong_keys(info["missing_keys"], info["unexpected_keys"])
    if wrong:
        raise BadFileError(f"{folder} {wrong}; do the weights belong to its config.json?")
    return model.to(target)


def read_any_model(
    name: str | os.PathLike, device: str | None = "cpu", auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """A model, ours or another of transformers: that of a folder, or of a name on the Hub.

    `auto` is the Auto class of what it must do: AutoModelForCausalLM or AutoModelForImageClassification.
    """
    folder = Path(name)
    if not folder.exists() and HUB_NAME.fullmatch(str(name)):
        target = _device(device)
        try:
            model, info = _from_pretrained(auto, str(name))
        except Exception as error:  # transformers and the Hub's client raise many kinds, most for a wrong name
            raise BadRequestError(
                f"{name} does not exist here, and no model of that name was loaded from the Hub: "
                f"{one_line(error).split('. ')[0]}"
            ) from error
    else:
        config, (ours, what) = read_any_config(folder), USES[auto]
        if isinstance(config, ours):
            return read_tokenformer(folder, device)
        if type(config) not in auto._model_mapping:
            raise BadRequestError(f"{folder} holds a {config.model_type} model, and {what} is needed")
        target = _device(device)
        model, info = _weights(auto, folder)
    _check_whole(name, info)
    return model.to(target)


def read_own_config(folder: str | os.PathLike) -> Any:
    """The configuration of a TokenFormer, or of a model that was adopted; any other is refused."""
    config = read_any_config(Path(folder))
    if not isinstance(config, TokenFormerBaseConfig) and record_of(config) is None:
        raise BadRequestError(
            f"{folder} holds a {config.model_type} model, and a TokenFormer is needed; tokenformer adopt makes one of "
            "the families in docs/adopting.md"
        )
    return config


def read_own_model(folder: str | os.PathLike, device: str | None = "cpu") -> PreTrainedModel:
    """The model of such a configuration, for use, not for training."""
    ours = isinstance(read_own_config(folder), TokenFormerBaseConfig)
    return read_tokenformer(folder, device) if ours else read_host(folder, device)


def local_folder(name: str | os.PathLike) -> Path:
    """The folder of a model: the one of that name, or what the Hub has under it, fetched."""
    folder = Path(name)
    if folder.exists() or not HUB_NAME.fullmatch(str(name)):
        return folder
    try:
        return Path(snapshot_download(str(name), allow_patterns=[*HUB_FILES, *TOKENIZER_FILES]))
    except Exception as error:  # the Hub's client raises many kinds, most for a wrong name
        raise BadRequestError(
            f"{name} does not exist here, and no model of that name came from the Hub: {one_line(error).split('. ')[0]}"
        ) from error


def read_host(folder: str | os.PathLike, device: str | None = "cpu", dtype: str = "auto") -> PreTrainedModel:
    """The model of a folder in the class that its config.json names, whatever its task is."""
    config, target = read_any_config(Path(folder)), _device(device)
    model, info = _weights(_named_class(config), folder, dtype=dtype)
    _check_whole(folder, info)
    return model.to(target)


def empty_host(config: Any) -> PreTrainedModel:
    """The model of a configuration as `read_own_model` makes it, adopted layers in place, on the meta device."""
    kind = _named_class(config)
    with torch.device("meta"):
        model = kind(config)
        record = record_of(config)
        if record is not None:
            record.put_into(model)
    return model


def _named_class(config: Any) -> Any:
    ours, (name, *_) = MODELS.get(type(config)), config.architectures or [""]
    if ours is None and not hasattr(transformers, name):
        # The model without its head would load, and nobody would miss it.
        raise BadRequestError(
            f"its config.json names {name or 'no class'} under architectures, which transformers has not; load the "
            "model with your own code, and use adopt() or grow()"
        )
    return ours or getattr(transformers, name)


def _check_whole(name: str | os.PathLike, info: dict[str, Any]) -> None:
    # What is there and not needed does no harm: old checkpoints of others hold masks and the like.
    if info["missing_keys"]:
        raise BadFileError(f"{name} {wrong_keys(info['missing_keys'], [])}; do the weights belong to its config.json?")


def read_any_config(folder: Path) -> Any:
    """The configuration of any model that transformers knows."""
    if not folder.exists():
        raise BadRequestError(f"{folder} does not exist; check the path")
    if not (folder / "config.json").is_file():
        raise BadRequestError(f"{folder} is not a model folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a broken file, a value of the wrong type, a model unknown to transformers
        raise BadFileError(f"{folder / 'config.json'} cannot be read: {one_line(error)}") from error


def _weights(kind: Any, folder: str | os.PathLike, **options: Any) -> tuple[Any, dict[str, Any]]:
    try:
        return _from_pretrained(kind, folder, local_files_only=True, **options)
    except Exception as error:  # safetensors, transformers and torch each have their own for a broken file
        raise BadFileError(f"the weights in {folder} cannot be read: {one_line(error)}") from error


def _from_pretrained(kind: Any, name: str | os.PathLike, **options: Any) -> tuple[Any, dict[str, Any]]:
    return kind.from_pretrained(name, **{"dtype": "auto", "output_loading_info": True, **options})


def wrong_keys(missing: Collection[Any], unexpected: Collection[Any]) -> str:
    """The part of an error message that names them; empty if there are none."""
    problems = (("lacks", missing), ("has the unexpected", unexpected))
    return " and ".join(f"{problem} {_listed(keys)}" for problem, keys in problems if keys)


def _listed(keys: Collection[Any], most: int = 6) -> str:
    # By number first, so that stage 10 follows stage 9.
    ordered = sorted(map(str, keys), key=lambda key: ([int(number) for number in re.findall(r"\d+", key)], key))
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a name torch does not know, or hardware that is not here
        raise BadRequestError(f"device {name!r} cannot be used: {one_line(error)[:100]}") from error
