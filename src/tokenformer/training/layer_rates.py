"""Layer-wise decay of the learning rate, usual when a trained ViT is trained on: the deeper, the faster.

Enters: an optimizer whose groups have one rate. Leaves: groups by depth. Of L blocks, block i (from 0) has the rate
lr · decay^(L − i), the embedding lr · decay^(L + 1), and what comes after the blocks lr.
"""

import re

from torch import nn
from torch.optim import Optimizer


def share_of_rate(name: str, layers: int, decay: float) -> float:
    """The share of the learning rate that a parameter of a TokenFormer gets."""
    block = re.search(r"\blayers\.(\d+)\.", name)
    if block:
        return decay ** (layers - int(block.group(1)))
    # A tied output layer is the embedding, and is not named.
    return decay ** (layers + 1) if re.search(r"\bembed", name) else 1.0


def divide_by_depth(optimizer: Optimizer, model: nn.Module, layers: int, decay: float) -> None:
    """Cut an optimizer's groups, before its first step, so that each has parameters of one rate; the largest first."""
    shares = {id(p): share_of_rate(name, layers, decay) for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        for share in {shares[id(p)] for p in group["params"]}:
            parameters = [p for p in group["params"] if shares[id(p)] == share]
            groups.append({**group, "params": parameters, "lr": share * group["lr"]})
    optimizer.param_groups[:] = sorted(groups, key=lambda group: group["lr"], reverse=True)
