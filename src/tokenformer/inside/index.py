"""TokenIndex: what makes every token of a model fire, read from a folder.

    index.json                what it is of, and what it took
    statistics.safetensors    by layer, numbers for every token: use, selectivity, quantiles, promoted words, neighbours
    examples.parquet          a row for each example: layer, token, rank, weight, window, position, ids, at
    tokenizer/                that of the model, if it was given

Enters: such a folder. Leaves: `index["layers.3.ffn", 17]`, all that is known of one token; or arrays for a whole layer.
Only what is asked for is read.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import BadFileError, BadRequestError, require
from ..io import read_json, replace_file, replace_files
from .best import QUANTILES
from .places import Place, check_numbers, the_one
from .readout import Readout, find_readout
from .statistics import nearest_tokens
from .windows import Windows

FORMAT = 1
FACTS, STATISTICS, CONTEXTS, TOKENIZER = "index.json", "statistics.safetensors", "examples.parquet", "tokenizer"
BEFORE, AFTER = 48, 16  # ids of an example on either side
WORDS, NEIGHBOURS = 10, 8  # kept of each token
AT_A_TIME = 1024  # tokens whose logits, or cosines with all others, are held


@dataclass(frozen=True)
class Example:
    """Where a token fires: its weight, the window and the position, ids around it, and which of these it is."""

    weight: float
    window: int
    position: int
    ids: list[int]
    at: int
    tokenizer: Any = None

    @property
    def text(self) -> tuple[str, str, str]:
        """What is before the position, at it, and after it."""
        if self.tokenizer is None:
            raise BadRequestError("the index was made without a tokenizer; give index_tokens one, or read .ids")
        parts = (self.ids[: self.at], self.ids[self.at : self.at + 1], self.ids[self.at + 1 :])
        before, here, after = (self.tokenizer.decode(part) for part in parts)
        return before, here, after


@dataclass(frozen=True)
class Word:
    """An entry of the vocabulary, or a class, and what the token's value adds to its logit at a weight of 1.

    That is before the final norm divides it by its scale, which depends on the row: compare them with each other.
    """

    id: int
    logit: float
    text: str | None


class IndexedToken:
    """One token of an index. `statistics` are the numbers of `TokenStatistics`."""

    def __init__(self, index: "TokenIndex", layer: str, token: int) -> None:
        self.index, self.layer, self.token = index, layer, token

    @property
    def statistics(self) -> dict[str, float]:
        """use, mean, largest, density, selectivity, age, alive."""
        return {name: self.index.array(self.layer, name)[self.token].item() for name in NUMBERS}

    @property
    def quantiles(self) -> dict[float, float]:
        """Of its weights in a sample of rows."""
        return dict(zip(QUANTILES, self.index.array(self.layer, "quantiles")[self.token].tolist(), strict=True))

    @property
    def examples(self) -> list[Example]:
        """Where it fires most, the strongest first, at most one of each window."""
        return self.index.examples(self.layer, self.token)

    @property
    def promotes(self) -> list[Word]:
        """What its value points to: the words that become likelier when it fires with a positive weight."""
        return self._words("promoted")

    @property
    def suppresses(self) -> list[Word]:
        """The words that become less likely."""
        return self._words("suppressed")

    @property
    def neighbours(self) -> list[tuple[int, float]]:
        """The tokens of the layer whose values are most like its own, with the cosine."""
        ids, cosines = (self.index.array(self.layer, name)[self.token].tolist() for name in ("neighbours", "cosines"))
        return list(zip(ids, cosines, strict=True))

    def _words(self, name: str) -> list[Word]:
        if not self.index.writes(self.layer):
            return []  # what does not write to the stream points to no words
        ids, logits = (self.index.array(self.layer, f"{name}{part}")[self.token].tolist() for part in ("", "_logits"))
        tokenizer = self.index.tokenizer
        texts = [None if tokenizer is None else tokenizer.decode([one]) for one in ids]
        return [Word(*word) for word in zip(ids, logits, texts, strict=True)]


NUMBERS = ("use", "mean", "largest", "density", "selectivity", "age", "alive")


class TokenIndex(Mapping[tuple[str, int], IndexedToken]):
    """An index on disk: `index["layers.3.ffn", 17]`; `index.array("layers.3.ffn", "use")` for a whole layer."""

    def __init__(self, folder: str | os.PathLike) -> None:
        require("TokenIndex", "train", "pyarrow")
        self.folder = Path(folder)
        if not (self.folder / FACTS).is_file():
            raise BadRequestError(f"{self.folder} is not an index: it has no {FACTS}; tokenformer index makes one")
        self.facts = read_json(self.folder / FACTS)
        if not isinstance(self.facts, dict) or self.facts.get("format") != FORMAT:
            raise BadFileError(f"{self.folder / FACTS} is damaged, or of another version; make the index again")
        if "seconds" not in self.facts:
            raise BadRequestError(f"{self.folder} is not finished; the call that makes it goes on where it stopped")
        self._tables: dict[str, tuple[Any, Any]] = {}

    @property
    def layers(self) -> dict[str, int]:
        """How many tokens each layer has."""
        return self.facts["layers"]

    @cached_property
    def tokenizer(self) -> Any:
        """That which the index was made with; None if it was made without."""
        if not (self.folder / TOKENIZER).is_dir():
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / TOKENIZER, local_files_only=True)

    def seconds_for(self, tokens: int) -> float:
        """About how long the same machine would take for a text of so many ids: the time is in proportion."""
        return self.facts["seconds"] * tokens / self.facts["positions"]

    def __getitem__(self, key: tuple[str, int]) -> IndexedToken:
        if not isinstance(key, tuple) or len(key) != 2:
            raise BadRequestError(f"index: {key!r} was given; give a layer and a token, as index['layers.3.ffn', 17]")
        name = self._name(key[0])
        return IndexedToken(self, name, check_numbers(name, self.layers[name], [key[1]], "index")[0])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, token) for name, count in self.layers.items() for token in range(count))

    def __len__(self) -> int:
        return sum(self.layers.values())

    def array(self, layer: str, what: str) -> Tensor:
        """A number, or several, for each token of a layer: use, selectivity, quantiles, promoted, …"""
        key = f"{self._name(layer)}/{what}"
        if key not in self._arrays:
            try:
                with safe_open(self.folder / STATISTICS, framework="pt") as file:
                    self._arrays[key] = file.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise BadFileError(f"{self.folder / STATISTICS} has no {key}: {error}") from error
        return self._arrays[key]

    @cached_property
    def _arrays(self) -> dict[str, Tensor]:
        return {}

    def writes(self, layer: str) -> bool:
        """Whether the layer writes to the stream of hidden states, so that its values point to words."""
        return self._name(layer) in self.facts["writers"]

    def examples(self, layer: str, token: int) -> list[Example]:
        """Where a token fires most."""
        table, starts = self._table(self._name(layer))
        rows = table.slice(starts[token], starts[token + 1] - starts[token]).to_pylist()
        return [
            Example(row["weight"], row["window"], row["position"], row["ids"], row["at"], self.tokenizer)
            for row in rows
        ]

    def _name(self, layer: str) -> str:
        names = {name: name for name in self.layers}
        return the_one(names, layer, "index")

    def _table(self, name: str) -> tuple[Any, Any]:
        """The examples of a layer, in the order of its tokens, and where those of each token begin."""
        if name not in self._tables:
            import numpy as np
            from pyarrow import ArrowException
            from pyarrow.parquet import read_table

            try:
                table = read_table(self.folder / CONTEXTS, filters=[("layer", "==", name)])
            except (ArrowException, OSError) as error:
                raise BadFileError(f"{self.folder / CONTEXTS} cannot be read: {error}") from error
            tokens = table["token"].to_numpy()
            self._tables[name] = table, np.searchsorted(tokens, np.arange(self.layers[name] + 1)).tolist()
        return self._tables[name]


def write_index(
    model: nn.Module,
    folder: Path,
    facts: dict[str, Any],
    notes: Mapping[str, Any],
    windows: Windows,
    ages: Mapping[str, Tensor],
    tokenizer: Any,
) -> None:
    """Write what was noted; the facts last, which say that all is there."""
    notes = {name: each for name, each in notes.items() if each.tally.rows}  # not of groups that are off
    try:
        readout = find_readout(model, "index_tokens")
    except BadRequestError:
        readout = None
    writers = [name for name, each in notes.items() if readout and each.place.layer_name in readout.writers]
    tensors: dict[str, Tensor] = {}
    for name, each in notes.items():
        found = _numbers(each, ages[name])
        if readout is not None and name in writers:
            found |= _words(each.place, readout)
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in found.items()}
    _write_examples(folder / CONTEXTS, notes, windows)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER)
    replace_files({folder / STATISTICS: save(tensors)})
    counts = {name: each.place.num_tokens for name, each in notes.items()}
    replace_file(folder / FACTS, json.dumps({**facts, "layers": counts, "writers": writers}, indent=1) + "\n")


def _numbers(notes: Any, age: Tensor) -> dict[str, Tensor]:
    statistics = notes.tally.statistics(age)
    found = {name: getattr(statistics, name) for name in NUMBERS}
    near = [
        nearest_tokens(notes.place, chunk.tolist(), NEIGHBOURS)
        for chunk in torch.arange(notes.place.num_tokens).split(AT_A_TIME)
    ]
    others, cosines = (torch.cat(parts).cpu() for parts in zip(*near, strict=True))
    return {**found, "quantiles": notes.sample.quantiles(), "neighbours": others.int(), "cosines": cosines}


def _words(place: Place, readout: Readout) -> dict[str, Tensor]:
    """The ids that every value promotes most and suppresses most."""
    parts: dict[str, list[Tensor]] = {}
    for values in place.values.split(AT_A_TIME):
        logits = readout.logits(values)
        for name, largest in (("promoted", True), ("suppressed", False)):
            best = logits.topk(min(WORDS, logits.shape[1]), dim=1, largest=largest)
            parts.setdefault(name, []).append(best.indices.int().cpu())
            parts.setdefault(f"{name}_logits", []).append(best.values.cpu())
    return {name: torch.cat(found) for name, found in parts.items()}


def _write_examples(path: Path, notes: Mapping[str, Any], windows: Windows) -> None:
    """A row for each example, in the order of layers, tokens and ranks; a row group for each layer."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {"layer": pa.string(), "token": pa.int32(), "rank": pa.int16(), "weight": pa.float32()}
    kinds |= {"window": pa.int32(), "position": pa.int32(), "ids": pa.list_(pa.int32()), "at": pa.int16()}
    schema = pa.schema(list(kinds.items()))
    partial = path.with_name(f".{path.name}.partial")
    with ParquetWriter(partial, schema, compression="zstd") as writer:
        for name, each in notes.items():
            best = each.best
            tokens, ranks = (best.weights != 0).nonzero(as_tuple=True)
            window, position = best.windows[tokens, ranks].tolist(), best.positions[tokens, ranks].tolist()
            around = [windows.around(w, p, BEFORE, AFTER) for w, p in zip(window, position, strict=True)]
            columns = [[name] * len(tokens), tokens.tolist(), ranks.tolist(), best.weights[tokens, ranks].tolist()]
            columns += [window, position, [ids for ids, _ in around], [at for _, at in around]]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, len(tokens)))
    os.replace(partial, path)
