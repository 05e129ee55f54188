"""How the state that an optimizer keeps of one parameter follows its tokens across a growth step.

Enters: that state, and the growth step. Leaves: the state of the grown parameter; or a one-line error, before anything
is touched. The rules for a layer whose tokens become c copies (docs/growth-mathematics.md):

    appended tokens      zero
    value of a copy      its gradient is the old value's: moments kept
    key of a copy        its gradient is a c-th of the old key's plus a part of zero mean from the random parts:
                         first moment / c, second moment · (1/c² + noise² · (1 − 1/c)); a key's bias is part of the key
    the output's bias    not touched
    a new block          as of the block that it is a copy of, but first moments are zero; none if it is fresh
    a token that stays   kept, when others are dropped or all are put in another order

Adafactor keeps the second moment as two vectors: its means over every row, and over every column. The first has an
entry per token and follows as above. The second is a mean over the tokens, of which those that are appended count as
zero; when tokens are dropped, it is multiplied by how the mean of the first changes, which leaves the second moment of
every token that stays as Adafactor had it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import BadRequestError
from .step import Growth, LayerGrowth

Moment = Literal["first", "second"]
# The names under which optimizers keep their moments: torch's, transformers' and those that follow them.
MOMENTS: dict[str, Moment] = {
    "exp_avg": "first",  # Adam, Lion
    "momentum_buffer": "first",  # SGD, Muon
    "grad_avg": "first",  # RMSprop, centred
    "exp_avg_sq": "second",
    "max_exp_avg_sq": "second",
    "square_avg": "second",  # RMSprop
    "sum": "second",  # Adagrad
    "variance": "second",  # torch's Adafactor, of a vector
    "exp_avg_sq_row": "second",  # transformers' Adafactor
    "exp_avg_sq_col": "second",
    "row_var": "second",  # torch's Adafactor
    "col_var": "second",
}
FOLLOWING = "Adam, SGD, RMSprop, Lion, Muon or Adafactor"
MEANS_OF_ROWS = ("exp_avg_sq_row", "row_var")
MEANS_OF_COLUMNS = ("exp_avg_sq_col", "col_var")
# bitsandbytes calls everything state1 and state2.
BITSANDBYTES: dict[str, dict[str, Moment]] = {
    "adam": {"state1": "first", "state2": "second"},
    "lion": {"state1": "first"},
    "momentum": {"state1": "first"},
    "rmsprop": {"state1": "second"},
    "adagrad": {"state1": "second"},
}


@dataclass(frozen=True)
class Rule:
    """One state: multiplied by `factor`, and with rows for the new tokens, unless it is a mean over all of them."""

    step: LayerGrowth
    factor: float
    by_token: bool = True

    def __call__(self, old: Tensor) -> Tensor:
        """The grown state."""
        if self.step.kept is not None:
            return old[list(self.step.kept)] if self.by_token else old * self.factor
        kept, after = (count - self.step.quantised for count in (self.step.copies * self.step.before, self.step.after))
        if not self.by_token:
            return old * (self.factor * kept / after)
        new = torch.zeros(after, *old.shape[1:], dtype=old.dtype, device=old.device)
        new[:kept].view(self.step.copies, *old.shape)[:] = old * self.factor
        return new


def moments_of(optimizer: Any) -> dict[str, Moment]:
    """Which moment each state of an optimizer is, by the state's name."""
    return {**MOMENTS, **BITSANDBYTES.get(getattr(optimizer, "optimizer_name", ""), {})}


def grown_state(state: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """The state of one parameter after growth; what has no rule is kept as it is."""
    return {key: rules[key](value) if key in rules else value for key, value in state.items()}


def copied_state(state: Mapping[str, Any], moments: Mapping[str, Moment]) -> dict[str, Any]:
    """The state of a parameter's copy in a new block. What writes nothing yet has no direction to go on in."""
    return {
        key: (torch.zeros_like(value) if moments.get(key) == "first" else value.clone())
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def rules_for(
    name: str, state: Mapping[str, Any], parameter: Tensor, growth: Growth, moments: Mapping[str, Moment]
) -> dict[str, Rule]:
    """How each state of a parameter follows, by its name before growth. `parameter` may be the one before or after."""
    layer, _, kind = name.rpartition(".")
    step = None if kind == "bias" else growth.layers.get(layer)
    if step is None and not growth.copies(name):
        return {}
    rules = {}
    for key, value in state.items():
        if isinstance(value, list | tuple | dict):
            raise BadRequestError(
                f"grow_optimizer: state {key!r} of {name} is a {type(value).__name__}, for which there is no rule; use "
                f"{FOLLOWING}, or make a new optimizer for the grown model"
            )
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue  # the step count
        if type(value) not in (Tensor, nn.Parameter) or not value.is_floating_point():
            form = str(value.dtype).removeprefix("torch.") if type(value) is Tensor else type(value).__name__
            raise BadRequestError(
                f"grow_optimizer: state {key!r} of {name} is quantised ({form}), which cannot grow; train with the "
                "32-bit form of this optimizer, or make a new one for the grown model"
            )
        if key not in moments:
            raise BadRequestError(
                f"grow_optimizer: there is no rule for how state {key!r} of {name} follows its tokens; use "
                f"{FOLLOWING}, or make a new optimizer for the grown model"
            )
        if step is None:
            continue
        by_token = key not in MEANS_OF_COLUMNS
        in_parameter = step.before - step.quantised
        shapes = _shapes_by_token(key, in_parameter, parameter)
        if by_token and value.shape not in shapes:
            raise BadRequestError(
                f"grow_optimizer: state {key!r} of {name} has shape {tuple(value.shape)}, and only states with one row "
                f"per token ({in_parameter}) can grow; use {FOLLOWING}, or make a new optimizer for the grown model"
            )
        factor = _factor(moments[key], kind, step.copies, growth.noise)
        if step.kept is not None and not by_token:
            factor = _kept_share(state[MEANS_OF_ROWS[MEANS_OF_COLUMNS.index(key)]], step.kept)
        rules[key] = Rule(step, factor, by_token)
    return rules


def _kept_share(by_token: Tensor, kept: Sequence[int]) -> float:
    """How the mean over tokens changes when only these are left."""
    before = by_token.mean()
    return (by_token[list(kept)].mean() / before).item() if before > 0 else 1.0


def _shapes_by_token(key: str, num_tokens: int, parameter: Tensor) -> list[tuple[int, ...]]:
    if key in MEANS_OF_ROWS:
        return [(num_tokens,), (num_tokens, 1)]
    return [(num_tokens, *parameter.shape[1:])]


def _factor(moment: Moment, kind: str, copies: int, noise: float) -> float:
    if copies == 1 or kind == "value_tokens":
        return 1.0
    return 1 / copies if moment == "first" else 1 / copies**2 + noise**2 * (1 - 1 / copies)
