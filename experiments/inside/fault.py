"""A wrong spelling in the training text: found in the model by what its units add to the wrong byte, and taken away.

Enters: a model that was trained on "ation" misspelt as "atoin", and the same model trained on for a few steps on text
without the fault. Leaves: how likely the wrong and the right byte are behind "at" where the text has "ation", and the
loss of text without the fault, as it was, without the units that were found, and trained on.

The units are found as a user would: `attribute` says what each that writes to the stream adds to the logit of the wrong
byte, and to that of the right one; those that add most to the difference are the first to go. Which and how many is
chosen on validation text; what is reported is measured on test text.
"""

import tempfile
from typing import Any

import torch
from lab.data import held_out, split
from torch import Tensor
from torch.nn import functional as F

from tokenformer import ablate, attribute, index_tokens

from .effects import writer
from .models import CLEAN, EVERYWHERE, RIGHT, WRONG
from .units import FFN, OUT

SAME = next(i for i, (a, b) in enumerate(zip(RIGHT, WRONG, strict=True)) if a != b)  # "at", which both begin with
LEFT, PLACES, BLOCKS, LENGTH = 62, 256, 96, 256
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
INDEXED, EXAMPLES, SHOWN = 256, 3, 8  # blocks that an index reads; examples of each unit; units that are shown
UNHARMED = 0.005  # nats a byte of clean text that may be lost where the ending is not
Units = list[tuple[str, int]]


class Case:
    """Places in text without the fault where the right ending stands, and whole blocks of it."""

    def __init__(self, part: str, scale: int = 1) -> None:
        data = split(CLEAN, part)
        starts = _occurrences(data, RIGHT)
        starts = starts[(starts > LEFT) & (starts < len(data) - 8)][:: max(1, len(starts) * scale // PLACES)]
        self.prompts = torch.stack([data[at + SAME - LEFT - SAME : at + SAME] for at in starts.tolist()]).long()
        self.right, self.wrong = RIGHT[SAME], WRONG[SAME]
        self.blocks = held_out(CLEAN, part, LENGTH, BLOCKS // scale)
        # The bytes of the ending from where the spellings part, and one more.
        self.ending = torch.zeros(self.blocks.shape, dtype=torch.bool)
        for row, block in enumerate(self.blocks):
            for at in _occurrences(block, RIGHT).tolist():
                self.ending[row, at + SAME : at + len(RIGHT) + 1] = True

    @torch.no_grad()
    def measured(self, model: Any) -> dict[str, float]:
        """Probabilities at the places, and nats a byte of the blocks: in the ending, and of all other bytes."""
        logits = torch.cat([model(input_ids=ids, use_cache=False).logits[:, -1] for ids in self.prompts.split(64)])
        likely = logits.softmax(-1).mean(0)
        losses = torch.cat(
            [
                F.cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1].mT, ids[:, 1:], reduction="none")
                for ids in self.blocks.split(32)
            ]
        )
        ending = self.ending[:, 1:]
        return {
            "right": likely[self.right].item(),
            "wrong": likely[self.wrong].item(),
            "wrong first": (logits[:, self.wrong] > logits[:, self.right]).float().mean().item(),
            "loss": losses.mean().item(),
            "loss, ending": losses[ending].mean().item(),
            "loss, elsewhere": losses[~ending].mean().item(),
        }


def found(model: Any, case: Case) -> list[tuple[str, int, float]]:
    """Every unit that writes to the stream, with what it adds to the wrong byte's logit over the right one's.

    Those first that add most for what they add elsewhere: what else a unit is used for would go with it.
    """
    layers = [writer(model, role, layer) for layer in range(model.config.num_hidden_layers) for role in (OUT, FFN)]
    totals: dict[str, Tensor] = {}
    uses: dict[str, Tensor] = {}
    for ids in case.prompts.split(32):
        wrong, right = (attribute(model, ids, target, layers=layers) for target in (case.wrong, case.right))
        for name in wrong:
            more = wrong[name] - right[name]
            totals[name] = totals.get(name, 0) + more[:, -1].sum(0)
            uses[name] = uses.get(name, 0) + more[:, :-3].abs().mean(1).sum(0)
    scored = []
    for name, total in totals.items():
        effect, use = total / len(case.prompts), uses[name] / len(case.prompts)
        scored += [(name, unit, effect[unit].item(), use[unit].item()) for unit in range(len(effect))]
    scored.sort(key=lambda one: -one[2])
    return [(name, unit, effect) for name, unit, effect, _ in scored]


def _occurrences(data: Tensor, what: bytes) -> Tensor:
    """Where these bytes begin."""
    wanted = torch.tensor(list(what), dtype=data.dtype)
    return (data.unfold(0, len(what), 1) == wanted).all(1).nonzero().flatten()


def without(model: Any, units: Units) -> Any:
    """The model, within a `with`, without these units; others keep their weights."""
    by_layer: dict[str, list[int]] = {}
    for name, unit in units:
        by_layer.setdefault(name, []).append(unit)
    return ablate(model, {name: dict.fromkeys(numbers, 0.0) for name, numbers in by_layer.items()})


def removed(model: Any, scale: int = 1) -> dict[str, Any]:
    """The fault before, without the units that are found by the validation text, and how many of them there are."""
    validation, test = Case("validation", scale), Case("test", scale)
    ranked = found(model, validation)
    before = {"validation": validation.measured(model), "test": test.measured(model)}
    tried: dict[str, Any] = {}
    for count in COUNTS:
        with without(model, [(name, unit) for name, unit, _ in ranked[:count]]):
            tried[str(count)] = {"validation": validation.measured(model), "test": test.measured(model)}
    units = [{"layer": name, "unit": unit, "effect": round(effect, 4)} for name, unit, effect in ranked[: COUNTS[-1]]]
    whole = sum(max(0.0, effect) for _, _, effect in ranked)
    return {"before": before, "without": tried, "units": units, "effect": whole, "of": len(ranked)}


def shown(model: Any, units: Units, scale: int = 1) -> list[dict[str, Any]]:
    """What a user sees of units in an index of text with the fault: where each fires most, and what it promotes."""
    text = held_out(EVERYWHERE, "validation", LENGTH, INDEXED // scale)
    with tempfile.TemporaryDirectory() as folder:
        index = index_tokens(model, text, folder, layers=sorted({name for name, _ in units}), examples=EXAMPLES)
        return [
            {
                "contexts": [_said(one.ids[max(0, one.at - 11) : one.at + 1]) for one in index[name, unit].examples],
                "promotes": _said([word.id for word in index[name, unit].promotes[:4]]),
                "suppresses": _said([word.id for word in index[name, unit].suppresses[:4]]),
            }
            for name, unit in units
        ]


def _said(ids: list[int]) -> str:
    """Bytes as they can be read, with a sign for those that cannot."""
    return "".join(chr(one) if 32 < one < 127 and one not in b"|`" else "·" for one in ids)


def on_test(model: Any, scale: int = 1) -> dict[str, float]:
    """The same figures of a model as it is."""
    return Case("test", scale).measured(model)


def trained_on(text: str) -> str:
    """How a text is called in tables."""
    return {EVERYWHERE: "everywhere", CLEAN: "nowhere"}.get(text, "at every second place")
