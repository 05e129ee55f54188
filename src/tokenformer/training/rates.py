"""Learning rates by parameter: they follow the size of a layer (growth/rates.py) and, if asked, its depth.

Enters: an optimizer whose groups have one rate. Leaves: groups by their share of it. Layer-wise decay is usual when a
trained ViT is trained on: of L blocks, block i (from 0) has the share decay^(L − i), the embedding decay^(L + 1), and
what comes after the blocks 1.
"""

import re
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer


def share_by_depth(name: str, layers: int, decay: float) -> float:
    """The share of the learning rate that a parameter of a TokenFormer gets by layer-wise decay."""
    block = re.search(r"\blayers\.(\d+)\.", name)
    if block:
        return decay ** (layers - int(block.group(1)))
    # A tied output layer is the embedding, and is not named.
    return decay ** (layers + 1) if re.search(r"\bembed", name) else 1.0


def divide_by_share(optimizer: Optimizer, model: nn.Module, shares: Mapping[str, float]) -> None:
    """Cut an optimizer's groups, before its first step, so that each has parameters of one rate; the largest first."""
    share_of = {id(p): shares[name] for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        for share in {share_of[id(p)] for p in group["params"]}:
            parameters = [p for p in group["params"] if share_of[id(p)] == share]
            groups.append({**group, "params": parameters, "lr": share * group["lr"]})
    optimizer.param_groups[:] = sorted(groups, key=lambda group: group["lr"], reverse=True)
