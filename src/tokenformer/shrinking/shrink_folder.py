"""Shrinking and sorting of a saved language model: a model folder and a text in, a folder out.

    tokenformer shrink models/large models/small --factor 0.5 --text book.txt
    tokenformer sort models/large models/sorted --text book.txt

The request is checked before a weight is read. The beginning of the text is cut into windows: every other one says what
the tokens do, and the rest what the model loses, at several sizes, before anything is written.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import BadRequestError
from ..growth.grow import apply_growth
from ..growth.growable import check_growable
from ..growth.step import Growth
from ..io import check_new, check_outside, existing_file, write_new
from ..models import TokenFormerBaseConfig, TokenFormerVisionConfig
from ..models.loading import empty_model, read_config, read_model
from ..models.side_files import copy_beside_weights
from ..models.text import encode, read_tokenizer
from ..pattention import pattention_layers
from .measure import Use, mean_loss, measure, ranking_of
from .plan import Counts, Factor, ballast_of, check_request, plan_shrink, share_of, sizes_asked
from .search import as_if, fit_sizes
from .shrink import sort_tokens

# What is compared with the chosen size.
SHARES = (0.75, 0.5, 0.25)
LIMIT = 32768
# Of the file no more is read than this many bytes for every token.
BYTES_PER_TOKEN = 16
# Windows are this long at most, and so many are read at a time that their logits are no more numbers than that.
LONGEST, MOST_WINDOWS, MOST_LOGITS = 1024, 16, 2**26


@dataclass(frozen=True)
class SizeScore:
    """A size of the model, with its loss on the text. `share`: of all tokens; None for the size that was chosen."""

    share: float | None
    tokens: dict[str, int]
    parameters: int
    loss: float


def shrink_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    text: str | os.PathLike,
    *,
    factor: Factor | None = None,
    num_tokens: Counts | None = None,
    max_loss: float | None = None,
    limit: int = LIMIT,
    device: str | None = "cpu",
    trust_remote_code: bool = False,
    show: Callable[[list[SizeScore]], None] = lambda scores: None,
) -> list[SizeScore]:
    """Shrink the model in `source` into the new folder `target`; its tokenizer is copied too.

    `factor`, `num_tokens` and `max_loss` are those of `shrink`. Of the text the first `limit` tokens are read. `show`
    is given the sizes with their losses before the folder is written: the model as it is, three shares of its tokens,
    and the one chosen.
    """
    check_request(factor, num_tokens, max_loss)
    empty = _check(source, target, text, limit, "shrink", trust_remote_code)
    if max_loss is None:
        sizes_asked(empty, factor, num_tokens)
    model, ranked_on, scored_on = _read(source, text, limit, device, trust_remote_code)
    uses = measure(model, ranked_on, "shrink")
    scores = _scores(model, uses, scored_on)
    if max_loss is not None:
        sizes = fit_sizes(model, uses, scored_on, max_loss)
    else:
        sizes = sizes_asked(model, factor, num_tokens)
    growth = plan_shrink(model, uses, sizes)
    scores.append(_score(model, scored_on, growth, None))
    show(scores)
    apply_growth(model, growth, inplace=True)
    _write(model, source, target)
    return scores


def sort_folder(
    source: str | os.PathLike,
    target: str | os.PathLike,
    text: str | os.PathLike,
    *,
    limit: int = LIMIT,
    device: str | None = "cpu",
    trust_remote_code: bool = False,
    show: Callable[[list[SizeScore]], None] = lambda scores: None,
) -> list[SizeScore]:
    """Sort the tokens of the model in `source` by what they do on a text, into the new folder `target`.

    It computes the same, and its first tokens are models of their own, which `token_fraction` loads. `show` is given
    their losses before the folder is written. The rest is as for `shrink_folder`.
    """
    _check(source, target, text, limit, "sort", trust_remote_code)
    model, ranked_on, scored_on = _read(source, text, limit, device, trust_remote_code)
    uses = measure(model, ranked_on, "sort")
    scores = _scores(model, uses, scored_on)
    show(scores)
    sort_tokens(model, ranking_of(uses))
    _write(model, source, target)
    return scores


def _check(source: Any, target: Any, text: Any, limit: int, verb: str, trust_remote_code: bool) -> Any:
    """Refuse what cannot be done; the model without its weights."""
    source, target = Path(source), Path(target)
    check_new(target)
    check_outside(target, source)
    existing_file(text)
    if limit < 4:
        raise BadRequestError(f"{verb}: limit={limit} was given; at least 4 tokens are needed")
    adopted = verb == "shrink"
    config = read_config(source, TokenFormerBaseConfig, or_adopted=adopted, trust_remote_code=trust_remote_code)
    if isinstance(config, TokenFormerVisionConfig):
        in_python = "shrink(model, …, data=batches)" if adopted else "sort_tokens(model, rank_tokens(model, batches))"
        raise BadRequestError(
            f"{source} takes images, and a text says nothing of it; use tokenformer.{in_python} in Python"
        )
    empty = empty_model(config)
    check_growable(empty, verb)
    return empty


def _read(
    source: Any, text: Any, limit: int, device: str | None, trust_remote_code: bool
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The model, and the windows of the text that rank its tokens and that are scored."""
    config = read_config(source, trust_remote_code=trust_remote_code)
    tokenizer = read_tokenizer(Path(source), config, trust_remote_code=trust_remote_code)
    ids = encode(tokenizer, _beginning(Path(text), limit * BYTES_PER_TOKEN), config.vocab_size)[:limit]
    model = read_model(source, device, AutoModelForCausalLM, trust_remote_code=trust_remote_code)
    return model, *_batches(model, ids)


def _write(model: PreTrainedModel, source: Any, target: Any) -> None:
    with write_new(Path(target)) as (partial,):
        model.save_pretrained(partial)
        copy_beside_weights(Path(source), partial)


def _scores(model: PreTrainedModel, uses: dict[str, Use], batches: list[Tensor]) -> list[SizeScore]:
    """Of the model as it is, and of shares of its tokens."""
    scores = [_score(model, batches, None, 1.0)]
    for share in SHARES:
        scores.append(_score(model, batches, plan_shrink(model, uses, _sizes(model, share)), share))
    return scores


def _score(model: PreTrainedModel, batches: list[Tensor], growth: Growth | None, share: float | None) -> SizeScore:
    with as_if(model, growth or Growth("shrink", 0, 0.0, {})):
        tokens = {name: layer.num_tokens for name, layer in pattention_layers(model)}
        return SizeScore(share, tokens, model.num_parameters(), mean_loss(model, batches))


def _sizes(model: PreTrainedModel, share: float) -> dict[str, int]:
    """That share of every layer's tokens, where it is fewer than there are."""
    layers, ballasts = dict(pattention_layers(model)), ballast_of(model)
    sizes = {name: share_of(layer, ballasts[name], share) for name, layer in layers.items()}
    return {name: count for name, count in sizes.items() if count < layers[name].num_tokens}


def _beginning(path: Path, most: int) -> bytes:
    """The first bytes of a text, with whole characters only if it goes on."""
    with path.open("rb") as file:
        content, more = file.read(most), file.read(1)
    if not content:
        raise BadRequestError(f"{path} is empty; choose a file with text")
    if more:
        start = len(content) - 1
        while start > max(0, len(content) - 4) and content[start] & 0xC0 == 0x80:  # within a character of UTF-8
            start -= 1
        content = content[:start]
    return content


def _batches(model: Any, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Windows of ids: every other one, and the rest, in batches."""
    config = model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST, len(ids) // 2)
    if length < 2:
        raise BadRequestError(f"shrink: the text has {len(ids)} tokens; at least 4 are needed, better thousands")
    count = len(ids) // length
    windows = torch.tensor(ids[: count * length]).view(count, length)
    size = max(1, min(MOST_WINDOWS, MOST_LOGITS // (length * config.vocab_size)))
    return list(windows[::2].split(size)), list(windows[1::2].split(size))
