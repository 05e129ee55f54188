"""What a training run is: a model, a text, a schedule, growth steps and adapters, as plain data.

Enters: nothing but numbers and names. Leaves: a Run, its learning rate at every step, and the segments it is made of.
A segment ends where a model grows, where the learning rate starts to decay, or where the run ends. Its name is a hash
of all that its state depends on and of nothing else: runs that differ only in what comes later share their first
segments.
"""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from typing import Any

from .texts import edition


@dataclass(frozen=True)
class TokenFormer:
    """A TokenFormer: `tokens` for each of query, key, value and out, four times as many for the FFN."""

    tokens: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    kind: str = "l2_gelu"
    init: float = 0.02  # standard deviation of new keys and of the embedding; the paper's
    tau: float = 1.0  # in units of the default √n
    keys: float = 1.0  # the scale of new keys, in units of `init`
    changes: tuple[tuple[str, Any], ...] = ()  # other fields of TokenFormerConfig


@dataclass(frozen=True)
class NeoX:
    """A GPT-NeoX, the Transformer to compare with. `replaced` names what is Pattention instead."""

    width: int
    layers: int = 4
    heads: int = 4
    ffn: int | None = None  # None: four times the width
    init: float = 0.02  # standard deviation of new weights
    replaced: tuple[str, ...] = ()  # of query, key, value, dense (the output projection) and mlp
    keys: float = 0.02  # standard deviation of new keys of what is replaced


@dataclass(frozen=True)
class TokenViT(TokenFormer):
    """A TokenFormer for images of 32 pixels, in patches of 4."""


@dataclass(frozen=True)
class ViT:
    """A ViT for the same images."""

    width: int
    layers: int = 4
    heads: int = 4
    init: float = 0.02  # standard deviation of new weights


Shape = TokenFormer | NeoX | ViT


@dataclass(frozen=True)
class Growth:
    """One growth step: before the training step `step` is made. `factor` is that of tokens; 1 leaves them.

    A Transformer that `adopts` parts becomes a model with Pattentions first, which then grow; its optimizer starts
    afresh, as it does if net2net widens FFNs only. With the method none only rate and optimizer change. `sizes`, in
    place of `factor`: token counts by name or pattern of layers; for net2net the FFN's units, under "ffn". After
    adoption they are needed, because how much ballast a layer has depends on its weights.
    """

    step: int
    factor: float = 2
    method: str = "split"  # rotate, zero, random, none; net2net for a Transformer
    adam: str = "carry"  # or reset
    trains: str = "all"  # or new
    noise: float = 1.0  # of split
    tau_steps: int = 0  # steps over which tau rises to √n of the grown n, after zero
    sizes: tuple[tuple[str, int], ...] = ()
    adopts: tuple[str, ...] = ()  # of ffn and qkv
    ballast: str = "spread"  # or single
    lr: float | None = None  # the rate from here on; None: as before
    rewarm: int = 0  # steps of wsd over which the rate rises from 0 once more
    warm_new: int = 0  # steps over which the rate of new tokens and blocks rises to that of the others
    depth: int = 0  # blocks from here on; 0: as before
    new_blocks: str = "copy"  # or fresh
    new_blocks_at: str = "after_each"  # or top


@dataclass(frozen=True)
class Adapter:
    """What is trained beside a finished model whose weights stay: the tokens of a group, or peft's LoRA. Or all of it.

    `sizes`: tokens or ranks by role (qkv, out, ffn); tokens also by the name of a layer.
    """

    way: str  # own or shared: tokens with such a normaliser; lora; full: no adapter, all weights learn
    sizes: tuple[tuple[str, int], ...] = ()
    keys: str = "random"  # or hidden: what enters the layer on blocks of the text
    base: int = 0  # tokens for which a layer's values have the whole rate; of n they have base / n of it. 0: always


@dataclass(frozen=True)
class Run:
    """One training run. `decay` is the part of its steps over which wsd lowers the rate to 0."""

    model: Shape
    lr: float
    steps: int
    seed: int = 0
    growths: tuple[Growth, ...] = ()
    text: str = "enwik8"  # or another of texts.py; of images: cifar10
    schedule: str = "wsd"  # or cosine: one warm-up and one cosine to a tenth for every size
    warmup: int = 100
    decay: float = 0.2
    weight_decay: float = 0.1
    batch: int = 8
    context: int = 256
    marks: tuple[int, ...] = ()  # steps at which the state is kept too, for shorter runs with the same past
    base: tuple[tuple[str, int], ...] = ()  # the shape that `lr` is for, if rates follow sizes; empty: all are equal
    optimizer: str = "adamw"  # or muon, for matrices in the blocks; AdamW has the rest
    begins: "Run | None" = None  # the finished run whose model this one begins with; steps are counted afresh
    adapter: Adapter | None = None  # of a run that begins with another one
    nested: tuple[float, ...] = ()  # shares of the tokens that are trained as models of their own, with 1 for the whole

    @property
    def old_text(self) -> str:
        """What the first of the runs was trained on that this one begins with."""
        return self.text if self.begins is None else self.begins.old_text

    @property
    def decay_start(self) -> int:
        return self.steps - round(self.decay * self.steps) if self.schedule == "wsd" else self.steps

    @property
    def cuts(self) -> list[int]:
        """Steps at which segments end."""
        # A short run, from which nothing else will branch off, is in one piece.
        decays = {self.decay_start} if self.adapter is None else set()
        return sorted({*self.marks, *(growth.step for growth in self.growths), *decays, self.steps} - {0})

    def learning_rate(self, step: int) -> float:
        """The rate of a step."""
        starts = [0, *(growth.step for growth in self.growths)]
        rate = next((g.lr for g in reversed(self.growths) if g.lr is not None and g.step <= step), self.lr)
        if self.schedule == "cosine":
            start = max(s for s in starts if s <= step)
            end = min([s for s in starts if s > step], default=self.steps)
            if step - start < self.warmup:
                return rate * (step - start + 1) / self.warmup
            done = (step - start - self.warmup) / max(1, end - start - self.warmup)
            return rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        left = (self.steps - step) / max(1, self.steps - self.decay_start)
        risen = [(step - g.step + 1) / g.rewarm for g in self.growths if g.rewarm and g.step <= step]
        return rate * min(1, (step + 1) / self.warmup, left, *risen)

    def segments(self) -> list["Segment"]:
        """The parts it is made of, in order."""
        return [Segment(self, start, end) for start, end in zip([0, *self.cuts], self.cuts, strict=False)]

    def all_segments(self) -> list["Segment"]:
        """Its segments, after those of the runs that it begins with."""
        return [*(self.begins.all_segments() if self.begins else ()), *self.segments()]


@dataclass(frozen=True)
class Segment:
    """The steps of a run from `start` up to `end`."""

    run: Run
    start: int
    end: int

    @property
    def name(self) -> str:
        """Of all that the state at its end depends on. What has its default value is left out of the hash."""
        run = self.run
        facts = {**_said(run), "model": _said(run.model), "kind": type(run.model).__name__, "end": self.end}
        facts.pop("marks", None)
        if edition(run.text) != run.text:
            facts["text"] = edition(run.text)
        if run.adapter is not None:
            facts["adapter"] = _said(run.adapter)
        if run.begins is not None:
            facts["begins"] = run.begins.segments()[-1].name
        facts["growths"] = [_said(growth) for growth in run.growths if growth.step < self.end]
        if run.schedule == "cosine":
            facts["steps"] = self.end
        elif self.end <= run.decay_start:
            facts.pop("steps")
            facts.pop("decay", None)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def before(self) -> "Segment | None":
        """The segment whose state it starts from."""
        return next((segment for segment in self.run.segments() if segment.end == self.start), None)


def _said(data: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    return {f.name: getattr(data, f.name) for f in fields(data) if getattr(data, f.name) != f.default}
