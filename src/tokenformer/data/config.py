"""DataConfig: what to read, how to split it and how to tokenize it; the `data:` section of a recipe.

Enters: what a user wrote. Leaves: the same, checked; every wrong setting is refused here, before a file is read.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import BadRequestError, did_you_mean

PARTS = ("train", "validation", "test")
ON_BAD_TEXT = ("replace", "strict")


@dataclass
class DataConfig:
    """Text in, blocks of tokens out.

    train, validation: one source or a list: files, folders, globs, Hub names, `stdlib`. See docs/data.md.
    column: the column of JSONL, CSV, Parquet and Hub datasets that holds the text.
    tokenizer: `bytes`, a tokenizer.json, a folder, or a Hub name.
    eos_token: the token that ends a document, where the tokenizer does not say.
    block_length: tokens in a block.
    validation_fraction: this share of the documents is held out, unless `validation` or `split` is given.
    split: shares of the corpus for training, validation and, if there are three, test, cut in this order.
    split_seed: decides which documents are held out.
    seed: decides the order in which they are trained on.
    errors: for text that is not UTF-8: `replace` it by U+FFFD and count, or `strict`, an error. Not for `bytes`.
    streaming: read, tokenize and pack while training, instead of preparing once.
    shuffle_buffer: blocks that a stream is shuffled over; 0 keeps the order.
    workers: processes that tokenize; all cores if None.
    cache: the folder of prepared data; $TOKENFORMER_CACHE or ~/.cache/tokenformer if None.
    hub_config, hub_split, hub_validation_split: for Hub names: the configuration, and the splits that `train` and
        `validation` are read from.
    """

    train: str | list[str] = "stdlib"
    validation: str | list[str] | None = None
    column: str = "text"
    tokenizer: str = "bytes"
    eos_token: str | None = None
    block_length: int = 256
    validation_fraction: float = 0.01
    split: list[float] | None = None
    split_seed: int = 0
    seed: int = 0
    errors: str = "replace"
    streaming: bool = False
    shuffle_buffer: int = 1024
    workers: int | None = None
    cache: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    hub_validation_split: str = "validation"


def check_config(config: DataConfig) -> None:
    """Refuse settings that cannot be met."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise BadRequestError(f"{field.name}={value!r} was given; it must be a whole number")
    if config.block_length < 2:
        raise BadRequestError(f"block_length={config.block_length} was given; a block needs at least 2 tokens")
    if not 0 <= config.validation_fraction < 1:
        raise BadRequestError(
            f"validation_fraction={config.validation_fraction} was given; it must be at least 0 and less than 1"
        )
    check_seeds(config)
    if config.errors not in ON_BAD_TEXT:
        raise BadRequestError(f"errors={config.errors!r} is not known; {did_you_mean(str(config.errors), ON_BAD_TEXT)}")
    if config.shuffle_buffer < 0:
        raise BadRequestError(f"shuffle_buffer={config.shuffle_buffer} was given; it must be at least 0")
    if config.workers is not None and config.workers < 1:
        raise BadRequestError(f"workers={config.workers} was given; at least 1 is needed")
    if config.split is not None:
        _check_split(config)


def check_seeds(config: Any) -> None:
    """Refuse seeds that no generator takes."""
    for name in ("split_seed", "seed"):
        value = getattr(config, name)
        if not -(2**63) <= value < 2**63:
            raise BadRequestError(f"{name}={value} was given; it must fit 64 bits")


def _check_split(config: DataConfig) -> None:
    shares = list(config.split or [])
    if len(shares) not in (2, 3) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise BadRequestError(
            f"split={shares} was given; it must be two or three positive shares that add up to 1, as [0.9, 0.05, 0.05]"
        )
    if config.validation is not None:
        raise BadRequestError("both split and validation were given; one of them decides what is held out")
    if config.streaming:
        raise BadRequestError(
            "split cuts by position, and the length of a stream is not known; give validation sources or a "
            "validation_fraction, or set streaming to false"
        )


def as_list(names: str | os.PathLike | Iterable[str]) -> list[str]:
    """One source or several, as a list."""
    return [str(names)] if isinstance(names, str | os.PathLike) else [str(name) for name in names]


def cache_folder(config: DataConfig) -> Path:
    """Where prepared data is kept."""
    return Path(config.cache or os.environ.get("TOKENFORMER_CACHE") or "~/.cache/tokenformer").expanduser()
