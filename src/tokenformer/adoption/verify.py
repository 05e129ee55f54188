"""Is it the same? Compares what the host computed, layer by layer and in the end, with what the adopted model does.

Enters: a model before its modules are replaced (`watch`), and the new modules. Leaves: the relative error of every
layer; or an error that names the worst of them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadRequestError, BadResultError
from ..models.sample import call_once, in_mode, relative_difference, sample_inputs, sample_output
from .plan import Site


@dataclass
class Seen:
    """What entered and left the host, as a whole and for each module of interest, call by call."""

    inputs: list[Mapping[str, Any]]
    outputs: list[Tensor]
    entered: dict[str, list[Tensor]]
    left: dict[str, list[Tensor]]


def watch(model: PreTrainedModel, base: nn.Module, sites: list[Site], inputs: Mapping[str, Any] | None) -> Seen:
    """Run the model on random inputs, and on `inputs` if any, and keep what matters of it.

    With `inputs` a model may refuse random ones, as one does that chooses among several sequences.
    """
    seen = Seen([], [], {}, {})
    given = None if inputs is None else {key: value for key, value in inputs.items() if key != "labels"}
    names = {name for site in sites for layer in site.layers for name in (layer.name, *layer.removed)}
    names |= {site.norm for site in sites}

    def call(some: Mapping[str, Any]) -> None:
        seen.outputs.append(sample_output(model, some))
        seen.inputs.append(some)

    with _watching(base, names, seen):
        try:
            call(sample_inputs(model))
        except BadRequestError:
            if given is None:
                raise
            seen.entered.clear()
            seen.left.clear()
        if given is not None:
            call(given)
    return seen


@torch.no_grad()
def check_training_mode(model: PreTrainedModel, base: nn.Module, sites: list[Site], seen: Seen) -> None:
    """Refuse a model with dropout between modules that one Pattention is to replace.

    The comparison in evaluation mode does not see that. Pairs that do not fit there either are its business.
    """
    pairs = []
    for site in sites:
        for layer in site.layers:
            pairs += [] if site.dropped else [(site.norm, layer.name)]
            pairs += [(layer.activation, layer.last)] if layer.activation is not None else []
    pairs = [(one, other) for one, other in pairs if torch.equal(seen.left[one][-1], seen.entered[other][-1])]
    again = Seen([], [], {}, {})
    with (
        in_mode(model, training=True),
        torch.random.fork_rng(),
        _watching(base, {n for pair in pairs for n in pair}, again),
    ):
        call_once(model, seen.inputs[-1])
    for one, other in pairs:
        # In training some hosts leave out whole blocks.
        if other in again.entered and not torch.equal(again.left[one][-1], again.entered[other][-1]):
            raise BadRequestError(
                f"adopt: in training mode {other} does not read the output of {one}, and one layer is to replace both: "
                "dropout lies between them; set it to 0 in the configuration, or leave this part out"
            )


@contextmanager
def _watching(base: nn.Module, names: Iterable[str], seen: Seen) -> Iterator[None]:
    """Note what enters and leaves the modules of these names."""

    def note(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            seen.entered.setdefault(name, []).append(arguments[0])
            seen.left.setdefault(name, []).append(output)

        return hook

    hooks = [base.get_submodule(name).register_forward_hook(note(name)) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compare_layers(sites: list[Site], new: Mapping[str, nn.Module], seen: Seen, tolerance: float) -> dict[str, float]:
    """The error of every new layer, from the input of its norm, or its own if the norm stays, to its output."""
    errors = {}
    for site in sites:
        for layer in site.layers:
            entered = seen.entered[layer.name if site.rows.kept else site.norm]
            given = entered if site.rows.kept else [new[site.norm](rows) for rows in entered]
            pairs = zip(given, seen.left[layer.last], strict=True)
            errors[layer.name] = _worst(relative_difference(new[layer.name](rows), left) for rows, left in pairs)
    _check(errors, tolerance)
    return errors


def compare_outputs(model: PreTrainedModel, seen: Seen, tolerance: float) -> None:
    """The logits, now that the modules are in place."""
    pairs = zip(seen.inputs, seen.outputs, strict=True)
    difference = _worst(relative_difference(sample_output(model, given), before) for given, before in pairs)
    _check({f"{type(model).__name__}'s output": difference}, tolerance)


def _worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if one is."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def _check(errors: Mapping[str, float], tolerance: float) -> None:
    # Written so that NaN fails too.
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if not wrong:
        return
    name = max(wrong, key=lambda name: (math.isnan(wrong[name]), wrong[name]))
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise BadResultError(
        f"adopt: {name}{more} would differ from the original by {wrong[name]:.2g} of its largest entry, and "
        f"{tolerance:g} is allowed; nothing was changed; accept it with a larger tolerance, or see ballast='single' in "
        "docs/adopting.md"
    )
