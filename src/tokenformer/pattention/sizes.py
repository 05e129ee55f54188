"""Sequences of several sizes in one batch: each position computes with a share of every layer's tokens, the first ones.

Enters: the shares that a model offers; before a call, which of them each sequence has, of sequences that stand end to
end in one row. Leaves: what a layer of each size computes. The tokens of a size are views of the first rows of the
whole's: nothing is held twice. Widths are the same for all sizes, so whatever is no Pattention computes all positions
together.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .module import Pattention, Prefix, pattention_layers

WHOLE = 1.0


class Sizes:
    """The sizes that a model offers, and who has which. One for all its layers.

    prefixes: by share, of every layer by its name, the first tokens that it has.
    """

    def __init__(self, prefixes: Mapping[float, Mapping[str, Prefix]]) -> None:
        self.prefixes = dict(prefixes)
        self.count = 0
        self.parts: dict[float, Tensor] = {}  # the positions of each size; empty where all have the whole

    def set_rows(self, sizes: Sequence[float], lengths: Sequence[int]) -> None:
        """From now on, which size each sequence has, and how long it is."""
        self.count, self.parts = sum(lengths), {}
        if all(size == WHOLE for size in sizes):
            return
        each = torch.tensor(sizes, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
        self.parts = {size: (each == size).nonzero()[:, 0] for size in dict.fromkeys(sizes)}

    def of_layer(self, layer: Pattention, x: Tensor) -> Iterator[tuple[Tensor, Prefix | None]]:
        """The positions of each size in x [..., positions, d_in], and what the layer has for it: None is all."""
        if x.shape[-2] != self.count:
            raise ValueError(f"the batch has {x.shape[-2]} positions in a row, and sizes were given for {self.count}")
        for size, positions in self.parts.items():
            yield positions.to(x.device), None if size == WHOLE else self.prefixes[size][layer.size_name]

    def attend(self, layer: Pattention, x: Tensor) -> Tensor:
        """What the layer computes for x, each position by its size; without token groups that stand beside it."""
        outputs: Tensor | None = None
        for positions, prefix in self.of_layer(layer, x):
            tokens = layer._tokens(x, prefix)
            tau = layer.tau if prefix is None else layer.tau * prefix.tau_factor
            if len(positions) == self.count:
                return layer._attend(x, tokens, tau)
            if tokens.mask is not None:
                tokens = tokens._replace(mask=tokens.mask.index_select(-2, positions))
            part = layer._attend(x.index_select(-2, positions), tokens, tau)
            if outputs is None:
                outputs = part.new_empty(*x.shape[:-1], part.shape[-1])
            outputs.index_copy_(-2, positions, part)
        assert outputs is not None
        return outputs


def offer(model: nn.Module, prefixes: Mapping[float, Mapping[str, Prefix]]) -> Sizes:
    """Let every layer of a model compute by size. Until rows are set, all have the whole."""
    sizes = Sizes(prefixes)
    for name, layer in pattention_layers(model):
        layer.sizes, layer.size_name = sizes, name
    return sizes


def sizes_of(model: nn.Module) -> Sizes | None:
    """What decides which positions have which size; None if a model offers none."""
    return next((layer.sizes for _, layer in pattention_layers(model) if layer.sizes is not None), None)
