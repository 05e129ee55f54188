"""Growth of a saved model: a model folder in, a larger one out, and the proof that both compute the same.

    tokenformer grow models/small models/large --factor 2

The request is checked before a weight is read. The model, a TokenFormer or an adopted one, grows in place, so that
memory holds little more than the grown one, and the logits before and after are compared before anything is written.
"""

import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..io import check_new, check_outside, write_new
from ..memory import check_fits, machine_memory
from ..models import TokenFormerBaseConfig
from ..models.loading import empty_model, read_config, read_model
from ..models.sample import checked_difference, sample_inputs, sample_output, tolerance_of
from ..models.side_files import copy_beside_weights
from ..pattention import default_tau
from ..pattention.quantised import plainly
from .grow import apply_growth
from .layer import grown_tau
from .plan import plan_growth
from .step import LayerGrowth


@dataclass(frozen=True)
class FolderGrowth:
    """The configurations before and after, and how far the logits moved; None if they were not compared."""

    before: Any
    after: Any
    difference: float | None


def grow_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    verify: bool = True,
    trust_remote_code: bool = False,
    **request: Any,
) -> FolderGrowth:
    """Grow the model in `source` into the new folder `target`; its tokenizer or image processor is copied too.

    `request` is that of `grow`: sizes, what new blocks are, and method, seed, noise, exact. With `verify`, logits on
    random inputs are compared, and a method that promises exactness must not change them.
    """
    source, target = Path(source), Path(target)
    check_new(target)
    check_outside(target, source)
    before = read_config(source, TokenFormerBaseConfig, or_adopted=True, trust_remote_code=trust_remote_code)
    empty = empty_model(copy.deepcopy(before))
    growth = plan_growth(empty, **request)
    apply_growth(empty, growth, inplace=True)
    parameters = empty.num_parameters()
    needed = parameters * (before.dtype or torch.float32).itemsize
    check_fits(f"the grown model, of {parameters:,} parameters,", needed, machine_memory(), "grow it less")
    model = read_model(source, trust_remote_code=trust_remote_code)
    inputs = sample_inputs(model)
    with plainly(model):
        old_logits = sample_output(model, inputs) if verify else None
    apply_growth(model, growth, inplace=True)
    difference = None
    if old_logits is not None:
        with plainly(model):
            difference = checked_difference(
                model,
                inputs,
                old_logits,
                exact=growth.method != "random",
                tolerance=tolerance_of(model.dtype),
                said=f"the grown model's logits differ from those of {source}",
            )
    with write_new(target) as (partial,):
        model.save_pretrained(partial)
        copy_beside_weights(source, partial)
    return FolderGrowth(before, model.config, difference)


def taus(config: TokenFormerBaseConfig) -> dict[str, float]:
    """The scale tau of each role's layers, followed from birth through every growth step.

    Shrinking gives every layer a factor of its own; their mean is followed.
    """
    history = config.growth_history or []
    found = {}
    for role, count in config.num_tokens.items():
        born_with = history[0]["before"][role] if history else count
        tau = torch.tensor(default_tau(born_with, config.pattention_kind), dtype=torch.float64)
        for entry in history:
            if entry["method"] == "shrink":
                factors = [entry["tau_factors"].get(name, 1.0) for name in config.token_roles[role]]
                tau = tau * math.prod(factors) ** (1 / len(factors))
            elif entry["after"][role] != entry["before"][role]:
                step = LayerGrowth.by(entry["method"], entry["before"][role], entry["after"][role], config.hidden_size)
                tau = grown_tau(tau, config.pattention_kind, step, entry["method"])
        found[role] = tau.item()
    return found
