"""Which token groups each row of a batch has: for one call of a model, for a while, or as its prompt suggests.

    model(**batch, adapter_names=["law", "fr", "__base__"])
    with tokens_by_row(model, [["law", "fr"], "fr", "__base__"]): …
    choose_tokens(model, input_ids)        # ["fr", "law", "__base__"]

Enters: names for every row. Leaves: the model's switch set to them, and back when the call is over, however it ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import BadRequestError
from ..pattention.groups import BASE, Switch, switch_of, wrong_count
from .change import check_known, token_groups

Rows = Sequence[str | Sequence[str]]
# Inputs that have a row for every row of the batch; positions and masks may be one for all.
BATCHES = ("input_ids", "inputs_embeds", "pixel_values", "inputs", "input_features", "decoder_input_ids")


class CallsByRow:
    """The hooks that let a model be called with `adapter_names`.

    They are the model's own hooks and not a `forward` of ours, because accelerate and Trainer put theirs in its place.
    """

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.outside: list[Any] = []  # the rows from before the call, and their lengths
        self.several = False  # whether a row may have become several, as in a search by beams

    def put_on(self, model: nn.Module) -> None:
        """Have the model call them."""
        model.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)

    def take_off(self, model: nn.Module) -> None:
        """The model as it was."""
        for hooks, options in (
            (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
            (model._forward_hooks, model._forward_hooks_always_called),
        ):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del hooks[key]
                    options.pop(key, None)

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before the model's forward: take the names, and check the batch against them."""
        self.outside.append((self.switch.rows, self.switch.lengths))
        names = kwargs.pop("adapter_names", None)
        if names is not None:
            self.switch.set_rows(rows_of(model, names))
        if self.switch.rows is not None:
            if model.training and getattr(model, "is_gradient_checkpointing", False):
                raise BadRequestError(
                    "adapter_names: the rows have groups of their own, and gradient checkpointing, which computes "
                    "blocks again later, does not know them; switch one of the two off"
                )
            if self.switch.lengths is None and (names is not None or not self.several):
                check_count(self.switch.rows, args, kwargs)
        return args, kwargs

    def leave(self, *_: Any) -> None:
        """After it, also if it failed."""
        if self.outside and (before := self.outside.pop())[0] is not self.switch.rows:
            self.switch.set_rows(*before)


def calls_of(model: nn.Module) -> CallsByRow | None:
    """The hooks of a model."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, CallsByRow)), None)


def rows_of(model: nn.Module, names: Rows) -> list[list[str]]:
    """The groups of each row, as lists."""
    rows = [[row] if isinstance(row, str) else list(row) for row in names]
    rows = [[name for name in row if name != BASE] for row in rows]
    check_known(model, dict.fromkeys(name for row in rows for name in row))
    return rows


def check_count(rows: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a batch with another number of rows."""
    named = (kwargs[name] for name in BATCHES if kwargs.get(name) is not None)
    batch = next((value for value in (*args, *named) if isinstance(value, Tensor) and value.dim()), None)
    if batch is not None and batch.shape[0] != len(rows):
        raise wrong_count(batch.shape[0], len(rows))


@contextmanager
def tokens_by_row(model: nn.Module, names: Rows, lengths: Sequence[int] | None = None) -> Iterator[None]:
    """Within the `with`, row i of every batch has the groups names[i]: one, several, or `__base__` for none.

    With `lengths` the batch is a single row in which sequences stand end to end, the i-th with lengths[i] positions.
    """
    rows, switch = rows_of(model, names), switch_of(model)
    if lengths is not None and len(lengths) != len(rows):
        raise BadRequestError(f"tokens_by_row: {len(rows)} names and {len(lengths)} lengths were given; give one each")
    if switch is None:
        yield
        return
    before = switch.rows, switch.lengths
    switch.set_rows(rows, lengths)
    try:
        yield
    finally:
        switch.set_rows(*before)


@contextmanager
def rows_that_multiply(model: nn.Module, names: Rows) -> Iterator[None]:
    """The same for generation, which may make several rows of each."""
    calls = calls_of(model)
    with tokens_by_row(model, names):
        if calls is not None:
            calls.several = True
        try:
            yield
        finally:
            if calls is not None:
                calls.several = False


@torch.no_grad()
def choose_tokens(
    model: nn.Module,
    input_ids: Tensor,
    names: Sequence[str] | None = None,
    *,
    attention_mask: Tensor | None = None,
) -> list[str]:
    """For each prompt the group under which it is likeliest, or `__base__`.

    One pass over the prompts for every candidate.

    Args:
        model: a causal language model with groups.
        input_ids: [prompts, positions].
        names: the candidates; unless given, all groups that are not merged, and `__base__`.
        attention_mask: 0 where a prompt is padded.
    """
    known = [facts.name for facts in token_groups(model) if not facts.merged]
    candidates = [BASE, *known] if names is None else list(dict.fromkeys(names))
    if not candidates:
        raise BadRequestError(f"choose_tokens: names is empty; give names of groups, or {BASE}")
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise BadRequestError(
            f"choose_tokens: input_ids have shape {tuple(input_ids.shape)}; [prompts, at least 2 positions] is needed"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = mask[:, 1:] * mask[:, :-1]
    training = model.training
    model.eval()
    try:
        surprise = []
        for name in candidates:
            with tokens_by_row(model, [name] * len(input_ids)):
                logits = model(input_ids=input_ids, attention_mask=mask).logits
            each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none")
            surprise.append((each.view_as(counted) * counted).sum(dim=1))
    finally:
        model.train(training)
    return [candidates[i] for i in torch.stack(surprise).argmin(dim=0).tolist()]
