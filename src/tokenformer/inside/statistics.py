"""What tokens do over data: how much they add, how often and in which contexts they fire, and which are alike.

Enters: a model and batches. Leaves: by place, numbers for every token (`TokenStatistics`). Weights are read as they
pass and only sums over rows are kept: of [rows, n] nothing, of contexts a table of [contexts, n].

A context is the id that the model reads at a position; of images, which have no ids, it is the place of the patch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import BadFileError, BadRequestError, did_you_mean
from ..models.sample import evaluating
from ..shrinking.measure import Batch, call, check_batches
from .ages import token_ages
from .calls import Call, watching
from .places import Layers, Place, bare, check_tokens, find_places, the_one

# Of a larger vocabulary, ids that are equal modulo this number count as one context.
MOST_CONTEXTS = 1024
# A token that adds less than this share of what the mean token of its layer adds is called dead.
DEAD = 1e-3
SIDES = ("values", "keys", "both")


@dataclass(frozen=True)
class TokenStatistics:
    """What the tokens of one place do over data, [n] each.

    rows: how many rows were read.
    use: how much a token adds: the mean of |weight| times the length of its value.
    mean: its mean weight. largest: the largest |weight|.
    density: mean(weight²)² / mean(weight⁴): 1 if it fires alike in all rows, 1/k if in one of k.
    selectivity: how much its firing says of the context, in nats: how far the contexts that its weight² falls on are
        (Kullback-Leibler) from the contexts of the data. 0 says nothing; one context alone, of frequency p, is -log p.
        Squares, because GeLU gives what it does not let through a small negative weight, and that nearly everywhere.
    age: the growth step that it came with: see `token_ages`.
    """

    rows: int
    use: Tensor
    mean: Tensor
    largest: Tensor
    density: Tensor
    selectivity: Tensor
    age: Tensor

    @property
    def alive(self) -> Tensor:
        """Whether a token adds at least a thousandth of what the mean token of its layer does."""
        return self.use > DEAD * self.use.mean()


class Tally:
    """Sums over the rows of one place, in fp64 where many are added up."""

    def __init__(self, num_tokens: int) -> None:
        self.rows = 0
        self.num_tokens = num_tokens
        self.sums = torch.zeros(4, num_tokens, dtype=torch.float64)  # of weights: plain, |…|, squares, 4th powers
        self.largest = torch.zeros(num_tokens)
        self.contexts = torch.zeros(MOST_CONTEXTS, num_tokens)  # the squares in each
        self.counts = torch.zeros(MOST_CONTEXTS, dtype=torch.long)
        self.lengths = torch.zeros(num_tokens)

    def add(self, weights: Tensor, contexts: Tensor, values: Tensor) -> None:
        """Rows [r, n] of weights, in contexts [r]."""
        weights, contexts = weights.float(), contexts % MOST_CONTEXTS
        sizes, squares = weights.abs(), weights.square()
        sums = torch.stack([weights.sum(0), sizes.sum(0), squares.sum(0), squares.square().sum(0)])
        self.sums += sums.cpu().double()
        self.largest = torch.maximum(self.largest, sizes.amax(0).cpu())
        self.contexts = self.contexts.to(weights.device).index_add_(0, contexts, squares)
        self.counts += torch.bincount(contexts, minlength=MOST_CONTEXTS).cpu()
        self.lengths = values.float().norm(dim=1).cpu()
        self.rows += len(weights)

    def state(self) -> dict[str, Tensor]:
        """All of it, to be saved."""
        tensors = {"sums": self.sums, "largest": self.largest, "contexts": self.contexts.cpu(), "counts": self.counts}
        return {**tensors, "lengths": self.lengths, "rows": torch.tensor(self.rows)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name in ("sums", "largest", "contexts", "counts", "lengths"):
            setattr(self, name, state[name].clone())
        self.rows = int(state["rows"])

    def statistics(self, age: Tensor) -> TokenStatistics:
        """What the sums say."""
        mean, size, square, fourth = self.sums / self.rows
        density = square.square() / fourth.clamp(min=torch.finfo(torch.float64).tiny)
        share = self.contexts.cpu().double() / self.contexts.cpu().double().sum(0).clamp(min=1e-300)  # [contexts, n]
        expected = (self.counts.double() / self.rows).unsqueeze(1)
        selectivity = torch.special.xlogy(share, share / expected.clamp(min=1e-300)).sum(0).clamp(min=0)
        use = size * self.lengths.double()
        return TokenStatistics(self.rows, use, mean, self.largest, density, selectivity, age)


@torch.no_grad()
def token_statistics(model: nn.Module, batches: Iterable[Batch], layers: Layers = None) -> dict[str, TokenStatistics]:
    """What every token does over data: use, selectivity, age and more, by layer.

    Args:
        model: any torch model with Pattentions; of an nn.Linear that is named the tokens are its inputs.
        batches: dicts of what the model takes, or tensors of ids. Positions with an attention mask of 0 do not count.
        layers: names or patterns; all Pattentions and groups unless given.
    """
    places = find_places(model, layers, "token_statistics")
    tallies = {name: Tally(place.num_tokens) for name, place in places.items()}

    def note(name: str, found: Call, batch: Batch) -> None:
        tallies[name].add(*rows_of(found.weights, batch), found.values)

    for _ in each_batch(model, places, batches, note, "token_statistics"):
        pass
    ages = token_ages(model, layers)
    for name, tally in tallies.items():
        if not tally.rows:
            continue  # a group that is off
        if not tally.sums.isfinite().all():
            raise BadFileError(f"token_statistics: what {name} does is not finite; are the model's weights broken?")
    return {name: tally.statistics(ages[name]) for name, tally in tallies.items() if tally.rows}


def each_batch(
    model: nn.Module,
    places: Mapping[str, Place],
    batches: Iterable[Batch],
    note: Callable[[str, Call, Batch], Any],
    what: str,
) -> Iterator[Batch]:
    """Run the model over batches, and yield each when it is done; `note` gets what every place does in its calls."""
    check_batches(batches, what)
    now: list[Batch] = []
    with evaluating(bare(model)), watching(places, lambda name, found: note(name, found, now[0])):
        for batch in batches:
            now[:] = [batch]
            call(model, batch, what)
            yield batch


def rows_of(weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weights [..., n] as rows [r, n], and the context of each; rows with an attention mask of 0 are left out."""
    contexts, there = contexts_of(weights, batch)
    rows, contexts = weights.reshape(-1, weights.shape[-1]), contexts.reshape(-1)
    return (rows, contexts) if there is None else (rows[there.reshape(-1)], contexts[there.reshape(-1)])


def contexts_of(weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Of every row of weights [..., n] its context, and whether it counts; None if all do."""
    ids = batch if isinstance(batch, Tensor) else batch.get("input_ids")
    shape, mask = weights.shape[:-1], None if isinstance(batch, Tensor) else batch.get("attention_mask")
    if ids is None or ids.shape != shape:
        ids = torch.arange(shape[-1] if shape else 1).expand(shape)
    if mask is None or mask.shape != shape:
        return ids.to(weights.device), None
    return ids.to(weights.device), mask.to(weights.device) != 0


def neighbours(model: nn.Module, layer: str, token: int, k: int = 5, *, by: str = "values") -> list[tuple[int, float]]:
    """The tokens of the same layer that are most like one, by the cosine of their values, their keys, or both."""
    places = find_places(model, layer, "neighbours", with_groups=False)
    place = the_one(places, next(iter(places)) if len(places) == 1 else layer, "neighbours")
    tokens = check_tokens(place, [token], "neighbours")
    others, cosines = nearest_tokens(place, tokens, k, by)
    return list(zip(others[0].tolist(), cosines[0].tolist(), strict=True))


def nearest_tokens(place: Place, tokens: Sequence[int], k: int, by: str = "values") -> tuple[Tensor, Tensor]:
    """Of these tokens the k of the same place that are most like each, and the cosines: two tensors of [tokens, k]."""
    if by not in SIDES:
        raise BadRequestError(f"neighbours: by={by!r} is not known; {did_you_mean(by, SIDES)}")
    if by != "values" and place.keys is None:
        raise BadRequestError(
            f"neighbours: {place.name} is a linear layer, whose tokens have no keys; give by='values'"
        )
    sides = {"values": place.values, "keys": place.keys}
    chosen = [side for name, side in sides.items() if side is not None and by in (name, "both")]
    units = [F.normalize(side.float(), dim=1) for side in chosen]
    own = torch.as_tensor(tokens, device=units[0].device)
    cosines = torch.stack([unit[own] @ unit.mT for unit in units]).mean(0)
    cosines[torch.arange(len(own)), own] = -2  # below any cosine
    best = cosines.topk(min(k, place.num_tokens - 1), dim=1)
    return best.indices, best.values
