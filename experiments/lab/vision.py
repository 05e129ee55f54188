"""What the experiments with images have in common: sizes, rates, seeds, steps, and training from scratch.

CIFAR-10, 4 layers of width 96, 3 heads, patches of 4 pixels, 64 images a step. With 72 tokens a projection (288 in the
FFN) a TokenFormer has as many parameters as a ViT of its width.
"""

from dataclasses import replace
from typing import Any

from .models import equal_vit
from .results import best
from .sizes import SEEDS, at_rates, down_from
from .spec import Run, TokenViT, ViT

TOKENS, WIDTH, HEADS = 72, 96, 3
EPOCH = 703  # steps for the 45,000 images that are not held out
STEPS = 4 * EPOCH
SHORTER, LONGER = 2370, 4283  # steps of the large and the small size with the FLOPs of vision_growth's way to the large
RATES = (1e-3, 2e-3, 4e-3)
BATCH = 64


def token_vit(tokens: int = TOKENS, **more: Any) -> TokenViT:
    """A TokenFormer for images with the library's initialisation."""
    return TokenViT(tokens, width=WIDTH, heads=HEADS, init=WIDTH**-0.5, **more)


def vit() -> ViT:
    """The ViT with as many parameters, and transformers' initialisation."""
    return equal_vit(token_vit())


def scratch(model: TokenViT | ViT, lr: float, seed: int = 0, steps: int = STEPS) -> Run:
    """Training from random weights; a longer run begins as the shorter ones do."""
    run = Run(model, lr, steps, seed, text="cifar10", batch=BATCH)
    branches = (less for less in (EPOCH, SHORTER, STEPS) if less < steps)
    return replace(run, marks=tuple(replace(run, steps=less).decay_start for less in branches))


def sweep(model: TokenViT | ViT) -> list[Run]:
    """Every rate for one epoch, with the first seed."""
    return at_rates(lambda rate: scratch(model, rate, steps=EPOCH), RATES)


def to_the_end(model: TokenViT | ViT) -> list[Run]:
    """The best rate of one epoch and lower ones, for all epochs; empty as long as that is not known."""
    return down_from(sweep(model), lambda rate: scratch(model, rate))


def rate_of(model: TokenViT | ViT, steps: int = STEPS) -> float | None:
    """The best of the rates for an epoch or for all, once they are tried."""
    chosen = best(sweep(model) if steps == EPOCH else to_the_end(model))
    return None if chosen is None else chosen.lr


def seeded(model: TokenViT | ViT, steps: int = STEPS) -> list[Run]:
    """Training from scratch with every seed at the best rate; empty while it is not known."""
    rate = rate_of(model, steps)
    return [] if rate is None else [scratch(model, rate, seed, steps) for seed in SEEDS]
