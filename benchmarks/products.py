"""Matrix products run bare, into arrays that are there before: the time that nothing built of them can go below."""

from collections.abc import Callable

import torch
from torch import Tensor

Products = Callable[[], None]


def product(a: Tensor, b: Tensor) -> Products:
    """a @ b into an array of its own."""
    out = torch.empty(*a.shape[:-1], b.shape[-1])
    return lambda: torch.matmul(a, b, out=out)


def with_gradients(a: Tensor, b: Tensor) -> list[Products]:
    """a @ b and the products that give the gradients of a and b."""
    gradient = torch.randn(*a.shape[:-1], b.shape[-1])
    return [product(a, b), product(gradient, b.mT), product(a.mT, gradient)]


def one_after_the_other(products: list[Products]) -> Products:
    """All of them as one callable."""

    def work() -> None:
        for call in products:
            call()

    return work
