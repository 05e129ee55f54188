"""Whether an exported file computes what the model computes.

Enters: a graph, and the file as a function. Leaves: the largest difference, relative to the largest entry, over prompts
or images of other sizes than the exported ones, one of them with padding, and, where there is a cache, over a further
token after each.
"""

import torch
from torch import Tensor

from ..errors import BadResultError
from ..models.sample import HALF_TOLERANCE, evaluating, relative_difference
from ..pattention.quantised_linear import plainly
from .graph import Graph, Runner

# Another runtime's kernels add up in another order; in half precision every step rounds.
TOLERANCE = 1e-4
# What weights and rows of 8 bits do to a model that is not trained is a few percent.
INT8_TOLERANCE = 0.3


def check_same(graph: Graph, run: Runner, file: str) -> float:
    """The largest difference, or an error if it is more than rounding."""
    difference = largest_difference(graph, run)
    tolerance = TOLERANCE if next(graph.model.parameters()).dtype.itemsize > 2 else HALF_TOLERANCE
    if not difference <= tolerance:  # NaN too
        raise BadResultError(
            f"{file} differs from the model by {difference:.2g} of the largest entry, and {tolerance:g} is allowed; "
            "nothing was written"
        )
    return difference


def check_close(graph: Graph, run: Runner, file: str) -> float:
    """The largest difference of a file in 8 bits, which is more than rounding; an error if it is another function."""
    difference = largest_difference(graph, run)
    if not difference <= INT8_TOLERANCE:
        raise BadResultError(
            f"{file} in 8 bits differs from the model by {difference:.2g} of the largest entry, which is no rounding; "
            "nothing was written; export without int8"
        )
    return difference


@torch.no_grad()
def largest_difference(graph: Graph, run: Runner) -> float:
    """How far the outputs of `run` are from the model's at most; NaN if they are not numbers."""
    found = []
    with evaluating(graph.module), plainly(graph.model):  # as exported, integers are multiplied without rounding rows
        for call, counts in graph.comparisons():
            ours, theirs = graph.module(**call), run(call)
            found.append(_difference(theirs, ours, counts))
            if graph.cache is not None:
                # Each goes on from its own cache.
                ours = graph.module(**graph.next_step(call, ours["present"]))
                found.append(_difference(run(graph.next_step(call, theirs["present"])), ours, None))
    return float(torch.tensor(found).max())


def _difference(theirs: dict[str, Tensor], ours: dict[str, Tensor], counts: Tensor | None) -> float:
    """Of the first output: logits, or hidden states. At padding, models may compute anything."""
    name = next(iter(ours))
    pair = theirs[name], ours[name]
    if counts is not None and pair[1].shape[:2] == counts.shape:
        pair = pair[0][counts], pair[1][counts]
    return relative_difference(*pair)
