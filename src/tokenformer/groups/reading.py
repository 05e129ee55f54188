"""What a folder of a token group says, checked: the file that describes it, and its numbers.

Enters: a folder that `save_tokens` wrote. Leaves: its facts and its tensors; or one line about what is damaged. Pickles
are not read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import BadFileError, BadRequestError, shown
from ..io import read_json
from ..pattention.functional import KINDS
from ..pattention.groups import NORMS

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "tokens.safetensors"
TYPE = "TOKENS"
PARTS = ("key_tokens", "value_tokens", "tau")
KEY_BIAS = "key_bias"  # of groups that have one


def read_facts(folder: Path) -> dict[str, Any]:
    """What a saved group says of itself."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise BadRequestError(f"{folder} is not a token group: it has no {CONFIG_FILE}; save_tokens writes one")
    facts = read_json(path)
    if not isinstance(facts, dict) or facts.get("peft_type") != TYPE:
        kind = facts.get("peft_type") if isinstance(facts, dict) else None
        raise BadRequestError(f"{path} is of a {kind or 'foreign'} adapter, not of a token group; load it with peft")
    for key, is_right in CHECKS.items():
        if not is_right(facts.get(key)):
            given = shown(facts[key], 60) if key in facts else "missing"
            raise BadFileError(f"{path} is damaged: {key} is {given}; save the group again")
    if facts["kinds"].keys() != facts["layers"].keys():
        raise BadFileError(f"{path} is damaged: layers and kinds do not name the same layers; save the group again")
    return facts


def _is_base(found: Any) -> bool:
    """Whether this is what `note_base` writes."""
    if not isinstance(found, dict):
        return False
    kept, numbers = found.get("kept"), found.get("numbers")
    sound = isinstance(found.get("model_type"), str | None) and type(found.get("blocks")) is int
    sound = sound and type(found.get("adopted")) is bool
    sound = sound and isinstance(kept, list) and all(isinstance(name, str) for name in kept)
    return sound and isinstance(numbers, dict) and all(map(_are_numbers, numbers.values()))


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(type(one) in (int, float) and math.isfinite(one) for one in found)


def _are_counts(found: Any) -> bool:
    return isinstance(found, dict) and bool(found) and all(type(n) is int and n > 0 for n in found.values())


def _are_kinds(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(kind, str) and kind in KINDS for kind in found.values())


CHECKS = {
    "name": lambda found: isinstance(found, str),
    "norm": lambda found: isinstance(found, str) and found in NORMS,
    "layers": _are_counts,
    "kinds": _are_kinds,
    "base": _is_base,
}


def read_tensors(folder: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers of a saved group, by their names in the model that it was saved from."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = [each.name for each in folder.glob("*") if each.suffix in (".bin", ".pt", ".pth", ".pkl")]
        why = f"; {pickles[0]} is a pickle, which can run any program and is not read" if pickles else ""
        raise BadFileError(f"{folder} has no {WEIGHTS_FILE}{why}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
    for layer in facts["layers"]:
        for part in PARTS:
            key = tensor_name(layer, facts["name"], part)
            wrong = _wrong(tensors.get(key), part)
            if wrong:
                raise BadFileError(f"{path} is damaged: {key} {wrong}; save the group again")
        key = tensor_name(layer, facts["name"], KEY_BIAS)
        if key in tensors and (tensors[key].shape != (facts["layers"][layer],) or _wrong(tensors[key], KEY_BIAS)):
            raise BadFileError(f"{path} is damaged: {key} is not a finite number for each token; save the group again")
    return tensors


def _wrong(tensor: Tensor | None, part: str) -> str | None:
    """What is wrong with a tensor, whatever layer it is for."""
    if tensor is None:
        return "is missing"
    if not tensor.is_floating_point():
        return f"is of {tensor.dtype}, and floating-point numbers are needed"
    if part == "tau" and tensor.shape:
        return f"has the shape {list(tensor.shape)}, and it is one number"
    return None if tensor.isfinite().all() else "has numbers that are not finite"


def tensor_name(layer: str, name: str, part: str) -> str:
    """What a part of a group is called in a model, and in its file."""
    return f"{layer}.token_groups.{name}.{part}"
