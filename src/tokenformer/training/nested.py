"""Nested training: the first tokens of every layer are trained as models of their own, together with the whole.

Enters: a model, and `training.nested`, shares of its tokens such as [0.25, 0.5, 1.0]. Leaves: layers that divide the
rows of every batch among the prefixes while they train, each with a tau of its own; a configuration that says what
these are, so that every checkpoint can be loaded with `token_fraction`. A share that is named twice gets twice as many
rows. Nothing is drawn, so that a run resumes to the same bits.

A prefix of a new layer has √n of its own n for tau. Exact growth appends tokens, and a prefix that was there before
keeps the tau that it was trained with.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import BadRequestError
from ..models.prefixes import nested_points, prefix_count, record_taus, resized
from ..pattention import pattention_layers
from ..pattention.module import Prefix
from .recipe import Recipe

# The steps of growth after which the first tokens of a layer are what they were.
METHODS = ("zero", "rotate", "random")


def nest(model: Any, fractions: Sequence[float]) -> None:
    """Let every layer of a TokenFormer train these shares of its tokens, and the configuration note the tau of each."""
    base = model.base_model
    record_taus(base, nested_points(base, fractions))
    for name, layer in pattention_layers(base):
        whole, points = layer.tau.item(), base.config.token_prefixes[name]
        parts = []
        for fraction in sorted(fractions, reverse=True):  # the first part of the rows is the one with more
            count = prefix_count(layer.num_tokens, fraction)
            parts.append(Prefix(count, 1.0 if count == layer.num_tokens else points[str(count)] / whole))
        layer.nested = tuple(parts)


def check_nested(recipe: Recipe, config: Any, processes: int) -> None:
    """Refuse what nested training cannot be combined with."""
    nested, growth, where = recipe.training.nested, recipe.growth, f"{recipe.path}: training.nested"
    if not nested:
        return
    if getattr(config, "quantization_config", None) is not None:
        raise BadRequestError(
            f"{where} trains the first tokens of every layer, and those of the model are quantised; start from the "
            "model that it was made from, or leave one of them out"
        )
    rows = recipe.batch_per_process(processes)
    if rows < len(nested):
        raise BadRequestError(
            f"{where} divides the rows of a batch among {len(nested)} sizes, and a process has {rows}; use a batch of "
            f"at least {len(nested)}"
        )
    for number, stage in enumerate(growth.stages, start=1):
        if stage.group is not None or (number > 1 and (stage.trains or growth.trains) == "new"):
            raise BadRequestError(
                f"{where} trains the first tokens, and growth.stages[{number - 1}] only the last; leave one of them out"
            )


def check_nested_growth(recipe: Recipe, method: str, where: str) -> None:
    """Refuse a growth step that changes the first tokens."""
    if recipe.training.nested and method not in METHODS:
        raise BadRequestError(
            f"{where}: method is {method}, which changes the first tokens, and training.nested trains these as models "
            "of their own; choose rotate or zero"
        )


def mean_flops(recipe: Recipe, config: Any, processes: int) -> tuple[float, float]:
    """FLOPs of a unit, forward and in training; with nested prefixes, the mean over the rows of a batch."""
    if not recipe.training.nested:
        return recipe.data.flops(config)
    forward = training = 0.0
    for fraction, rows in row_shares(recipe.training.nested, recipe.batch_per_process(processes)):
        of_size = recipe.data.flops(resized(config, fraction))
        forward, training = forward + rows * of_size[0], training + rows * of_size[1]
    return forward, training


def row_shares(nested: Sequence[float], rows: int) -> list[tuple[float, float]]:
    """The sizes that compute the rows of a batch, in their order, each with its share of them."""
    count = len(nested)
    return [
        (fraction, (rows // count + (i < rows % count)) / rows)
        for i, fraction in enumerate(sorted(nested, reverse=True))
    ]
