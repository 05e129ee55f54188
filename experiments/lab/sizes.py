"""What the language experiments have in common: sizes, rates, seeds, steps, and training from scratch.

4 layers, 4 heads, 256 bytes of context, 2048 bytes a step. A size of the ladder is the number of parameter tokens of a
projection, at width 128; the FFN has four times as many.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from tokenformer import cost

from .models import config_of, equal_neox
from .results import best, final
from .spec import NeoX, Run, TokenFormer

SIZES = (32, 64, 128, 256)  # 0.26, 0.52, 1.05 and 2.1 million parameters without the embedding
STEPS = 2000
RATES = {TokenFormer: (1e-3, 2e-3, 4e-3), NeoX: (2e-3, 4e-3, 8e-3)}
SEEDS = (0, 1, 2)
# Parameters up to which every rate is tried to the end, and the best is trained with every seed.
TINY, SMALL = 400_000, 1_200_000
NARROW = 0.05  # the other initialisation of a GPT-NeoX that is tried
TIE = 0.002  # a rate whose loss with the first seed is this close to the best one's has all seeds too
PROBE = 600  # steps that every rate is tried for at the larger sizes, before a few are tried to the end


def token_former(tokens: int, width: int = 128, **more: Any) -> TokenFormer:
    """A TokenFormer with the library's initialisation."""
    return TokenFormer(tokens, width=width, init=width**-0.5, **more)


def neox(width: int, **more: Any) -> NeoX:
    """A GPT-NeoX with an initialisation as wide as ours: better than transformers' 0.02, see equal_parameters.

    Whether NARROW is better still, `initialised` finds out at every size.
    """
    return NeoX(**{**more, "width": width, "init": width**-0.5})


def models(tokens: int, width: int = 128) -> tuple[TokenFormer, NeoX]:
    """The two models of a size."""
    ours = token_former(tokens, width)
    return ours, neox(**asdict(equal_neox(ours)))


@cache
def has_fewer(model: TokenFormer | NeoX, parameters: int) -> bool:
    """Whether it is smaller than that."""
    return cost.parameters(config_of(model)).total < parameters


def scratch(model: TokenFormer | NeoX, lr: float, seed: int = 0) -> Run:
    """Training from random weights."""
    return Run(model, lr, STEPS, seed, marks=() if has_fewer(model, TINY) else (Run(model, lr, PROBE).decay_start,))


def at_rates(at: Callable[[float], Run], rates: Sequence[float], factor: float = 2) -> list[Run]:
    """A run at every rate. As long as the best is the lowest or the highest, the next one beyond it is tried too.

    factor: between one of those and the next one beyond it.
    """
    runs = [at(rate) for rate in rates]
    chosen = best(runs)
    if chosen == runs[0]:
        return at_rates(at, [rates[0] / factor, *rates], factor)
    if chosen == runs[-1]:
        return at_rates(at, [*rates, rates[-1] * factor], factor)
    return runs


def down_from(shorter: Sequence[Run], at: Callable[[float], Run]) -> list[Run]:
    """Longer runs, from the best rate of shorter ones down until one is worse; empty as long as that is not known.

    The longer one trains, the lower the best rate may be.
    """
    chosen = best(shorter)
    if chosen is None:
        return []
    runs = [at(chosen.lr / 2), at(chosen.lr)]
    while best(runs) == runs[0]:
        runs.insert(0, at(runs[0].lr / 2))
    return runs


def sweep(model: TokenFormer | NeoX) -> list[Run]:
    """Every rate, with the first seed: to the end for the smallest sizes, for PROBE steps for the others."""
    tiny = has_fewer(model, TINY)
    return at_rates(lambda rate: scratch(model, rate) if tiny else Run(model, rate, PROBE), RATES[type(model)])


def starts(model: NeoX) -> list[Run]:
    """A GPT-NeoX with each of its initialisations, to the end at the best rate of this one; empty until it is known.

    As with rates, the order after PROBE steps need not be that at the end.
    """
    chosen = best(sweep(model))
    return [] if chosen is None else [scratch(replace(model, init=init), chosen.lr) for init in (model.init, NARROW)]


def initialised(model: TokenFormer | NeoX) -> TokenFormer | NeoX | None:
    """The model itself; a GPT-NeoX with the better of its two initialisations, None as long as that is not known."""
    if isinstance(model, TokenFormer) or model.init == NARROW:
        return model
    chosen = best(starts(model))
    return None if chosen is None else chosen.model


def like_the_smallest(model: NeoX) -> NeoX:
    """A GPT-NeoX of about the ladder's smallest size with the initialisation that is better there, once it is known."""
    nearest = initialised(models(SIZES[0])[1])
    return model if nearest is None or nearest.init != NARROW else replace(model, init=NARROW)


def probes(model: TokenFormer | NeoX) -> list[Run]:
    """All that goes before the runs to the end: the rates, for a GPT-NeoX with its two initialisations."""
    if isinstance(model, TokenFormer):
        return sweep(model)
    settled = initialised(model)
    return [*sweep(model), *starts(model), *(sweep(settled) if settled else [])]


def to_the_end(model: TokenFormer | NeoX) -> list[Run]:
    """The rates that are tried to the end, with the first seed; empty as long as they are not known."""
    settled = initialised(model)
    if settled is None:
        return []
    rates = sweep(settled)
    return rates if has_fewer(settled, TINY) else down_from(rates, lambda rate: scratch(settled, rate))


def rate_of(model: TokenFormer | NeoX) -> float | None:
    """The best of the rates, once all are tried."""
    chosen = best(to_the_end(model))
    return None if chosen is None else chosen.lr


def contenders(model: TokenFormer | NeoX) -> list[list[Run]]:
    """Training from scratch with every seed for the small sizes: at the best rate, and at those that tie with it.

    The best with the first seed comes first; empty as long as it is not known.
    """
    tried = to_the_end(model)
    if best(tried) is None:
        return []
    by_loss = sorted((final(run) or math.inf, run.lr, run.model) for run in tried)
    seeds = SEEDS if has_fewer(model, SMALL) else SEEDS[:1]
    return [
        [scratch(settled, lr, seed) for seed in seeds]
        for loss, lr, settled in by_loss
        if loss <= (1 + TIE) * by_loss[0][0]
    ]


def seeded(model: TokenFormer | NeoX) -> list[Run]:
    """The contender with the lowest mean, or the first as long as some are missing; empty if there is none yet."""
    rivals = contenders(model)
    means = [sum(final(run) or math.inf for run in runs) for runs in rivals]
    return rivals[means.index(min(means))] if rivals and math.isfinite(sum(means)) else (rivals or [[]])[0]
