"""An index of a saved language model: a model folder and a text in, a folder that `TokenIndex` reads out.

    tokenformer index runs/demo/stage-3/model runs/demo/index --text book.txt

The request is checked before a weight is read. Interrupted, the same command goes on.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..errors import BadRequestError, require
from ..io import check_outside, existing_file
from ..models import TokenFormerVisionConfig
from ..models.loading import empty_model, read_config, read_model
from ..models.text import encode, read_tokenizer, reads_bytes
from .index import TokenIndex
from .indexing import EXAMPLES, index_tokens
from .places import Layers, find_places


def index_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    text: str | os.PathLike,
    *,
    limit: int | None = None,
    layers: Layers = None,
    examples: int = EXAMPLES,
    device: str | None = "cpu",
    trust_remote_code: bool = False,
    show: Callable[[int, int, float], Any] = lambda read, total, seconds: None,
) -> tuple[TokenIndex, float]:
    """Index the model in `source` over the first `limit` tokens of a text, into the folder `target`.

    Returns the index, and how many bytes of the text make a token. The rest is as in `index_tokens`.
    """
    require("index", "train", "pyarrow")
    source, target, text = Path(source), Path(target), existing_file(text)
    check_outside(target, source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    if isinstance(config, TokenFormerVisionConfig):
        raise BadRequestError(
            f"{source} takes images, and a text says nothing of it; use tokenformer.index_tokens in Python"
        )
    find_places(empty_model(config), layers, "index")
    tokenizer = read_tokenizer(source, config, trust_remote_code=trust_remote_code)
    ids = _ids(text, tokenizer, config.get_text_config().vocab_size)
    model = read_model(source, device, AutoModelForCausalLM, trust_remote_code=trust_remote_code)
    kept: dict[str, Any] = {"tokens": limit, "layers": layers, "examples": examples}
    index = index_tokens(model, ids, target, **kept, tokenizer=tokenizer, show=show)
    return index, text.stat().st_size / len(ids)


def _ids(text: Path, tokenizer: Any, vocab_size: int) -> Tensor:
    """Of bytes the file itself, which is not read before it is needed."""
    if not text.stat().st_size:
        raise BadRequestError(f"{text} is empty; choose a file with text")
    if reads_bytes(tokenizer):
        return torch.from_numpy(np.memmap(text, dtype=np.uint8, mode="c"))
    return torch.tensor(encode(tokenizer, text.read_bytes(), vocab_size))
