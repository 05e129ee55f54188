"""index_tokens(): what makes every token of a model fire, written to a folder.

    index = tokenformer.index_tokens(model, ids, "runs/demo/index", tokens=1_000_000, tokenizer=tokenizer)

Enters: a model, and text as ids or a dataset. Leaves: a folder that `TokenIndex` reads (index.py has its files). The
data is read once, window by window; of the weights, sums, the best windows of each token and a sample of rows are kept.
What has been read is saved every few seconds: after Ctrl-C, or a kill, the same call goes on from there.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..errors import BadFileError, BadRequestError, require
from ..growth.ungrow import mark
from ..io import lock, naming, read_json, replace_file
from ..pattention.groups import switch_of
from ..shrinking.measure import Batch
from .ages import token_ages
from .best import Best, Sample
from .calls import Call
from .index import FACTS, FORMAT, TokenIndex, write_index
from .places import Layers, Place, bare, find_places
from .statistics import Tally, contexts_of, each_batch, rows_of
from .windows import Windows

STATE = "state.safetensors"
EXAMPLES = 20
LENGTH = 256  # of windows, unless the model reads fewer
ROWS = 2048  # read at a time
# Of a token's weights at most so many are kept for quantiles, and never more than one in SPARSE.
MOST_SAMPLED, SPARSE = 512, 200
SECONDS = 15.0  # from one saving to the next


PARTS = ("tally", "best", "sample")


class Notes:
    """What is kept of one place."""

    def __init__(self, place: Place, examples: int, step: int) -> None:
        n = place.num_tokens
        self.place, self.tally, self.best, self.sample = place, Tally(n), Best(n, examples), Sample(n, step)

    def add(self, found: Call, batch: Batch, first: int) -> None:
        """What the place did in a batch of windows that are numbered from `first`."""
        rows, contexts = rows_of(found.weights, batch)
        self.tally.add(rows, contexts, found.values)
        self.sample.add(rows)
        _, there = contexts_of(found.weights, batch)
        weights = found.weights if there is None else found.weights * there.unsqueeze(-1)
        self.best.add(weights.reshape(weights.shape[0], -1, weights.shape[-1]), first)

    def state(self) -> dict[str, Tensor]:
        """All of it, to be saved."""
        return {f"{part}.{key}": tensor for part in PARTS for key, tensor in getattr(self, part).state().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for part in PARTS:
            start = f"{part}."
            getattr(self, part).load({k.removeprefix(start): v for k, v in state.items() if k.startswith(start)})


@torch.no_grad()
def index_tokens(
    model: nn.Module,
    data: Any,
    folder: str | os.PathLike,
    *,
    tokens: int | None = None,
    layers: Layers = None,
    examples: int = EXAMPLES,
    length: int | None = None,
    tokenizer: Any = None,
    show: Callable[[int, int, float], Any] = lambda read, total, seconds: None,
) -> TokenIndex:
    """Read data with a model and write what makes each of its tokens fire; a call that was interrupted goes on.

    Args:
        model: any model of transformers with Pattentions; of an nn.Linear that is named the tokens are its inputs.
        data: ids in one row (a tensor or array), which are cut into windows; ids in rows; or a sequence of dicts with
            `input_ids` or `pixel_values`, such as a dataset.
        folder: where the index is, or will be; a finished one is read.
        tokens: how many ids are read, from the beginning; all unless given.
        layers: names or patterns; all Pattentions and groups unless given.
        examples: how many windows are kept for each token, those in which its |weight| is the largest.
        length: of the windows; 256 unless given, or what the model can read.
        tokenizer: kept in the folder, so that examples can be read as text.
        show: told from time to time how many positions are read, how many there are, and the seconds it took.
    """
    require("index_tokens", "train", "pyarrow")
    folder, places = Path(folder), find_places(model, layers, "index_tokens")
    if examples < 1 or (tokens is not None and tokens < 1) or (length is not None and length < 1):
        raise BadRequestError(
            f"index_tokens: examples={examples}, tokens={tokens}, length={length} were given; at least 1 is needed"
        )
    windows = Windows(data, length or _length(model), tokens)
    facts = _facts(model, windows, places, examples)
    if (folder / FACTS).is_file():
        _check_same(folder, facts)
        if not (folder / STATE).exists():
            return TokenIndex(folder)
    elif folder.exists() and any(path.name not in (STATE, "lock") for path in folder.iterdir()):
        raise BadRequestError(f"{folder} exists and is not an index; choose a new folder")
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / "lock", wait=False) as held:
            if not held:
                raise BadRequestError(f"another process is writing {folder}; wait for it, or choose a new folder")
            notes = _noted(model, windows, places, examples, folder, facts, show)
            write_index(model, folder, facts, notes, windows, token_ages(model, list(places)), tokenizer)
            (folder / STATE).unlink(missing_ok=True)
    return TokenIndex(folder)


def _length(model: nn.Module) -> int:
    config = getattr(bare(model), "config", None)
    most = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    return min(most or LENGTH, LENGTH)


def _facts(model: nn.Module, windows: Windows, places: dict[str, Place], examples: int) -> dict[str, Any]:
    """What an index is of: if any of it differs, it is another one."""
    switch = switch_of(bare(model))
    return {
        "format": FORMAT,
        "model": mark(bare(model)),
        "groups": list(switch.used) if switch is not None else [],
        "data": windows.digest(),
        "windows": len(windows),
        "length": windows.length,
        "examples": examples,
        "layers": {name: place.num_tokens for name, place in places.items()},
    }


def _check_same(folder: Path, facts: dict[str, Any]) -> None:
    found = read_json(folder / FACTS)
    # Of a finished index those layers are left out whose groups were off.
    differs = [key for key in facts if not isinstance(found, dict) or not _equal(found.get(key), facts[key])]
    if differs:
        raise BadRequestError(
            f"{folder} is an index of something else (other {' and '.join(differs)}); choose a new folder, or remove it"
        )


def _equal(found: Any, ours: Any) -> bool:
    return found == ours or (isinstance(found, dict) and bool(found) and found.items() <= ours.items())


def _noted(
    model: nn.Module,
    windows: Windows,
    places: dict[str, Place],
    examples: int,
    folder: Path,
    facts: dict[str, Any],
    show: Callable[[int, int, float], Any],
) -> dict[str, Notes]:
    """Read all windows, from where an earlier call was interrupted, and say in `facts` what it took."""
    step = max(SPARSE, -(-windows.positions // MOST_SAMPLED))
    notes = {name: Notes(place, examples, step) for name, place in places.items()}
    done, spent = _loaded(folder / STATE, notes)
    if not (folder / FACTS).is_file():
        _save(folder / STATE, notes, done, spent)  # before the facts, by which the folder is an index
        replace_file(folder / FACTS, json.dumps(facts, indent=1) + "\n")
    at_a_time, first = max(1, ROWS // windows.length), done

    def batches() -> Iterator[Batch]:
        while first < len(windows):
            yield windows.batch(first, min(first + at_a_time, len(windows)))

    def note(name: str, found: Call, batch: Batch) -> None:
        notes[name].add(found, batch, first)

    runner = getattr(bare(model), "base_model", bare(model))  # without the output layer
    began = saved = time.monotonic()
    for _ in each_batch(runner, places, batches(), note, "index_tokens"):
        first = min(first + at_a_time, len(windows))
        now = time.monotonic()
        if now - saved > SECONDS:
            _save(folder / STATE, notes, first, spent + now - began)
            saved = time.monotonic()
        show(min(first * windows.length, windows.positions), windows.positions, spent + now - began)
    facts |= {"positions": windows.positions, "seconds": round(spent + time.monotonic() - began, 3)}
    return notes


def _save(path: Path, notes: dict[str, Notes], done: int, seconds: float) -> None:
    state = {f"{name}|{key}": tensor for name, each in notes.items() for key, tensor in each.state().items()}
    replace_file(path, save({**state, "done": torch.tensor(done), "seconds": torch.tensor(seconds)}))


def _loaded(path: Path, notes: dict[str, Notes]) -> tuple[int, float]:
    """How many windows were read before, and in how many seconds."""
    if not path.is_file():
        return 0, 0.0
    try:
        state = load_file(path)
        for name, each in notes.items():
            start = f"{name}|"
            each.load({key.removeprefix(start): part for key, part in state.items() if key.startswith(start)})
        return int(state["done"]), float(state["seconds"])
    except (SafetensorError, KeyError, OSError) as error:
        raise BadFileError(f"{path} is damaged ({error}); remove the folder and begin again") from error
