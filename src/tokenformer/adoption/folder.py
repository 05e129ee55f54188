"""Adoption of a saved model: a model folder of another family in, one with Pattentions out, grown if that is wanted.

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
from ..files import check_new, write_new
from ..growth import apply_growth, plan_growth
from ..growth.plan import check_ballast_grows
from ..models import Adopted
from ..models.folder import copy_beside_weights
from ..models.loading import local_folder, read_any_config, read_host
from ..models.sample import checked_difference, sample_inputs, sample_output, tolerance_of
from ..pattention import Pattention
from .families import family_of
from .plan import DTYPES, check_parts, check_settings, check_whole_weights
from .surgery import SLACK, adopt

DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
CARD = """\
---
library_name: transformers
tags:
- tokenformer
---
# An adopted {family}

Layers of this model ({parts}) are attentions over parameter tokens (Pattention) that computed what the original's did
when they took their place, so it can be grown by appending tokens without changing what it computes.

```python
import tokenformer  # without it, transformers does not know these layers
from transformers import {architecture}

model = {architecture}.from_pretrained("path/to/this/folder")
bigger = tokenformer.grow(model, factor=1.5)
```
"""


@dataclass(frozen=True)
class FolderAdoption:
    """The record, the configurations and parameters before and after, and how far the output moved; None: not seen.

    dtype is that of its weights.
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
) -> FolderAdoption:
    """Adopt the model in `source` (a folder, or a name on the Hub) into the new folder `target`.

    What `adopt` takes means the same here, `growth` is a request of `grow`. `dtype` is what weights are read and
    written in, "auto" as they are saved. What prepares the model's inputs comes along.
    """
    target = Path(target)
    check_new(target)
    source = local_folder(source)
    if dtype not in ("auto", *DTYPE_NAMES):
        raise BadRequestError(f"adopt: dtype {dtype!r} is not known; {did_you_mean(dtype, ['auto', *DTYPE_NAMES])}")
    config = read_any_config(source)
    check_whole_weights(config)
    check_settings(ballast, slack, tolerance)
    chosen = check_parts(config, family_of(config.model_type), parts)
    if growth is not None:
        plan_growth(nn.Sequential(Pattention(1, 1, 1000)), **growth)  # what is wrong with it shows on any layer
        check_ballast_grows(ballast, growth.get("method"))
    model = read_host(source, dtype=dtype)
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
        card = CARD.format(family=config.model_type, parts=", ".join(chosen), architecture=type(model).__name__)
        (partial / "README.md").write_text(card)
    record = model.config.quantization_config
    written_in = DTYPE_NAMES[DTYPES.index(model.dtype)]
    return FolderAdoption(record, config, model.config, before, model.num_parameters(), difference, written_in)
