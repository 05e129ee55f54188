"""TextSettings: what to read, how to split it and how to tokenize it; the `data:` section of a recipe for text."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ...schema import CountFromZero, Processes, Section, Seed, Share
from ..base import ONLY_FOR_IMAGES, check_split


class TextSettings(Section):
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
    block_length: Annotated[int, Field(ge=2)] = 256
    validation_fraction: Share = 0.01
    split: list[float] | None = None
    split_seed: Seed = 0
    seed: Seed = 0
    errors: Literal["replace", "strict"] = "replace"
    streaming: bool = False
    shuffle_buffer: CountFromZero = 1024
    workers: Processes | None = None
    cache: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    hub_validation_split: str = "validation"

    @classmethod
    def keys_of_other_recipes(cls) -> dict[str, str]:
        from ..images.settings import ImageSettings  # not before there is an error to explain

        return dict.fromkeys(ImageSettings.model_fields, ONLY_FOR_IMAGES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_split(self.split, self.validation)
        if self.split is not None and self.streaming:
            raise ValueError(
                "split cuts by position, and the length of a stream is not known; set validation or "
                "validation_fraction instead, or streaming to false"
            )
        return self

    @property
    def cache_folder(self) -> Path:
        """Where prepared data is kept."""
        return Path(self.cache or os.environ.get("TOKENFORMER_CACHE") or "~/.cache/tokenformer").expanduser()
