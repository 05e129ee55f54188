"""Which base a group was trained beside: noted with it, and compared with the model that it is loaded beside.

    model_type   its family
    blocks       how many blocks there were
    adopted      whether it was adopted, which changes what its layers get
    kept         the groups that were part of it
    numbers      a few of its embedding, of two matrices of every block, and of these groups, by their names

Enters: a model. Leaves: these facts; or one line that says how a model differs from them. A base may have grown since,
in tokens, in depth or by groups, been cast or quantised: then what can still be compared is.
"""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadRequestError
from ..growth.plan import find_stack
from ..models import Adopted, growth_records
from ..models.blocks import BlockGrowth
from ..models.kept_groups import kept_names
from ..pattention.groups import layers_with_groups
from .roles import blocks_of, within_groups

# The first rows of a matrix, which growth leaves as they are, and as many columns, evenly spread.
ROWS = COLUMNS = 4
TOLERANCE = 2**-6  # of the largest of a matrix's numbers: casting rounds them
READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # fp8 needs scales that are kept elsewhere


def note_base(model: nn.Module, name: str) -> dict[str, Any]:
    """The facts about a model to be saved with its group `name`."""
    kept = [other for other in kept_names(model) if other != name]
    parameters = dict(model.named_parameters())
    looked_at = {one: _numbers(parameters[one]) for one in _looked_at(model, parameters, kept)}
    return {
        "model_type": _model_type(model),
        "blocks": len(_blocks(model)),
        "adopted": _is_adopted(model),
        "kept": kept,
        "numbers": {one: numbers for one, numbers in looked_at.items() if all(map(math.isfinite, numbers))},
    }


def refuse_another_base(model: nn.Module, folder: Path, base: Mapping[str, Any]) -> None:
    """Refuse another family, and another model of the family."""
    ours = _model_type(model)
    if base["model_type"] != ours:
        raise BadRequestError(
            f"{folder} was trained beside a {base['model_type']} model, and this is a {ours} model; load that one"
        )
    difference = _difference(model, base)
    if difference:
        raise BadRequestError(
            f"{folder} was trained beside another base: {difference}; load that one, or pass check_base=False if it "
            "was trained on"
        )


def called_now(model: nn.Module, name: str, base: Mapping[str, Any]) -> str:
    """What a layer or parameter of the base is called in a model that has grown in depth since."""
    return _since(model, name, base)[0]


def _since(model: nn.Module, name: str, base: Mapping[str, Any]) -> tuple[str, int]:
    """The same, with the number of blocks that the base had and all that have come since."""
    blocks = base["blocks"]
    for _, record in growth_records(model):
        for step in record.growth_history or []:
            growth = BlockGrowth(**step["blocks"]) if "blocks" in step else None
            if growth is not None and growth.before == blocks:
                name, blocks = growth.moved(name, find_stack(model)[0]), growth.after
    return name, blocks


def _difference(model: nn.Module, base: Mapping[str, Any]) -> str | None:
    """In words, the first way in which a model differs from what is known of the base; None if there is none."""
    if base["adopted"] != _is_adopted(model):
        return "it was adopted, and this model is not" if base["adopted"] else "it was not adopted, and this model is"
    here, (_, expected) = len(_blocks(model)), _since(model, "", base)
    if here != expected:
        why = ", which its growth does not explain" if growth_records(model) else ""
        return f"it had {base['blocks']} blocks, and this model has {here}{why}"
    missing = [name for name in base["kept"] if name not in kept_names(model)]
    if missing:
        return f"the token group {missing[0]!r} was part of it, and this model does not have it"
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for saved, theirs in base["numbers"].items():
        name = called_now(model, saved, base)
        if name.rpartition(".")[0] not in modules:
            return f"it had {saved}, which this model does not have"
        # A layer that is quantised has its numbers in another form.
        if name in parameters and _readable(parameters[name]) and not _same(theirs, _numbers(parameters[name])):
            return f"its {saved} has other numbers than this model's"
    return None


def _same(theirs: list[float], ours: list[float]) -> bool:
    """Whether the numbers of a matrix are those of one that may have grown, by rows, or been cast."""
    allowed = TOLERANCE * max(map(abs, theirs), default=0.0)
    pairs = zip(theirs, ours, strict=False)
    return len(ours) >= len(theirs) and all(abs(a - b) <= allowed for a, b in pairs)


def _model_type(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _is_adopted(model: nn.Module) -> bool:
    return any(isinstance(record, Adopted) for _, record in growth_records(model))


def _blocks(model: nn.Module) -> list[str]:
    """The outermost blocks, in order."""
    every = blocks_of(model)
    inner = {name for name in every if any(name.startswith(f"{other}.") for other in every)}
    return [name for name, _ in model.named_modules() if name in every - inner and not within_groups(name)]


def _looked_at(model: nn.Module, parameters: Mapping[str, Tensor], kept: list[str]) -> list[str]:
    """The names of the matrices whose numbers are noted."""
    base = [name for name, one in parameters.items() if _readable(one) and not within_groups(name)]
    # Growth by split shares values out over copies, and keeps keys.
    base = [name for name in base if not name.endswith(".value_tokens")]
    of_blocks = [[name for name in base if name.startswith(f"{block}.")] for block in _blocks(model)]
    of_groups = [
        [f"{layer}.token_groups.{name}.key_tokens" for layer, groups in layers_with_groups(model) if name in groups][:1]
        for name in kept
    ]
    first_and_last = ([names[0], names[-1]] for names in of_blocks if names)
    return list(dict.fromkeys([*_embedding(model, parameters), *chain(*first_and_last), *chain(*of_groups)]))


def _embedding(model: nn.Module, parameters: Mapping[str, Tensor]) -> list[str]:
    """The name of the matrix that a model of transformers reads its input with, if it has one."""
    try:
        module = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return []
    own = {id(one) for one in module.parameters()} if isinstance(module, nn.Module) else set()
    return [name for name, one in parameters.items() if id(one) in own and _readable(one)][:1]


def _readable(parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of plain numbers: all there, on this device, and not quantised."""
    plain = type(parameter.data) is Tensor and parameter.dtype in READABLE and not parameter.is_meta
    return plain and parameter.dim() >= 2 and parameter.numel() > 0


@torch.no_grad()
def _numbers(parameter: Tensor) -> list[float]:
    flat = parameter.detach()[:ROWS].flatten(1)
    few = flat[:, :: max(1, flat.shape[1] // COLUMNS)][:, :COLUMNS]
    return [float(f"{value:.4g}") for value in few.double().flatten().tolist()]
