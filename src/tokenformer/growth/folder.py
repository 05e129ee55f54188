"""Growth of a saved model: a model folder in, a larger one out, and the proof that both compute the same.

    tokenformer grow models/small models/large --factor 2 --method split

The request is checked before a weight is read. The model grows in place, so that memory holds little more than the
grown one, and the logits before and after are compared before anything is written.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadResultError
from ..files import check_new, write_new
from ..models import TokenFormerBaseConfig, TokenFormerPreTrainedModel
from ..models.images import copy_image_processor
from ..models.loading import MODELS, read_tokenformer, read_tokenformer_config
from ..models.text import copy_tokenizer
from ..pattention import default_tau
from .grow import apply_growth
from .layer import grown_tau
from .plan import LayerGrowth, plan_growth

# How far logits may move, relative to the largest: the promise of docs/growth.md. Half precision rounds the values that
# split shares out, and the keys that rotate turns.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF_TOLERANCE = 5e-2


@dataclass(frozen=True)
class FolderGrowth:
    """The configurations before and after, and how far the logits moved; None if that was not looked at."""

    before: TokenFormerBaseConfig
    after: TokenFormerBaseConfig
    difference: float | None


def grow_folder(
    source: str | os.PathLike, target: str | os.PathLike, *, verify: bool = True, **request: Any
) -> FolderGrowth:
    """Grow the model in `source` into the new folder `target`; its tokenizer or image processor comes along.

    `request` is that of `grow`: factor, num_tokens or to, and method, seed, noise, exact. With `verify`, logits on
    random inputs are compared, and those of a method that promises exactness must not move.
    """
    source, target = Path(source), Path(target)
    check_new(target)
    before = read_tokenformer_config(source)
    with torch.device("meta"):
        growth = plan_growth(MODELS[type(before)](before), **request)
    model = read_tokenformer(source)
    old_logits = _sample_logits(model) if verify else None
    apply_growth(model, growth, inplace=True)
    difference = None
    if old_logits is not None:
        difference = ((_sample_logits(model) - old_logits).abs().max() / old_logits.abs().max()).item()
        tolerance = TOLERANCES.get(model.dtype, HALF_TOLERANCE)
        # Written so that NaN fails too.
        if growth.method != "random" and not difference <= tolerance:
            raise BadResultError(
                f"the grown model's logits differ from those of {source} by {difference:.2g} of the largest, and "
                f"{tolerance:g} is allowed; nothing was written"
            )
    with write_new(target) as (partial,):
        model.save_pretrained(partial)
        copy_tokenizer(source, partial)
        copy_image_processor(source, partial)
    return FolderGrowth(before, model.config, difference)


def taus(config: TokenFormerBaseConfig) -> dict[str, float]:
    """The scale tau of each role's layers, followed from birth through every growth step."""
    history = config.growth_history or []
    found = {}
    for role, count in config.num_tokens.items():
        born_with = history[0]["before"][role] if history else count
        tau = torch.tensor(default_tau(born_with, config.pattention_kind), dtype=torch.float64)
        for entry in history:
            if entry["after"][role] != entry["before"][role]:
                step = LayerGrowth.by(entry["method"], entry["before"][role], entry["after"][role], config.hidden_size)
                tau = grown_tau(tau, config.pattention_kind, step, entry["method"])
        found[role] = tau.item()
    return found


@torch.no_grad()
def _sample_logits(model: TokenFormerPreTrainedModel) -> Tensor:
    return model.eval()(**model.dummy_inputs).logits.double()
