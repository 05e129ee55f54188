"""What is measured of a model's units: selectivity, one trigger for each, and how concentrated effects are.

Enters: a finished model. Leaves: by role, numbers over its units (quantiles and shares), ready for JSON.
"""

from typing import Any

import torch
from lab.data import held_out
from torch import Tensor

from tokenformer.inside.statistics import Tally

from .effects import ablated, direct
from .triggers import ALTERNATIVES, FAMILIES, REGIONS, codes_of, firing, triggers
from .units import BEGIN, activations

BLOCKS, LENGTH = 64, 256  # of each of the two texts
LOGIT_BLOCKS = 16  # of which every position is asked for direct effects
ABLATED, ABLATED_LENGTH = 8, 64  # contexts in which every unit is taken away
# What firing is: the share of the positions where an activation is largest. The first, by size, is the one that counts.
FIRINGS = {"1 %": 0.01, "0.2 %": 0.002}
MAIN, GOOD = "1 %", 0.5
QUANTILES = torch.linspace(0, 1, 21)


def look_into(model: Any, text: str, scale: int = 1) -> dict[str, Any]:
    """Everything of one model; `scale` divides how much is read."""
    chosen, judged = (held_out(text, part, LENGTH, BLOCKS // scale) for part in ("validation", "test"))
    contexts = held_out(text, "test", ABLATED_LENGTH, ABLATED // scale)
    effects = {"direct": direct(model, judged[:: max(1, len(judged) // max(1, LOGIT_BLOCKS // scale))])}
    effects["ablation"] = ablated(model, contexts)
    carried = {
        kind: {role: {"units": one["units"], "carry": quantiles(one["carry"])} for role, one in by_role.items()}
        for kind, by_role in effects.items()
    }
    return {"units": _units(model, chosen, judged), "effects": carried}


def _units(model: Any, chosen: Tensor, judged: Tensor) -> dict[str, Any]:
    codes = codes_of(chosen, BEGIN), codes_of(judged, BEGIN)
    heads = chosen[:, BEGIN:].flatten()
    found: dict[str, dict[str, list[Tensor]]] = {}
    there = activations(model, judged)
    for (role, layer), rows in activations(model, chosen).items():
        rows_there = there[role, layer]
        numbers = found.setdefault(role, {})
        _put(numbers, "selectivity", _selectivity(rows, heads))
        for name, share in FIRINGS.items():
            level = firing(rows, share)
            fires, fires_there = rows.abs() > level, rows_there.abs() > level
            _put(numbers, f"selectivity of firing, {name}", _selectivity(fires.float(), heads))
            for alternatives in (1, ALTERNATIVES):
                trigger = triggers(codes[0], fires, codes[1], fires_there, alternatives)
                for key in trigger._fields:
                    _put(numbers, f"{key}, {name}, {alternatives}", getattr(trigger, key))
    return {role: _summed_up(numbers) for role, numbers in found.items()}


def _selectivity(rows: Tensor, heads: Tensor) -> Tensor:
    tally = Tally(rows.shape[1])
    tally.add(rows, heads, torch.ones(rows.shape[1], 1))
    return tally.statistics(torch.zeros(rows.shape[1], dtype=torch.long)).selectivity


def _put(numbers: dict[str, list[Tensor]], key: str, some: Tensor) -> None:
    numbers.setdefault(key, []).append(some)


def _summed_up(numbers: dict[str, list[Tensor]]) -> dict[str, Any]:
    joined = {key: torch.cat(parts) for key, parts in numbers.items()}
    said: dict[str, Any] = {"units": len(next(iter(joined.values())))}
    for key, values in joined.items():
        if key.startswith("family"):
            names, good = (*FAMILIES, REGIONS), joined[key.replace("family", "f1")] >= GOOD
            counts = torch.bincount(values[good], minlength=len(names)).tolist()
            said[key] = {name: count for name, count in zip(names, counts, strict=True) if count}
        else:
            said[key] = quantiles(values)
            if key.startswith("f1"):
                said[f"good {key}"] = round((values >= GOOD).float().mean().item(), 4)
    return said


def quantiles(values: Tensor) -> dict[str, Any]:
    """Their mean and 21 quantiles, which a figure is made of."""
    at = values.double().quantile(QUANTILES.double())
    return {"mean": round(values.double().mean().item(), 4), "quantiles": [round(one, 4) for one in at.tolist()]}
