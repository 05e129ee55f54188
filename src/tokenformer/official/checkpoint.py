"""The authors' CHECKPOINT.bin: its names, and reading it with every key and shape checked.

Enters: a file that torch.save wrote from a dictionary of tensors. Leaves: the tensors, mapped from the file.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadFileError
from ..models.loading import wrong_keys

EMBEDDING = "sequential.0.word_embeddings.weight"
PATTENTIONS = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.proj": "attention.out",
    "mlp": "ffn",
}


def official_names(num_layers: int, tied: bool) -> dict[str, str]:
    """Our name for each of theirs. They number a pipeline's stages, of which 1 and L + 2 hold no weights."""
    names = {EMBEDDING: "model.embed_tokens.weight"}
    for i in range(num_layers):
        for theirs, ours in PATTENTIONS.items():
            for part in ("key", "value"):
                name = f"sequential.{i + 2}.{theirs}.{part}_param_tokens"
                names[name] = f"model.layers.{i}.{ours}.{part}_tokens"
    for part in ("weight", "bias"):
        names[f"sequential.{num_layers + 3}.norm.{part}"] = f"model.norm.{part}"
    if not tied:
        names[f"sequential.{num_layers + 4}.final_linear.weight"] = "lm_head.weight"
    return names


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by the authors' names. No code in the file is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Files from before torch 1.6 are bare pickles, which cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # bytes that are no checkpoint make the unpickler fail in every way there is
        raise BadFileError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error
    if not isinstance(loaded, dict):
        raise BadFileError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors")
    for key, value in loaded.items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            raise BadFileError(f"{path}: {key!r} is a {type(value).__name__}, not a dense tensor with values")
    return loaded


def check_keys(tensors: Mapping[str, Tensor], names: Iterable[str], path: Path) -> None:
    """Every expected key is there, and no other."""
    names = set(names)
    wrong = wrong_keys(names - tensors.keys(), tensors.keys() - names)
    if wrong:
        raise BadFileError(f"{path} {wrong}; do the settings belong to this checkpoint?")


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], path: Path) -> None:
    """Every tensor has the shape that the settings say, and all have one floating dtype."""
    for key, shape in shapes.items():
        given = tensors[key].shape
        if given != shape:
            raise BadFileError(f"{path}: {key} is {list(given)}; by the settings it must be {list(shape)}")
    dtype = tensors[EMBEDDING].dtype
    for key, tensor in tensors.items():
        if tensor.dtype != dtype or not dtype.is_floating_point:
            raise BadFileError(
                f"{path}: {key} is {_dtype(tensor.dtype)} and {EMBEDDING} is {_dtype(dtype)}; "
                "one floating dtype for all is needed"
            )


def _reason(error: Exception) -> str:
    unsafe = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if unsafe:
        return f"it holds {unsafe[1]}, and only tensors are loaded"
    if isinstance(error, PermissionError):
        return "permission denied"
    return "it is truncated, or not a file that torch.save wrote"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
