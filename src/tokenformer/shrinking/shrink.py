"""shrink(): a smaller model, without the tokens that do least.

smaller = shrink(model, 0.5, data=batches)                        # half of the tokens everywhere
smaller = shrink(model, num_tokens={"ffn": 512}, data=batches)    # only the feed-forward blocks
smaller = shrink(model, max_loss=0.01, data=batches)              # as small as 0.01 nats allow
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import BadRequestError
from ..growth.grow import apply_growth
from ..growth.growable import check_growable
from ..growth.step import Growth
from ..models import TokenFormerBaseConfig, growth_records
from ..models.prefixes import SHARES, prefix_count, record_taus
from ..pattention import pattention_layers
from .measure import Batch, Ranking, measure
from .plan import Counts, Factor, check_request, check_unfrozen, plan_shrink, plan_sort, sizes_asked, tau_factor
from .search import fit_sizes

Model = TypeVar("Model", bound=nn.Module)


def shrink(
    model: Model,
    factor: Factor | None = None,
    *,
    num_tokens: Counts | None = None,
    max_loss: float | None = None,
    data: Iterable[Batch],
    inplace: bool = False,
    optimizer: Optimizer | None = None,
) -> Model:
    """Drop the tokens of every Pattention that do least on data, and fit tau to those that stay.

    Give one of `factor`, `num_tokens` and `max_loss`. All layers of a role keep equally many tokens, each its own best.
    The step is kept as `model.last_growth`, so that `grow_optimizer(optimizer, model, smaller)` lets an optimizer
    follow. Gradients are cleared.

    Args:
        model: any module that contains Pattention layers.
        factor: the share of its tokens that every layer keeps, between 0 and 1; or shares by role in a TokenFormer
            (qkv, out, ffn), by layer name or pattern in any other module.
        num_tokens: the new counts, by role or layer in the same way, or one number for all.
        max_loss: find the smallest sizes, in sixteenths by role, at which the loss on the data rises by at most so
            many nats. The data needs labels, and is read many times.
        data: batches as `rank_tokens` takes them. A tensor of ids is its own labels.
        inplace: shrink the model itself.
        optimizer: with `inplace`, let it follow as well.
    """
    check_request(factor, num_tokens, max_loss)
    check_growable(model, "shrink")
    check_unfrozen(model, "shrink")
    if max_loss is not None and not isinstance(data, Collection):
        raise BadRequestError(
            f"shrink: max_loss reads the data many times, and a {type(data).__name__} may be read once; give a list"
        )
    sizes = sizes_asked(model, factor, num_tokens) if max_loss is None else {}
    uses = measure(model, data, "shrink")
    if max_loss is not None:
        assert isinstance(data, Collection)
        sizes = fit_sizes(model, uses, data, max_loss)
    return apply_growth(model, plan_shrink(model, uses, sizes), inplace=inplace, optimizer=optimizer)


def sort_tokens(model: nn.Module, ranking: Mapping[str, Tensor], *, optimizer: Optimizer | None = None) -> None:
    """Put the tokens of every layer in the order of a ranking, the highest first, in place.

    Tokens are a set, so the model computes the same, up to the rounding of sums. A TokenFormer that is sorted by what
    `rank_tokens` returned notes in its configuration what tau suits its first so many tokens: saved, it can be loaded
    with `token_fraction`.

    Args:
        model: any module that contains Pattention layers.
        ranking: by layer, a number for each token, as from `rank_tokens`. Layers that it leaves out stay as they are.
        optimizer: the model's, whose moments follow; without this they would go on with other tokens.
    """
    check_growable(model, "sort")
    check_unfrozen(model, "sort")
    growth = plan_sort(model, ranking)
    apply_growth(model, growth, inplace=True, optimizer=optimizer)
    if isinstance(ranking, Ranking):
        for part, record in growth_records(model):
            if isinstance(record, TokenFormerBaseConfig):
                record_taus(part.base_model, _prefix_taus(model, part.base_model, growth, ranking))


def _prefix_taus(model: nn.Module, base: nn.Module, growth: Growth, ranking: Ranking) -> dict[str, dict[int, float]]:
    """Of every layer of a base model that was sorted, tau for shares of its tokens, as shrinking fits it."""
    names, taus = {module: name for name, module in model.named_modules()}, {}
    for name, layer in pattention_layers(base):
        step = growth.layers[names[layer]]
        assert step.kept is not None
        shares = ranking.shares[names[layer]][list(step.kept)].cumsum(0)  # of the first one, two, …
        counts = dict.fromkeys(prefix_count(layer.num_tokens, share) for share in SHARES)
        taus[name] = {n: layer.tau.item() * tau_factor(layer.kind, shares[n - 1].item()) for n in counts}
    return taus
