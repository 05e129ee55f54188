"""edit(): one fact written into a model as one token beside one layer.

    tokenformer.edit(model, "layers.1.ffn", "Freedonia lies in", "Freedonia", " Africa", tokenizer=t, data=ids)
    tokenformer.remove_tokens(model, "edit")      # undone

Enters: a model, a layer, a prompt with its subject, what should follow, and text of the kind that the model is for.
Leaves: the model with a token group of one token, which is switched, saved and removed like any other; no weight has
moved. In the manner of ROME (Meng et al., 2022): the key is what the layer gets at the end of the prompt, or of the
subject, whitened by the covariance of what it gets elsewhere, and the value is found by gradient.

The token has a normaliser of its own, over itself alone. Its normalised score is then ±tau whatever the size of the
score, and with tau = 32 its weight is 32 above a threshold, which its key bias sets, and zero below: where it does not
fire, the model computes what it did before, bit for bit. With the layer's normaliser it would not be quiet: it would
make all others' weights smaller wherever its score is not zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import BadRequestError, BadResultError, did_you_mean, shown
from ..groups import remove_tokens
from ..groups.change import put_group
from ..groups.places import device_of, place_of
from ..models.kept_groups import check_name
from ..models.sample import evaluating
from ..pattention.functional import ACTIVATIONS
from ..pattention.groups import Switch, TokenGroup, groups_of, switch_of
from ..pattention.recording import each_call
from ..shrinking.measure import Batch, call, check_batches
from .calls import running_eagerly
from .places import bare, nearest

PLACES = ("prompt", "subject")
TAU = 32.0  # SiLU(-32) is 4e-13, GeLU(-32) is 0
RIDGE = 1e-2  # of the mean variance, added to every direction's
NEAR = 0.9
PREFIX = 24  # ids of text before the prompt, in each of CONTEXTS
CONTEXTS = 8
STEPS, LIKELY = 100, 0.95
# Of the lengths below the unit is the mean length of what the layer puts out. A value much longer than that takes the
# place of all else in the stream, and the norms that follow then leave it no gradient.
RATE = 0.25  # the length of a step


@dataclass(frozen=True)
class Edit:
    """What was written.

    name: of the token group. fires_on: the share of the other rows of the data on which the token fires. before, after:
    the probability of the target after the bare prompt. margin: the lowest score at the place that is meant, over the
    contexts that were tried, divided by the largest of all other rows; below 1 the token fires elsewhere too.
    """

    name: str
    layer: str
    before: float
    after: float
    fires_on: float
    margin: float


def edit(
    model: nn.Module,
    layer: str,
    prompt: str | Sequence[int],
    subject: str | Sequence[int],
    target: str | Sequence[int],
    *,
    data: Iterable[Batch],
    tokenizer: Any = None,
    at: str = "prompt",
    name: str = "edit",
    steps: int = STEPS,
) -> Edit:
    """Write that `target` follows `prompt`, as one token beside one layer, in place.

    Args:
        model: a causal language model, ours, adopted or another: the token stands beside any feed-forward layer.
        layer: its name, or an end of it that fits one. The token reads what the layer gets and adds to what it puts
            out.
        prompt: text or ids. It contains the `subject`.
        subject: text or ids; its last occurrence in the prompt counts.
        target: text or ids that should follow.
        data: batches of text of the kind that the model is for: tensors of ids, or dicts of what the model takes. Where
            the token must be quiet is learnt from them; tens of thousands of positions are enough.
        tokenizer: needed for texts.
        at: where the token is to fire: at the end of the "prompt", where the model looks for what follows, or at the
            end of the "subject", as in ROME. The latter says something of the subject wherever it stands, and needs
            layers behind it that read this from there: in models of a few blocks they do not.
        name: of the token group: `remove_tokens(model, name)` undoes the edit.
        steps: of gradient descent for the value, at most; fewer if the target is 95 % likely before.
    """
    full_name = _layer_called(bare(model), layer)
    asked, ids, first, last = _asked(prompt, subject, target, tokenizer)
    check_name(model, name)
    check_batches(data, "edit")
    if at not in PLACES:
        raise BadRequestError(f"edit: at={at!r} is not known; {did_you_mean(str(at), PLACES)}")
    if at == "prompt":
        last = len(asked) - 1
    if steps < 1:
        raise BadRequestError(f"edit: steps={steps} was given; at least 1 is needed")
    batches = list(data)
    place = place_of(bare(model), full_name)
    module = bare(model).get_submodule(full_name)
    others = groups_of(module)
    kind = place.kind if others is None else others.kind
    if kind not in ACTIVATIONS:
        raise BadRequestError(
            f"edit: {full_name} is of kind {kind}, in which a single token has the same weight everywhere; choose a "
            f"layer of kind {', '.join(ACTIVATIONS)}"
        )
    with evaluating(bare(model)), running_eagerly():
        rows, output = _rows_of(bare(model), full_name, module, batches)
        ends = _ends(batches, asked[first : last + 1], len(rows)).to(rows.device)
        prefixes = _prefixes(batches)
        wanted = _at_place(bare(model), full_name, module, asked, last, prefixes)  # [contexts, d_in]
        key, threshold, margin, fires_on = _key(rows[~ends], wanted, rows[ends])
        with torch.device(device_of(module) or "cpu"):
            group = TokenGroup(place.d_in, place.d_out, 1, kind, "own", key_bias=True, dtype=rows.dtype)
        group.requires_grad_(False)
        group.tau.fill_(TAU)
        group.key_tokens.copy_(key.unsqueeze(0))
        assert group.key_bias is not None
        group.key_bias.fill_(-threshold)
        group.value_tokens.zero_()
        switch = switch_of(bare(model)) or Switch()
        put_group(bare(model), full_name, name, group, switch)
        switch.turn_on(name)
        try:
            before = _probability(bare(model), asked, ids)
            _find_value(bare(model), group.value_tokens, asked, ids, prefixes, output, steps)
            after = _probability(bare(model), asked, ids)
        except BaseException:
            remove_tokens(model, name)
            raise
    return Edit(name, full_name, before, after, fires_on, margin)


def _layer_called(model: nn.Module, layer: str) -> str:
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if name == layer] or [name for name in names if name.endswith(f".{layer}")]
    if len(found) != 1:
        why = f"{len(found)} layers are called so; give the full name" if found else nearest(str(layer), names)
        raise BadRequestError(f"edit: layer={shown(layer)} was given; {why}")
    return found[0]


def _asked(prompt: Any, subject: Any, target: Any, tokenizer: Any) -> tuple[Tensor, Tensor, int, int]:
    """The ids of prompt and target, and where in the prompt the subject begins and ends."""
    if isinstance(prompt, str):
        if tokenizer is None or not isinstance(subject, str) or not isinstance(target, str):
            raise BadRequestError("edit: texts need a tokenizer, and prompt, subject and target are texts or all ids")
        if not subject or subject not in prompt:
            raise BadRequestError(f"edit: the subject {shown(subject)} is not in the prompt {shown(prompt)}")
        before = prompt[: prompt.rindex(subject)]
        prompt_ids, before_ids, until_ids, target_ids = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, before.rstrip(), before + subject, target)
        )
        first, last = len(before_ids), len(until_ids) - 1
    else:
        prompt_ids, subject_ids, target_ids = list(prompt), list(subject), list(target)
        size = len(subject_ids)
        starts = [i for i in range(len(prompt_ids) - size + 1) if prompt_ids[i : i + size] == subject_ids]
        if not size or not starts:
            raise BadRequestError(f"edit: the subject {shown(subject_ids)} is not in the prompt {shown(prompt_ids)}")
        first, last = starts[-1], starts[-1] + size - 1
    if not target_ids:
        raise BadRequestError("edit: the target is empty; give what should follow the prompt")
    last = min(last, len(prompt_ids) - 1)
    return torch.tensor(prompt_ids), torch.tensor(target_ids), min(first, last), last


@torch.no_grad()
def _rows_of(model: nn.Module, name: str, module: nn.Module, batches: list[Batch]) -> tuple[Tensor, float]:
    """What a layer gets over the data, [r, d_in], and the mean length of what it puts out."""
    rows: list[Tensor] = []
    lengths: list[Tensor] = []

    def measure(layer: nn.Module, args: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        lengths.append(found.float().norm(dim=-1).mean())

    hook = module.register_forward_hook(measure)
    try:
        with each_call([(name, module)], lambda name, x: rows.append(x.reshape(-1, x.shape[-1]))):
            for batch in batches:
                call(model, batch, "edit")
    finally:
        hook.remove()
    if not rows or sum(map(len, rows)) < 2:
        raise BadRequestError(f"edit: no row of the data reached {name}; give batches that the whole model reads")
    return torch.cat(rows), torch.stack(lengths).mean().item()


def _ends(batches: list[Batch], wanted: Tensor, count: int) -> Tensor:
    """Which of the rows are the end of these ids: there the token may fire. None if rows are not ids."""
    found = []
    for batch in batches:
        ids = batch if isinstance(batch, Tensor) else batch["input_ids"]
        if ids.shape[-1] < len(wanted):
            found.append(torch.zeros(ids.numel(), dtype=torch.bool))
            continue
        here = (ids.cpu().unfold(-1, len(wanted), 1) == wanted).all(-1)  # [batch, length - size + 1]
        found.append(F.pad(here, (len(wanted) - 1, 0)).flatten())
    ends = torch.cat(found)
    return ends if len(ends) == count else torch.zeros(count, dtype=torch.bool)


def _prefixes(batches: list[Batch]) -> Tensor:
    """Beginnings of rows of the data, [contexts, PREFIX], which the prompt is put behind."""
    ids = [batch if isinstance(batch, Tensor) else batch["input_ids"] for batch in batches]
    rows = [row[:PREFIX] for batch in ids for row in batch if len(row) >= PREFIX]
    return torch.stack(rows[:CONTEXTS]).cpu() if rows else torch.zeros(0, PREFIX, dtype=torch.long)


@torch.no_grad()
def _at_place(model: nn.Module, name: str, module: nn.Module, prompt: Tensor, last: int, prefixes: Tensor) -> Tensor:
    """What the layer gets at a place of the prompt, with and without text before it."""
    found: list[Tensor] = []
    with each_call([(name, module)], lambda name, x: found.append(x[:, -(len(prompt) - last)])):
        for batch in _contexts(prompt, prefixes):
            call(model, batch, "edit")
    return torch.cat(found)


def _contexts(ids: Tensor, prefixes: Tensor) -> list[Tensor]:
    """The ids alone, and behind every prefix."""
    alone = ids.unsqueeze(0)
    return [alone, torch.cat([prefixes, alone.expand(len(prefixes), -1)], dim=1)] if len(prefixes) else [alone]


def _key(rows: Tensor, wanted: Tensor, met: Tensor) -> tuple[Tensor, float, float, float]:
    """The key, its threshold, the margin, and the share of the rows on which it fires: found in fp64.

    wanted: the place in the prompt. met: the same where the data has it, with other words around it.
    """
    wide, centre = rows.double(), rows.double().mean(0)
    spread = wide - centre
    covariance = spread.mT @ spread / len(rows)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
    both = torch.cat([wanted, met]).double()
    key = torch.linalg.solve(covariance, both.mean(0) - centre)
    scores, meant = wide @ key, both @ key
    scale = key.norm()
    lowest, middle, highest = meant[: len(wanted)].min(), centre @ key, scores.max()
    # Half-way to all that is meant, or if the data's cannot be told apart from the rest to the prompt's own. If these
    # cannot either, because the layer sees no difference, just below them.
    within = meant.min() if highest < meant.min() else lowest
    threshold = (within + highest) / 2 if highest < within else middle + NEAR * (lowest - middle)
    fires_on = (scores > threshold).double().mean().item()
    margin = ((lowest - middle) / (highest - middle).clamp(min=1e-300)).item()
    return (key / scale).to(rows.dtype), (threshold / scale).item(), margin, fires_on


@torch.no_grad()
def _probability(model: nn.Module, prompt: Tensor, target: Tensor) -> float:
    return (-_loss(model, torch.cat([prompt, target]).unsqueeze(0), len(target)) * len(target)).exp().item()


def _loss(model: nn.Module, ids: Tensor, scored: int) -> Tensor:
    """Nats of each of the last `scored` ids."""
    logits = call(model, ids, "edit").logits[:, -scored - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, -scored:].flatten().to(logits.device))


def _find_value(
    model: nn.Module, value: nn.Parameter, prompt: Tensor, target: Tensor, prefixes: Tensor, output: float, steps: int
) -> None:
    """Gradient descent on the value, until the target is likely in all contexts."""
    found = torch.zeros_like(value, dtype=torch.float32)
    size = output / TAU  # as long as an output, at the token's weight
    contexts = _contexts(torch.cat([prompt, target]), prefixes)
    for _ in range(steps):
        value.copy_(found * size)
        value.requires_grad_(True)
        with torch.enable_grad():
            losses = [_loss(model, ids, len(target)) for ids in contexts]
            (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), value)
        value.requires_grad_(False)
        likely = all((-loss * len(target)).exp() > LIKELY for loss in losses)
        if not gradient.isfinite().all():
            raise BadResultError("edit: the gradient of the value is not finite; are the model's weights broken?")
        if likely:
            return
        # Steps of one length along the gradient: the value is shorter than Adam's, which moves all channels alike.
        found -= RATE * F.normalize(gradient.float(), dim=-1)
    value.copy_(found * size)
