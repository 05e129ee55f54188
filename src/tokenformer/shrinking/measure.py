"""What tokens do on data: how much each adds to its layer's output, and its part in the layer's normaliser.

Enters: a model with Pattentions, and batches of inputs. Leaves: for every layer, by name, two numbers a token (`Use`),
of which `rank_tokens` gives the first; the model's loss on the batches (`mean_loss`). Rows are read as they pass
through the layers, a few at a time, and only sums over them are kept.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadFileError, BadRequestError
from ..growth.growable import check_growable
from ..models.sample import evaluating
from ..pattention import Pattention, pattention_layers
from ..pattention.functional import normaliser, rectify, token_scores, weigh

Batch = Mapping[str, Any] | Tensor
# Weights are computed for so many rows at a time that there are at most this many.
MOST_WEIGHTS = 2**24
IGNORED = -100  # transformers' label of what is not scored


class Use:
    """What the tokens of one layer do, as means over rows: [n], in fp64.

    scores: |weight| times the length of the value. shares: of the normaliser, so that those of all tokens add up to 1.
    """

    def __init__(self, num_tokens: int) -> None:
        self.rows = 0
        self._weights = torch.zeros(num_tokens, dtype=torch.float64)
        self._shares = torch.zeros(num_tokens, dtype=torch.float64)
        self._lengths = torch.zeros(num_tokens, dtype=torch.float64)

    @property
    def scores(self) -> Tensor:
        return self._weights / self.rows * self._lengths

    @property
    def shares(self) -> Tensor:
        return self._shares / self.rows

    def add(self, layer: Pattention, rows: Tensor) -> None:
        """Take note of rows [r, d_in] that enter the layer."""
        for some in rows.split(max(1, MOST_WEIGHTS // layer.num_tokens)):
            scores = rectify(*token_scores(some, layer.key_tokens, layer.key_bias), layer.kind)  # [r, n]
            norm = normaliser(scores, layer.kind)
            weights = weigh(scores, norm, layer.tau, layer.kind)
            if layer.kind == "softmax":
                shares = (scores - norm).exp()
            else:
                shares = scores.square() / norm.clamp(min=torch.finfo(norm.dtype).tiny)
            # Not every device has fp64.
            self._weights += weights.abs().sum(0).cpu().double()
            self._shares += shares.sum(0).cpu().double()
        self._lengths = layer.value_tokens.float().norm(dim=1).cpu().double()
        self.rows += len(rows)


class Ranking(dict[str, Tensor]):
    """By the layer's name, what each of its tokens does. `shares`: each token's part in the normaliser."""

    shares: dict[str, Tensor]


def rank_tokens(model: nn.Module, batches: Iterable[Batch]) -> Ranking:
    """What every token of every Pattention does on data: by the layer's name, a number for each token, [n], in fp64.

    It is the mean of |weight| times the length of the value: what the token adds to the output of its layer.

    Args:
        model: any module that contains Pattention layers.
        batches: dicts of what the model takes, or tensors of ids. Positions with an attention mask of 0 do not count.
    """
    return ranking_of(measure(model, batches, "rank_tokens"))


def ranking_of(uses: Mapping[str, Use]) -> Ranking:
    """The ranking that uses of tokens make."""
    ranking = Ranking({name: use.scores for name, use in uses.items()})
    ranking.shares = {name: use.shares for name, use in uses.items()}
    return ranking


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[Batch], what: str) -> dict[str, Use]:
    """What the tokens of every layer do on data. `what` is how errors begin."""
    check_growable(model, "shrink")
    check_batches(batches, what)
    layers = dict(pattention_layers(model))
    if not layers:
        raise BadRequestError(f"{what}: {type(model).__name__} has no Pattention layer")
    uses = {name: Use(layer.num_tokens) for name, layer in layers.items()}
    masks: list[Tensor | None] = [None]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name, layer in layers.items():
            hook = partial(_read_rows, uses[name], masks)
            stack.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        for batch in batches:
            masks[0] = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            call(model, batch, what)
    for name, use in uses.items():
        if not use.rows:
            raise BadRequestError(f"{what}: no row of the data reached {name}; give batches that the whole model reads")
        if not (use.scores.isfinite().all() and use.shares.isfinite().all()):
            raise BadFileError(f"{what}: what the tokens of {name} do is not finite; are the model's weights broken?")
    return uses


def _read_rows(use: Use, masks: list[Tensor | None], layer: Any, args: tuple, kwargs: dict) -> None:
    x, (mask,) = args[0] if args else next(iter(kwargs.values())), masks
    rows = x.reshape(-1, x.shape[-1])
    if mask is not None and mask.shape == x.shape[:-1]:
        rows = rows[mask.flatten().to(x.device) != 0]
    use.add(layer, rows)


def call(model: nn.Module, batch: Batch, what: str, *, labelled: bool = False) -> Any:
    """What the model returns for a batch. If it is to be `labelled`, a tensor of ids is its own labels."""
    device = next(model.parameters()).device
    if isinstance(batch, Tensor):
        ids = batch.to(device)
        return model(ids, labels=ids) if labelled else model(ids)
    if not isinstance(batch, Mapping):
        raise BadRequestError(
            f"{what}: a batch is a {type(batch).__name__}; give dicts of what the model takes, or tensors of ids"
        )
    return model(**{key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()})


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The model's own loss, averaged over batches by how many labels they have."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in batches:
            labels = batch if isinstance(batch, Tensor) else batch.get("labels")
            if not isinstance(labels, Tensor):
                raise BadRequestError(
                    f"shrink: max_loss needs batches with labels, and one has only {', '.join(batch)}; add labels"
                )
            scored = int((labels != IGNORED).sum())
            loss = getattr(call(model, batch, "shrink", labelled=True), "loss", None)
            if loss is None:
                raise BadRequestError(
                    f"shrink: max_loss needs a model that returns a loss, and a {type(model).__name__} does not"
                )
            total += loss.item() * scored
            count += scored
    return total / max(count, 1)


def check_batches(batches: Any, what: str) -> None:
    """Refuse one batch in place of several, and none."""
    if isinstance(batches, Tensor | Mapping):
        raise BadRequestError(f"{what}: the data is one {type(batches).__name__}; give a list of batches: [batch]")
    if not isinstance(batches, Iterable):
        raise BadRequestError(f"{what}: the data is a {type(batches).__name__}; give a list of batches")
