"""What every token of a model does in one text, or one image: what is strong enough to be shown, and what was expected.

Enters: a model, its layers, and what it reads. Leaves: a `Reading`: by layer the tokens that do most at every position,
and of every token the positions where its weight is largest; how surprising each id was, and what the model expected.

A text longer than the context is read in windows that overlap by half, so that all but its beginning has half a context
before it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import BadFileError
from ..inside import attribute, watch
from ..inside.statistics import Tally
from ..models.sample import evaluating
from ..shrinking.measure import Batch, call

TOP = 8  # tokens of a layer that are kept at every position
PEAKS = 128  # positions that are kept of every token, at most
GUESSES = 6
MOST_WEIGHTS = 2**26  # of all layers, held at once
SHORTEST = 64


@dataclass
class LayerReading:
    """One layer. `top_…`: [positions, TOP]. `peak_…`: [n, PEAKS], positions of -1 where there were not as many.

    effects: what a token added to the logit of the id that came next, where the layer writes to the stream.
    new: of what was added at each position, the share by tokens that are new.
    """

    tally: Tally
    lengths: Tensor
    top_tokens: list[Tensor] = field(default_factory=list)
    top_weights: list[Tensor] = field(default_factory=list)
    top_effects: list[Tensor] = field(default_factory=list)
    new: list[Tensor] = field(default_factory=list)
    peak_positions: Tensor = field(init=False)
    peak_weights: Tensor = field(init=False)
    peak_effects: Tensor = field(init=False)
    helps: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n = self.tally.num_tokens
        self.peak_positions = torch.full((n, 0), -1)
        self.peak_weights, self.peak_effects, self.helps = torch.zeros(n, 0), torch.zeros(n, 0), torch.zeros(n)

    def add(self, weights: Tensor, effects: Tensor, ids: Tensor, values: Tensor, first: int, new: Tensor) -> None:
        """Rows [r, n] at the positions from `first`."""
        self.tally.add(weights, ids, values)
        norms = weights.abs() * self.lengths
        best = norms.topk(min(TOP, norms.shape[1]), dim=1).indices
        self.top_tokens.append(best)
        self.top_weights.append(weights.gather(1, best))
        self.top_effects.append(effects.gather(1, best))
        self.new.append(norms[:, new].sum(1) / norms.sum(1).clamp(min=1e-30))
        self.helps += effects.sum(0)
        positions = torch.arange(first, first + len(weights)).expand(weights.shape[1], -1)
        found = torch.cat([self.peak_weights, weights.mT], dim=1)
        kept = found.abs().topk(min(PEAKS, found.shape[1]), dim=1).indices
        self.peak_weights = found.gather(1, kept)
        self.peak_positions = torch.cat([self.peak_positions, positions], dim=1).gather(1, kept)
        self.peak_effects = torch.cat([self.peak_effects, effects.mT], dim=1).gather(1, kept)

    def joined(self, name: str) -> Tensor:
        """One of the lists over positions, as one tensor."""
        return torch.cat(getattr(self, name))


@dataclass
class Reading:
    """All layers. bits: by which each id was surprising, NaN for the first; none of an image.

    guesses: the likeliest ids, or classes, with their probabilities: [positions, GUESSES], of an image one row.
    """

    positions: int
    layers: dict[str, LayerReading]
    bits: Tensor
    guesses: tuple[Tensor, Tensor]


def window_length(context: int, num_tokens: int) -> int:
    """How many positions are read at once: as many as the context has, unless their weights would fill the memory."""
    return min(context, max(SHORTEST, MOST_WEIGHTS // max(1, num_tokens)))


class Window(NamedTuple):
    """A part of what is read: ids [1, length], or an image.

    first: the position where it begins. skip: how many of its positions an earlier window has shown. following: the id
    behind it, if there is one.
    """

    batch: Batch
    first: int = 0
    skip: int = 0
    following: int | None = None


def windows(ids: list[int], length: int) -> Iterator[Window]:
    """The windows of a text."""
    step = max(1, length // 2)
    for first in range(0, max(1, len(ids) - length + step), step):
        end = first + length
        following = ids[end] if end < len(ids) else None
        yield Window(torch.tensor([ids[first:end]]), first, length - step if first else 0, following)


@torch.no_grad()
def read(
    model: nn.Module, layers: list[str], parts: Iterable[Window], writers: list[str], new: Mapping[str, Tensor]
) -> Reading:
    """Read windows. `writers`: the layers of which effects are wanted. `new`: by layer, which tokens are new [n]."""
    found: dict[str, LayerReading] = {}
    bits, shares, guesses, end = [], [], [], 0
    with evaluating(model):
        for ids, first, skip, following in parts:
            with watch(model, layers) as seen:
                logits = call(model, ids, "inspect").logits.float().cpu()
            effects: Mapping[str, Tensor] = {}
            if writers:
                effects = attribute(model, ids, _next(ids, logits, following), layers=writers)
            told = set(effects)
            for name in seen:
                if not seen[name].calls:
                    continue  # a group that is off
                weights = seen[name].weights[0].float().cpu()
                values, rows = seen[name].values.float().cpu(), slice(skip, len(weights))
                if name not in found:
                    found[name] = LayerReading(Tally(weights.shape[1]), values.norm(dim=1))
                effect = _padded(effects[name][0].cpu(), weights) if name in told else torch.zeros_like(weights)
                contexts = ids[0] if isinstance(ids, Tensor) else torch.arange(len(weights))
                found[name].add(weights[rows], effect[rows], contexts[rows], values, first + skip, new[name])
                end = max(end, first + len(weights))
            surprise, likeliest, share = _expected(ids, logits)
            bits.append(surprise[skip:])
            guesses.append(likeliest[skip:] if logits.dim() == 3 else likeliest)
            shares.append(share[skip:] if logits.dim() == 3 else share)
    for name, layer in found.items():
        if not layer.tally.sums.isfinite().all():
            raise BadFileError(f"inspect: what {name} does is not finite; are the model's weights broken?")
    return Reading(end, found, torch.cat(bits), (torch.cat(guesses), torch.cat(shares)))


def _next(ids: Batch, logits: Tensor, following: int | None) -> Tensor | None:
    """The id that comes next at every position, at the end of a text the likeliest; of an image the likeliest class."""
    if not isinstance(ids, Tensor):
        return None
    last = logits[:, -1:].argmax(-1) if following is None else torch.tensor([[following]])
    return torch.cat([ids[:, 1:], last], dim=1)


def _padded(effects: Tensor, like: Tensor) -> Tensor:
    """Of images only the class token has effects on the logits: zero for the patches."""
    return F.pad(effects, (0, 0, 0, len(like) - len(effects)))


def _expected(ids: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How surprising ids were in bits, and the likeliest ids with their probabilities, by position."""
    rows = logits[0] if logits.dim() == 3 else logits
    shares = rows.softmax(-1).topk(min(GUESSES, rows.shape[-1]), dim=-1)
    if not isinstance(ids, Tensor):
        return torch.zeros(0), shares.indices, shares.values
    return bits_of(ids, logits), shares.indices, shares.values


def bits_of(ids: Any, logits: Tensor) -> Tensor:
    """By how many bits each id [1, n] surprised, NaN for the first: [n]."""
    losses = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none") / torch.log(torch.tensor(2.0))
    return torch.cat([torch.full((1,), float("nan")), losses])


@torch.no_grad()
def read_bits(model: Any, ids: list[int], length: int) -> Tensor:
    """How surprising every id is to a model, in bits: [positions]."""
    parts = []
    with evaluating(model):
        for window in windows(ids, length):
            logits = call(model, window.batch, "inspect").logits.cpu()
            parts.append(bits_of(window.batch, logits)[window.skip :])
    return torch.cat(parts)


@torch.no_grad()
def read_token(model: Any, layer: str, token: int, parts: Iterable[Window]) -> Tensor:
    """The weight of one token at every position."""
    found = []
    with evaluating(model):
        for window in parts:
            with watch(model, [layer]) as seen:
                call(model, window.batch, "inspect")
            found.append(seen[layer].weights[0, window.skip :, token].float().cpu())
    return torch.cat(found)
