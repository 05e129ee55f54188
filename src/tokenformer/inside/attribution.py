"""Which tokens make a logit what it is: what each adds to it directly, and what is lost without it.

    effects = tokenformer.attribute(model, input_ids)
    effects.top(10)

Enters: a model, inputs, and the logit of every position that is asked about. Leaves: the direct effect of every token
that writes to the stream of hidden states, through the final norm and the output layer. The norm is frozen at the scale
that it has in that row, so that the effects, with what is left over (embedding and biases), add up to the logit. Keys,
queries and values of attention do not write to the stream: what they do is seen by ablation only.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadRequestError, shown
from ..models.sample import evaluating
from ..shrinking.measure import Batch, call
from .ablation import ablate
from .calls import Call, watching
from .places import Layers, bare, find_places, the_one
from .readout import Readout, find_readout

Target = int | Tensor | None


class Effect(NamedTuple):
    """What one token adds to a logit."""

    layer: str
    token: int
    effect: float


class Effects(Mapping[str, Tensor]):
    """The direct effect of every token on a logit of every position: by layer [batch, length, n].

    Attributes:
        targets: which logit, [batch, length].
        logits: what it is.
        rest: what is not due to tokens: embedding, biases and the norm's bias. With all effects it is the logit.
    """

    def __init__(self, targets: Tensor, logits: Tensor, by_layer: dict[str, Tensor]) -> None:
        self.targets, self.logits, self._by_layer = targets, logits, by_layer
        self.rest = logits - sum((found.sum(-1) for found in by_layer.values()), torch.zeros_like(logits))

    def __getitem__(self, name: str) -> Tensor:
        return the_one(self._by_layer, name, "attribute")

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_layer)

    def __len__(self) -> int:
        return len(self._by_layer)

    def top(self, k: int = 10, *, row: int = 0, position: int = -1) -> list[Effect]:
        """The tokens that move the logit of one position most, up or down."""
        here = {name: found[row, position] for name, found in self.items()}
        found = [(name, token) for name, effects in here.items() for token in range(len(effects))]
        effects = torch.cat(list(here.values()))
        best = effects.abs().topk(min(k, len(effects))).indices.tolist()
        return [Effect(found[i][0], found[i][1], effects[i].item()) for i in best]


@torch.no_grad()
def attribute(model: nn.Module, inputs: Batch, target: Target = None, *, layers: Layers = None) -> Effects:
    """What every token adds to a logit, directly, with the final norm frozen at its actual scale.

    Args:
        model: a language model or classifier of images by a class token, ours or one of the hosts of adoption.
        inputs: ids [batch, length], or a dict of what the model takes.
        target: which logit: an id for all positions, ids [batch, length]; the largest at each position unless given.
        layers: names or patterns; everything that writes to the stream unless given, also linear layers, of which the
            tokens are the inputs.
    """
    readout = find_readout(model, "attribute")
    asked = find_places(model, readout.writers if layers is None else layers, "attribute")
    silent = [name for name, place in asked.items() if place.layer_name not in readout.writers]
    if silent:
        raise BadRequestError(
            f"attribute: {silent[0]} does not write to the stream of hidden states, so it has no direct effect on a "
            "logit; ablate its tokens to see what they do"
        )
    calls: dict[str, Call] = {}
    streams: list[Tensor] = []
    hook = readout.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    try:
        with evaluating(bare(model)), watching(asked, calls.__setitem__):
            logits = _all_logits(model, inputs)
    finally:
        hook.remove()
    length = logits.shape[1]
    targets, scale = _targets(target, logits), readout.scale(streams[-1][:, :length])
    directions = readout.directions(targets)
    effects = {
        name: found.weights[:, :length].float() * (directions @ found.values.float().mT) / scale
        for name, found in calls.items()
    }
    return Effects(targets, logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1), effects)


def ablation_effects(
    model: nn.Module,
    inputs: Batch,
    tokens: Mapping[str, Any],
    target: Target = None,
    *,
    keep_norm: bool = False,
    frozen_norm: bool = False,
) -> dict[str, Tensor]:
    """How much lower a logit is without a token, each by itself: by layer [batch, length, tokens].

    The model runs once for every token. `keep_norm` is that of `ablate`, of the layer's normaliser. `frozen_norm` holds
    the final norm at the scale that it has with all tokens, as `attribute` does.
    """
    with torch.no_grad(), evaluating(bare(model)), ExitStack() as stack:
        scales: list[Tensor] = []
        if frozen_norm:
            readout = find_readout(model, "ablation_effects")
            stack.enter_context(readout.norm.register_forward_hook(partial(_freeze, readout, scales)))
        whole = _all_logits(model, inputs)
        targets = _targets(target, whole)
        found = {}
        for name, numbers in tokens.items():
            lost = []
            for token in numbers:
                with ablate(model, {name: [int(token)]}, keep_norm=keep_norm):
                    lost.append((whole - _all_logits(model, inputs)).gather(-1, targets.unsqueeze(-1)))
            found[name] = torch.cat(lost, dim=-1)
    return found


def _freeze(readout: Readout, scales: list[Tensor], norm: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of the final norm at the scale of its first call."""
    scale = readout.scale(args[0])
    if not scales:
        scales.append(scale)
    shift = 0 if getattr(norm, "bias", None) is None else norm.bias
    return (output - shift) * (scale / scales[0]).to(output.dtype) + shift


class Agreement(NamedTuple):
    """How well direct effects foretell what is lost by ablation, over tokens and positions of one layer.

    correlation: Pearson's. ratio: what is lost for each unit of direct effect (least squares through zero).
    """

    correlation: float
    ratio: float
    tokens: list[int]


def agreement(
    model: nn.Module,
    inputs: Batch,
    *,
    tokens: int = 16,
    layers: Layers = None,
    keep_norm: bool = False,
    frozen_norm: bool = False,
) -> dict[str, Agreement]:
    """Compare direct effects with ablation, by layer, on the tokens of the largest direct effects.

    They differ by what later layers make of a token, and by the norms. The model runs once for every token.
    """
    direct = attribute(model, inputs, layers=layers)
    chosen = {
        name: found.abs().flatten(0, -2).mean(0).topk(min(tokens, found.shape[-1])).indices.tolist()
        for name, found in direct.items()
    }
    norms = {"keep_norm": keep_norm, "frozen_norm": frozen_norm}
    lost = ablation_effects(model, inputs, chosen, direct.targets, **norms)
    return {name: _compared(direct[name][..., numbers], lost[name], numbers) for name, numbers in chosen.items()}


def _compared(direct: Tensor, lost: Tensor, tokens: list[int]) -> Agreement:
    pairs = torch.stack([direct.flatten(), lost.flatten()]).double()
    ratio = (pairs[0] @ pairs[1] / pairs[0].square().sum().clamp(min=1e-300)).item()
    return Agreement(torch.corrcoef(pairs)[0, 1].item(), ratio, tokens)


def _all_logits(model: nn.Module, inputs: Batch) -> Tensor:
    """[batch, length, V]; of a classifier of images one position, that of the class token."""
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        inputs = inputs.unsqueeze(0)
    logits = call(model, inputs, "attribute").logits.float()
    return logits if logits.dim() == 3 else logits.unsqueeze(1)


def _targets(target: Target, logits: Tensor) -> Tensor:
    """[batch, length] of ids."""
    shape, most = logits.shape[:-1], logits.shape[-1]
    if target is None:
        return logits.argmax(-1)
    ids = torch.as_tensor(target, device=logits.device)
    if ids.is_floating_point() or ids.dim() not in (0, len(shape)) or (ids.dim() and ids.shape != shape):
        raise BadRequestError(
            f"attribute: target={shown(target)} was given; give an id, or a tensor of ids of shape {tuple(shape)}"
        )
    if not (int(ids.min()) >= 0 and int(ids.max()) < most):
        raise BadRequestError(f"attribute: target={shown(target)} was given; logits go from 0 to {most - 1}")
    return ids.expand(shape)
