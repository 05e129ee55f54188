"""Where a group of tokens goes: beside which modules of a model, how wide they are, and on which device.

Enters: any torch model and `where`: a role (ffn or mlp, qkv, out, attention, all), or names or patterns of modules.
Leaves: by name, the modules with their widths; or a one-line error, before anything is touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from ..errors import BadRequestError, did_you_mean, shown
from ..models import Adopted, growth_records
from ..pattention import Pattention
from .roles import LISTS, blocks_of, called_ffn, in_attention, parts_of, reads_weights, widths, within_groups

ROLES = ("ffn", "mlp", "qkv", "out", "attention", "all")
PATTENTION_KIND = "l2_gelu"  # of groups beside what is not a Pattention


@dataclass(frozen=True)
class Place:
    """A module that groups may stand beside."""

    d_in: int
    d_out: int
    kind: str


def asked_for(where: Any) -> list[str]:
    """The roles, names and patterns that `where` gives; a one-line error if it gives none."""
    wanted = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else []
    if not wanted or not all(isinstance(one, str) for one in wanted):
        raise BadRequestError(
            f"add_tokens: where={shown(where)} was given; give one of {', '.join(ROLES)}, or names of modules"
        )
    return wanted


def places(model: nn.Module, where: str | Iterable[str]) -> dict[str, Place]:
    """The modules that `where` means, in the order of the model."""
    names: set[str] = set()
    for one in asked_for(where):
        found = _of_role(model, one) if one in ROLES else _of_pattern(model, one)
        if not found:
            raise BadRequestError(_nothing_found(model, one))
        if one not in ROLES:
            _check_called_with_rows(model, found)
        names |= found
    return {name: place_of(model, name) for name, _ in model.named_modules() if name in names}


def place_of(model: nn.Module, name: str) -> Place:
    """The widths of a module: a layer's own; else from its first linear layer to its last, or those of the model."""
    module = model.get_submodule(name)
    own = widths(module)
    if own is not None:
        return Place(*own, module.kind if isinstance(module, Pattention) else PATTENTION_KIND)
    inner = [found for part in module.modules() if (found := widths(part)) is not None]
    hidden = _hidden_size(model, name)
    # Experts are no linear layers; what is one beside them, a router or a shared expert, is not the whole network.
    if hidden and (inner[0][0] == hidden if inner else called_ffn(name) and not _convolves(module)):
        return Place(hidden, hidden, PATTENTION_KIND)
    if not inner or inner[0][0] != inner[-1][1]:
        raise BadRequestError(
            f"add_tokens: {name!r} is a {type(module).__name__}, of which the widths cannot be told; name linear layers"
        )
    return Place(inner[0][0], inner[-1][1], PATTENTION_KIND)


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes. Its parameters do not say it if accelerate brings them there for every call.

    A layer that is quantised may have no parameters, and numbers in buffers only.
    """
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):  # several in a row, or one
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.device(device)
    first = next(chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


def _convolves(module: nn.Module) -> bool:
    """Whether rows of a module's input need not be in its last dimension."""
    return any(isinstance(part, _ConvNd) for part in module.modules())


def _hidden_size(model: nn.Module, name: str) -> int | None:
    """The width of the model, or of the tower of several, that a module is in."""
    path = name.split(".")
    for i in range(len(path), -1, -1):
        config = getattr(model.get_submodule(".".join(path[:i])), "config", None)
        if isinstance(found := getattr(config, "hidden_size", None), int):
            return found
    return None


def _of_role(model: nn.Module, role: str) -> set[str]:
    parts = parts_of(model)
    if role in ("ffn", "mlp"):
        return parts["ffn"]
    if role == "attention":
        return parts["qkv"] | parts["out"]
    if role == "all":
        return set().union(*parts.values()) if parts["ffn"] else set()
    return parts[role]


def _of_pattern(model: nn.Module, pattern: str) -> set[str]:
    return {
        name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern) and not within_groups(name)
    }


def _check_called_with_rows(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse modules that are not called, or not with rows of numbers."""
    for name in names:
        why = _why_not(model, name)
        if why:
            raise BadRequestError(
                f"add_tokens: {name!r} {why}; give one of {', '.join(ROLES)}, or names of linear or feed-forward layers"
            )


def _why_not(model: nn.Module, name: str) -> str | None:
    module = model.get_submodule(name)
    if isinstance(module, LISTS):
        return f"is a {type(module).__name__}, which is never called"
    if isinstance(module, PreTrainedModel):
        return f"is a whole model ({type(module).__name__})"
    if reads_weights(model, name):
        return "is inside nn.MultiheadAttention, which reads its weight without calling it"
    if any(isinstance(part, nn.Embedding) for part in module.modules()) and not in_attention(f"{name}."):
        return "holds an embedding, which takes ids and no rows of numbers"
    # Experts may be numbered as blocks are, but have no attention or feed-forward network in them.
    blocks = tuple(f"{name}.{block}." for block in blocks_of(module))
    if any(layer.startswith(blocks) for layer in chain(*parts_of(model).values())):
        return "holds whole blocks"
    return None


def _nothing_found(model: nn.Module, where: str) -> str:
    linears = [name for name, module in model.named_modules() if widths(module) is not None and name]
    if not linears:
        return "add_tokens: the model has no linear layer and no Pattention"
    if where in ROLES:
        what = "a feed-forward network" if where in ("ffn", "mlp", "all") else repr(where)
        return (
            f"add_tokens: where={where!r} was given, and no layers were recognised as {what} in a "
            f"{type(model).__name__}; give names or patterns of modules, as where='*.{linears[0].rpartition('.')[2]}'"
        )
    return f"add_tokens: no module is called {where!r}; {did_you_mean(where, [*ROLES, *linears])}"


def refuse_identities(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse what adoption left in place of a host's layers: a Pattention does their work."""
    removed: dict[int, str] = {
        id(part.base_model.get_submodule(name)): name
        for part, record in growth_records(model)
        if isinstance(record, Adopted)
        for name in record.removed
    }
    for name in names:
        module: Any = model.get_submodule(name)
        if id(module) in removed:
            raise BadRequestError(f"add_tokens: {name!r} does nothing in an adopted model; use where='ffn'")
