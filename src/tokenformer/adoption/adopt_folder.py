"""Adoption of a saved model: a model folder of another family in, one with Pattentions out, grown if you ask for it.

    tokenformer adopt EleutherAI/pythia-160m models/pythia --grow 1.5x

What can be refused by config.json alone is refused before a weight is read. The logits of the result are compared with
those of the original before anything is written.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import BadRequestError, did_you_mean
from ..growth import apply_growth, plan_growth
from ..io import check_new, check_outside, write_new
from ..models.adopted import Adopted, check_ballast_grows
from ..models.card import derived_facts, write_card
from ..models.loading import local_folder, read_config, read_model
from ..models.sample import checked_difference, sample_inputs, sample_output, tolerance_of
from ..models.side_files import copy_beside_weights
from ..pattention import Pattention
from .adopt import SLACK, adopt
from .families import family_of
from .plan import DTYPES, check_parts, check_settings, check_whole_weights

DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@dataclass(frozen=True)
class FolderAdoption:
    """The record, the configurations and parameters before and after, and how far the output moved.

    difference is None if it was not measured; dtype is that of the weights.
    """

    record: Adopted
    host: Any
    config: Any
    parameters_before: int
    parameters_after: int
    difference: float | None
    dtype: str


def adopt_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    parts: Iterable[str] | None = None,
    *,
    ballast: str = "spread",
    slack: float = SLACK,
    growth: Mapping[str, Any] | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> FolderAdoption:
    """Adopt the model in `source` (a folder, or a name on the Hub) into the new folder `target`.

    The arguments of `adopt` mean the same here; `growth` is a request to `grow`. `dtype` is what weights are read and
    written in, "auto" as they are saved. Its tokenizer or image processor is copied too. Python code in `source` is run
    only with `trust_remote_code`.
    """
    target = Path(target)
    check_new(target)
    name, source = str(source), local_folder(source, trust_remote_code=trust_remote_code)
    check_outside(target, source)
    if dtype not in ("auto", *DTYPE_NAMES):
        raise BadRequestError(f"adopt: dtype {dtype!r} is not known; {did_you_mean(dtype, ['auto', *DTYPE_NAMES])}")
    config = read_config(source, trust_remote_code=trust_remote_code)
    check_whole_weights(config)
    check_settings(ballast, slack, tolerance)
    chosen = check_parts(config, family_of(config.model_type), parts)
    if growth is not None:
        plan_growth(nn.Sequential(Pattention(1, 1, 1000)), **growth)  # what is wrong with it shows on any layer
        check_ballast_grows(ballast, growth.get("method"))
    model = read_model(source, dtype=dtype, trust_remote_code=trust_remote_code)
    before, inputs = model.num_parameters(), sample_inputs(model)
    output = sample_output(model, inputs) if verify else None
    adopt(model, chosen, ballast=ballast, slack=slack, verify=verify, tolerance=tolerance)
    if growth is not None:
        apply_growth(model, plan_growth(model, **growth), inplace=True)
    difference = None
    if output is not None:
        difference = checked_difference(
            model,
            inputs,
            output,
            exact=(growth or {}).get("method") != "random",
            tolerance=tolerance_of(model.dtype) if tolerance is None else tolerance,
            said=f"the grown model's output differs from that of {source}",
        )
    with write_new(target) as (partial,):
        model.save_pretrained(partial)
        copy_beside_weights(source, partial)
        write_card(model, partial, derived_facts(source, name))
    record = model.config.adopted
    written_in = DTYPE_NAMES[DTYPES.index(model.dtype)]
    return FolderAdoption(record, config, model.config, before, model.num_parameters(), difference, written_in)
