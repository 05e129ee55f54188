"""What makes a unit fire, said as a pattern of text: chosen on one text, judged on another.

Enters: the bytes before and at every position, and whether units fire there. Leaves: for each unit the pattern that
foretells its firing best, and its precision, recall and F1 on the text that it was not chosen on.

Patterns are families of n-grams that end at the position: of 1 to 5 bytes, of classes of bytes, of both mixed; and the
region that the position is in, such as a link, a tag or a number. A trigger is one of them, or up to four alternatives
of one family, as in the regular expression `(a|b|c|d)$`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ALTERNATIVES = 4
CLASSES = ((97, 122, 1), (65, 90, 2), (48, 57, 3), (9, 13, 4), (32, 32, 5), (128, 255, 6))  # all others are 0
BRACKETS = ((b"[", b"]"), (b"<", b">"), (b"{", b"}"), (b"(", b")"), (b"=", b"\n"), (b"&", b";"), (b"*", b"\n"))
# A family is a row of what is looked at, from the position backwards: a byte, its class, or nothing.
FAMILIES = ("b", "bb", "bbb", "bbbb", "bbbbb", "c", "cc", "ccc", "cccc", "bc", "bcc", "bbc", "cb", "cbb", "-b", "-bb")
REGIONS = "region"


class Trigger(NamedTuple):
    """How well a pattern foretells the firing of every unit: [units] each."""

    precision: Tensor
    recall: Tensor
    f1: Tensor
    family: Tensor  # its number in FAMILIES, or one more for the regions


def codes_of(ids: Tensor, begin: int) -> dict[str, Tensor]:
    """Of every family a number for what stands there, [positions] of the blocks [blocks, length] from `begin` on."""
    data = ids.numpy().astype(np.int64)
    classes = np.zeros_like(data)
    for low, high, number in CLASSES:
        classes[(data >= low) & (data <= high)] = number
    found = {}
    for family in FAMILIES:
        code = np.zeros_like(data)
        for back, what in enumerate(family):
            if what != "-":
                looked_at = data if what == "b" else classes
                size = 256 if what == "b" else 8
                shifted = np.zeros_like(data)
                shifted[:, back:] = looked_at[:, : data.shape[1] - back]
                code = code * size + shifted
        found[family] = code
    found[REGIONS] = _regions(data)
    return {family: torch.from_numpy(code[:, begin:].reshape(-1).copy()) for family, code in found.items()}


def _regions(data: np.ndarray) -> np.ndarray:
    """Which brackets, tags, headings and the like are open at a position."""
    code = np.zeros_like(data)
    for opened, closed in BRACKETS:
        is_open = np.zeros(len(data), dtype=bool)
        for at in range(data.shape[1]):
            is_open = (is_open | (data[:, at] == opened[0])) & (data[:, at] != closed[0])
            code[:, at] = code[:, at] * 2 + is_open
    return code


def triggers(
    chosen: dict[str, Tensor], fires: Tensor, judged: dict[str, Tensor], fires_there: Tensor, alternatives: int
) -> Trigger:
    """The best pattern of every unit.

    chosen, judged: codes of the two texts. fires, fires_there: [positions, units], whether a unit fires.
    """
    units = fires.shape[1]
    best = torch.zeros(units)
    family_of = torch.zeros(units, dtype=torch.long)
    predicted = torch.zeros(fires_there.shape, dtype=torch.bool)
    wanted = fires.float()
    total = wanted.sum(0)
    for number, family in enumerate((*FAMILIES, REGIONS)):
        values, places = chosen[family].unique(return_inverse=True)
        sizes = torch.bincount(places, minlength=len(values)).float()
        hits = torch.zeros(len(values), units).index_add_(0, places, wanted)
        patterns, f1 = _greedy(hits, sizes, total, alternatives)
        better = (f1 > best).nonzero().flatten()
        best[better], family_of[better] = f1[better], number
        predicted[:, better] = _matches(judged[family], values, patterns[:, better])
    return _judged(predicted, fires_there, family_of)


def _greedy(hits: Tensor, sizes: Tensor, total: Tensor, alternatives: int) -> tuple[Tensor, Tensor]:
    """Of each unit the numbers of up to so many patterns, -1 for none, [alternatives, units], and their F1.

    Patterns of a family exclude each other, so what they hit adds up.
    """
    units = hits.shape[1]
    hit, size, f1 = torch.zeros(units), torch.zeros(units), torch.zeros(units)
    found = torch.full((alternatives, units), -1)
    hits = hits.clone()
    for i in range(alternatives):
        after = 2 * (hit + hits) / (size + sizes.unsqueeze(1) + total)
        best, place = after.max(0)
        more = best > f1
        found[i, more] = place[more]
        hit = torch.where(more, hit + hits.gather(0, place.unsqueeze(0))[0], hit)
        size, f1 = torch.where(more, size + sizes[place], size), torch.maximum(best, f1)
        hits.scatter_(0, place.unsqueeze(0), -1e9)  # not a second time
    return found, f1


def _matches(codes: Tensor, values: Tensor, patterns: Tensor) -> Tensor:
    """Where one of the patterns stands, [positions, units]."""
    place = torch.searchsorted(values, codes).clamp(max=len(values) - 1)
    place[values[place] != codes] = len(values)  # what the first text does not have
    table = torch.zeros(len(values) + 1, patterns.shape[1], dtype=torch.bool)
    for row in patterns:
        unit = (row >= 0).nonzero().flatten()
        table[row[unit], unit] = True
    return table[place]


def _judged(predicted: Tensor, fires: Tensor, family: Tensor) -> Trigger:
    hit = (predicted & fires).sum(0).float()
    precision = hit / predicted.sum(0).clamp(min=1)
    recall = hit / fires.sum(0).clamp(min=1)
    return Trigger(precision, recall, 2 * precision * recall / (precision + recall).clamp(min=1e-9), family)


def firing(rows: Tensor, share: float) -> Tensor:
    """Above which size of an activation a unit fires, [units]: so that it does in `share` of the positions."""
    return rows.abs().kthvalue(max(1, round((1 - share) * len(rows))), dim=0).values
