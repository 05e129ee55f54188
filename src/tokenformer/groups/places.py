"""Where a group of tokens goes: beside which modules of a model, and how wide they are.

Enters: any torch model and `where`: a role (ffn or mlp, qkv, out, attention, all), or names or patterns of modules.
Leaves: by name, the modules with their widths; or a one-line error, before anything is touched.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..adoption.families import FAMILIES
from ..errors import BadRequestError, did_you_mean
from ..models import Adopted, growth_records
from ..pattention import Pattention
from ..pattention.groups import TokenGroups

ROLES = ("ffn", "mlp", "qkv", "out", "attention", "all")
# What libraries call a feed-forward network, and the part of a path that tells attention.
FFN_NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "densereludense", "densegatedactdense")
ATTENTION_NAMES = ("attn", "attention")
PATTENTION_KIND = "l2_gelu"  # of groups beside what is not a Pattention


@dataclass(frozen=True)
class Place:
    """A module that groups may stand beside."""

    d_in: int
    d_out: int
    kind: str


def places(model: nn.Module, where: str | Iterable[str]) -> dict[str, Place]:
    """The modules that `where` means, in the order of the model."""
    wanted = [where] if isinstance(where, str) else list(where)
    if not wanted:
        raise BadRequestError(f"add_tokens: where is empty; give one of {', '.join(ROLES)}, or names of modules")
    names: set[str] = set()
    for one in wanted:
        found = _of_role(model, one) if one in ROLES else _of_pattern(model, one)
        if not found:
            raise BadRequestError(_nothing_found(model, one))
        names |= found
    return {name: place_of(model, name) for name, _ in model.named_modules() if name in names}


def place_of(model: nn.Module, name: str) -> Place:
    """The widths of a module: a layer's own; else from its first linear layer to its last, or those of the model."""
    module = model.get_submodule(name)
    own = widths(module)
    if own is not None:
        return Place(*own, module.kind if isinstance(module, Pattention) else PATTENTION_KIND)
    inner = [found for part in module.modules() if (found := widths(part)) is not None]
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if inner and inner[0][0] == hidden:
        return Place(hidden, hidden, PATTENTION_KIND)
    if not inner or inner[0][0] != inner[-1][1]:
        raise BadRequestError(
            f"add_tokens: {name!r} is a {type(module).__name__}, of which the widths cannot be told; name linear layers"
        )
    return Place(inner[0][0], inner[-1][1], PATTENTION_KIND)


def widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output of a linear layer, also one that is quantised or transposed, and of a Pattention."""
    if isinstance(module, Pattention):
        return module.d_in, module.d_out
    for d_in, d_out in (("in_features", "out_features"), ("nx", "nf")):
        if isinstance(getattr(module, d_in, None), int) and isinstance(getattr(module, d_out, None), int):
            return getattr(module, d_in), getattr(module, d_out)
    return None


def _of_role(model: nn.Module, role: str) -> set[str]:
    parts = _parts(model)
    if role in ("ffn", "mlp"):
        return parts["ffn"]
    if role == "attention":
        return parts["qkv"] | parts["out"]
    return set().union(*parts.values()) if role == "all" else parts[role]


def _parts(model: nn.Module) -> dict[str, set[str]]:
    """The layers of every role: those of blocks, without embeddings and heads."""
    found: dict[str, set[str]] = {"ffn": set(), "qkv": set(), "out": set()}
    for name, module in model.named_modules():
        path = name.split(".")
        inside = any(name.startswith(f"{ffn}.") for ffn in found["ffn"])
        if not any(part.isdigit() for part in path) or inside or _within_groups(model, name):
            continue
        if path[-1].lower() in FFN_NAMES and (widths(module) is not None or len(list(module.children())) > 1):
            found["ffn"].add(name)
        elif any(sign in part.lower() for part in path[:-1] for sign in ATTENTION_NAMES) and widths(module) is not None:
            found["out" if _writes(path) else "qkv"].add(name)
    return found if found["ffn"] else {**found, "ffn": _of_family(model)}


def _writes(path: list[str]) -> bool:
    """Whether a linear layer of an attention is the one behind it."""
    return path[-1] in ("o", "o_proj", "c_proj", "out", "dense", "out_proj", "out_lin", "proj")


def _of_family(model: nn.Module) -> set[str]:
    """Feed-forward networks that are no module of their own: of BERT and its relatives, their second linear layers."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None:
        return set()
    blocks = "|".join(re.escape(fed.ffn[2]) for fed in family.feds if fed.ffn)
    pattern = re.compile(rf"(.*\.)?{re.escape(family.blocks)}\.\d+\.({blocks})")
    return {name for name, _ in model.named_modules() if blocks and pattern.fullmatch(name)}


def _of_pattern(model: nn.Module, pattern: str) -> set[str]:
    return {
        name
        for name, _ in model.named_modules()
        if name and fnmatchcase(name, pattern) and not _within_groups(model, name)
    }


def _within_groups(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return "token_groups" in parts or isinstance(model.get_submodule(name), TokenGroups)


def _nothing_found(model: nn.Module, where: str) -> str:
    linears = [name for name, module in model.named_modules() if widths(module) is not None and name]
    if not linears:
        return "add_tokens: the model has no linear layer and no Pattention"
    if where in ROLES:
        return (
            f"add_tokens: no layers were recognised as {where!r} in a {type(model).__name__}; give names or patterns "
            f"of modules, as where='*.{linears[0].rpartition('.')[2]}'"
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
