"""Muon for the tokens, AdamW for everything else, as one optimizer.

Muon (torch's) moves a matrix along its momentum with all singular values made alike, so that no direction is left
behind. It is for matrices within blocks: keys and values; embeddings, norms and biases are AdamW's. Its steps are so
scaled that a rate means what it means to AdamW. It keeps one number for each number of a token, AdamW two.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ..errors import BadRequestError

BY_MUON = "by_muon"


class MuonWithAdamW(Optimizer):
    """Both as one: one list of groups, each of one of the two, and one state.

    Args:
        params: groups; those that say which of the two they are for (`by_muon`) are taken as they are.
        lr: the rate of groups that have none.
        tokens: the parameters that Muon has, of groups that do not say.
        betas, eps, fused: AdamW's.
        momentum: Muon's.
        weight_decay: of groups that have none.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        tokens: Collection[Tensor] = (),
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        fused: bool | None = None,
    ) -> None:
        check_muon()
        parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for those, mine in _divided(group, {id(token) for token in tokens}):
                parts[mine].append({**group, "params": those, BY_MUON: mine})
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        nothing: list[dict[str, Any]] = [{"params": []}]
        adamw = AdamW(parts[False] or nothing, betas=betas, eps=eps, fused=fused, **common)
        how: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(parts[True] or nothing, **how, **common)
        self._parts: dict[bool, Optimizer] = {True: muon, False: adamw}
        groups = [group for part in (adamw, muon) for group in part.param_groups if group["params"]]
        super().__init__(groups, {**common, "betas": betas, "eps": eps, "momentum": momentum, "fused": fused})

    def step(self, closure: Any = None) -> Any:
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, part in self._parts.items():
            # Asked for anew each time: groups are cut, and grow, after they were made.
            part.param_groups = [group for group in self.param_groups if group[BY_MUON] is mine]
            part.state = self.state
            part.step()
        return loss


def _divided(group: dict[str, Any], tokens: set[int]) -> Iterable[tuple[list[Tensor], bool]]:
    """The parameters of a group, and whether they are Muon's."""
    parameters = list(group["params"])
    if BY_MUON in group:
        return [(parameters, group[BY_MUON])]
    parts = [([p for p in parameters if (id(p) in tokens) is mine], mine) for mine in (False, True)]
    return [(those, mine) for those, mine in parts if those]


def check_muon() -> None:
    """Refuse it where torch has none."""
    if not hasattr(torch.optim, "Muon"):
        raise BadRequestError(
            f"training.optimizer is muon, which needs torch 2.9 or newer; {torch.__version__} is installed: use adamw"
        )
