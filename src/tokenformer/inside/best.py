"""What an index keeps while it is made: of every token the windows in which it fires most, and a sample of its weights.

Enters: the weights of batches of windows. Leaves: the best windows, with weight and position, at most one of each
window; and quantiles of the weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class Best:
    """The `count` windows of the largest |weight| of every token: weights, windows and positions, [n, count] each."""

    def __init__(self, num_tokens: int, count: int) -> None:
        self.weights = torch.zeros(num_tokens, count)
        self.windows = torch.full((num_tokens, count), -1, dtype=torch.int32)
        self.positions = torch.zeros(num_tokens, count, dtype=torch.int32)

    def add(self, weights: Tensor, first: int) -> None:
        """Weights [windows, length, n] of windows that are numbered from `first`."""
        peaks = weights.abs().amax(1).float().cpu()  # [windows, n]
        better = (peaks.amax(0) > self.weights[:, -1].abs()).nonzero().squeeze(1)  # tokens
        if not len(better):
            return
        count, sizes = self.weights.shape[1], torch.cat([self.weights[better].abs(), peaks[:, better].mT], dim=1)
        order = sizes.sort(dim=1, descending=True, stable=True).indices[:, :count]  # [tokens, count]
        token, rank = (order >= count).nonzero(as_tuple=True)  # those that are new
        window = order[token, rank] - count
        chosen = weights[window, :, better[token].to(weights.device)].float().cpu()  # [new, length]
        position = chosen.abs().argmax(1)
        kept = order.clamp(max=count - 1)
        for name, new in (
            ("weights", chosen.gather(1, position.unsqueeze(1)).squeeze(1)),
            ("windows", window + first),
            ("positions", position),
        ):
            old: Tensor = getattr(self, name)
            rows = old[better].gather(1, kept)
            rows[token, rank] = new.to(rows.dtype)
            old[better] = rows

    def state(self) -> dict[str, Tensor]:
        """All of it, to be saved."""
        return {"weights": self.weights, "windows": self.windows, "positions": self.positions}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.weights, self.windows, self.positions = (state[name].clone() for name in self.state())


class Sample:
    """Every `step`-th row of the weights."""

    def __init__(self, num_tokens: int, step: int) -> None:
        self.step, self.rows = step, [torch.zeros(0, num_tokens)]
        self.seen = 0

    def add(self, rows: Tensor) -> None:
        """Rows [r, n]."""
        self.rows.append(rows[-self.seen % self.step :: self.step].float().cpu())
        self.seen += len(rows)

    def quantiles(self) -> Tensor:
        """[n, len(QUANTILES)]."""
        found = torch.cat(self.rows).sort(dim=0).values
        if not len(found):
            return found.new_zeros(found.shape[1], len(QUANTILES))
        at = [round(level * (len(found) - 1)) for level in QUANTILES]
        return found[at].mT.contiguous()

    def state(self) -> dict[str, Tensor]:
        """All of it, to be saved."""
        self.rows = [torch.cat(self.rows)]
        return {"sample": self.rows[0], "seen": torch.tensor(self.seen)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.rows, self.seen = [state["sample"].clone()], int(state["seen"])
