"""Reading a model folder, with one line for whatever can be wrong with it.

Enters: a folder that `save_pretrained` wrote. Leaves: its configuration, or the model with every weight read. Nothing
is downloaded, and nothing that is missing is drawn at random.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..errors import BadFileError, BadRequestError, one_line
from .config import TokenFormerConfig
from .language import TokenFormerForCausalLM


def read_config(folder: str | os.PathLike) -> TokenFormerConfig:
    """The configuration of a model folder; the weights are not looked at."""
    folder = Path(folder)
    if not folder.exists():
        raise BadRequestError(f"{folder} does not exist; check the path")
    if not (folder / "config.json").is_file():
        raise BadRequestError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a broken file, a value of the wrong type, a model unknown to transformers
        raise BadFileError(f"{folder / 'config.json'} cannot be read: {one_line(error)}") from error
    if not isinstance(config, TokenFormerConfig):
        raise BadRequestError(f"{folder} holds a {config.model_type} model, and a tokenformer is needed")
    return config


def read_model(folder: str | os.PathLike, device: str | None = "cpu") -> TokenFormerForCausalLM:
    """The model of a folder in its saved dtype, for use, not for training. A device of None is the fastest there is."""
    read_config(folder)
    target = _device(device)
    try:
        loaded: Any = TokenFormerForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # safetensors, transformers and torch each have their own for a broken file
        raise BadFileError(f"the weights in {folder} cannot be read: {one_line(error)}") from error
    model, info = loaded
    # transformers only warns of these, and draws what is missing at random.
    wrong = wrong_keys(info["missing_keys"], info["unexpected_keys"])
    if wrong:
        raise BadFileError(f"{folder} {wrong}; do the weights belong to its config.json?")
    return model.to(target)


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
