"""What the language experiments have in common: sizes, rates, seeds, steps, and training from scratch.

A size is the number of parameter tokens of a projection; the FFN has four times as many. Width 128, 4 layers, 4 heads,
256 bytes of context, 2048 bytes a step.
"""

from .models import equal_neox
from .results import best
from .spec import NeoX, Run, TokenFormer

SIZES = (32, 64, 128, 256)  # 0.26, 0.52, 1.05 and 2.1 million parameters without the embedding
STEPS = 2000
RATES = (1e-3, 2e-3, 4e-3)
SEEDS = (0, 1, 2)
SEEDED = (32, 64)  # the sizes that are trained with every seed


def scratch(model: TokenFormer | NeoX, lr: float, seed: int = 0) -> Run:
    """Training from random weights."""
    return Run(model, lr, STEPS, seed)


def models(tokens: int) -> tuple[TokenFormer, NeoX]:
    """The two models of a size."""
    ours = TokenFormer(tokens)
    return ours, equal_neox(ours)


def sweep(model: TokenFormer | NeoX) -> list[Run]:
    """Every rate, with the first seed."""
    return [scratch(model, rate) for rate in RATES]


def seeded(model: TokenFormer | NeoX, seeds: tuple[int, ...] = SEEDS) -> list[Run]:
    """Every seed, at the rate that did best; empty as long as it is not known."""
    chosen = best(sweep(model))
    return [] if chosen is None else [scratch(model, chosen.lr, seed) for seed in seeds]
