"""Everything that a page shows of one text or image, as a dictionary that becomes its JSON.

Enters: a `Subject` and what it reads. Leaves: `Sheet`: pieces of text, layers, growth steps and words as they are, and
the numbers as packed arrays: those of positions, of tokens (cards.py), and the entries, which say how much a token did
at a position. An entry is kept if the token is among the strongest of its layer there, or the position among the
strongest of the token. Only tokens that are among the strongest somewhere are part of the page.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cards import card_arrays
from .contexts import Contexts
from .packing import as_bytes, as_roots, pack, smallest
from .reading import LayerReading, Reading, Window, read, read_bits, window_length, windows
from .sources import ImageSource, Source, TextSource
from .subject import Subject

ENTRIES = 1_000_000  # of all layers
FEWEST_PEAKS = 8
VERSION = 1


def make_sheet(subject: Subject, source: Source, contexts: Contexts | None = None) -> dict[str, Any]:
    """What the page shows. `contexts`: of an index of the same model, for the cards."""
    names = list(subject.places)
    writers = [layer.name for layer in subject.layers if layer.writes]
    new = {name: subject.is_new(name) for name in names}
    length = window_of(subject)
    reading = read(subject.model, names, parts_of(subject, source, length), writers, new)
    kept = {name: layer.joined("top_tokens").unique() for name, layer in reading.layers.items()}
    entries = _entries(reading, kept)
    arrays = _positions(reading, source) | entries | card_arrays(subject, reading, kept, source, length)
    before: dict[str, Any] | None = None
    if subject.before is not None:
        before = {"title": subject.before.title, "steps": subject.before.steps}
        if isinstance(source, TextSource):
            arrays["before_bits"] = read_bits(
                subject.before.model, source.ids, length_of(subject.before.model, length)
            ).numpy()
    words = sorted({int(one) for name in WORDS for one in np.unique(arrays[name])})
    return {
        "version": VERSION,
        "model": {
            "name": subject.name,
            "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
            "kind": subject.model.config.model_type,
        },
        "unit": source.unit,
        "of": source.title,
        "notes": source.notes,
        "image": source.picture() if isinstance(source, ImageSource) else None,
        "pieces": source.pieces,
        "words": {one: source.label(one) for one in words},
        "layers": [
            {
                "name": layer.name,
                "block": layer.block,
                "title": layer.title,
                "tokens": layer.tokens,
                "writes": layer.writes,
                "seen": layer.name in reading.layers,
                "new": int(subject.is_new(layer.name).sum()),
            }
            for layer in subject.layers
        ],
        "growth": subject.growth,
        "new_after": subject.new_after,
        "before": before,
        "stages": [stage.title for stage in subject.stages],
        "groups": sorted({place.group for place in subject.places.values() if place.group}),
        "index": None if contexts is None else contexts.of(subject, kept),
        "arrays": pack(arrays),
    }


# The arrays that hold ids of the vocabulary, or of classes.
WORDS = ("ids", "guess_ids", "promoted", "suppressed")


def window_of(subject: Subject) -> int:
    """How many positions of a text are read at once."""
    return window_length(subject.context, sum(place.num_tokens for place in subject.places.values()))


def length_of(model: Any, most: int) -> int:
    """The same for an earlier model, whose context may be shorter."""
    return min(most, getattr(model.config.get_text_config(), "max_position_embeddings", None) or most)


def parts_of(subject: Subject, source: Source, length: int) -> Iterable[Window]:
    """The windows that a source is read in."""
    if isinstance(source, ImageSource):
        return [Window({"pixel_values": source.pixels})]
    return windows(source.ids, length)


def _positions(reading: Reading, source: Source) -> dict[str, np.ndarray]:
    """What is known of every position."""
    ids, shares = reading.guesses
    new = torch.stack([layer.joined("new") for layer in reading.layers.values()])  # [layers, positions]
    return {
        "ids": np.asarray(source.ids, np.uint32),
        "bits": reading.bits.float().numpy(),
        "guess_ids": ids.numpy().astype(np.uint32),
        "guess_shares": (shares.numpy() * 65535).round().astype(np.uint16),
        "new_shares": (new.numpy() * 255).round().astype(np.uint8),
    }


def _entries(reading: Reading, kept: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The entries of all layers, in the order of tokens and positions, and where those of each token begin."""
    fixed = sum(layer.joined("top_tokens").numel() for layer in reading.layers.values())
    tokens = sum(len(chosen) for chosen in kept.values())
    peaks = max(FEWEST_PEAKS, (ENTRIES - fixed) // max(1, tokens))
    parts: dict[str, list[np.ndarray]] = {"counts": [], "positions": [], "weights": [], "effects": [], "scales": []}
    for name, layer in reading.layers.items():
        rows, positions, weights, effects = _of_layer(layer, kept[name], peaks)
        largest = layer.tally.largest[kept[name]].numpy()
        scale = float(np.abs(effects).max(initial=0.0))
        parts["counts"].append(np.bincount(rows, minlength=len(kept[name])))
        parts["positions"].append(positions)
        parts["weights"].append(as_bytes(weights, largest[rows]))
        parts["effects"].append(as_roots(effects, scale))
        parts["scales"].append(np.array([scale], np.float32))
    joined = {name: np.concatenate(found) for name, found in parts.items()}
    return {
        "entry_counts": smallest(joined["counts"], reading.positions),
        "entry_positions": smallest(joined["positions"], reading.positions),
        "entry_weights": joined["weights"],
        "entry_effects": joined["effects"],
        "effect_scales": joined["scales"],
    }


def _of_layer(layer: LayerReading, kept: Tensor, peaks: int) -> tuple[np.ndarray, ...]:
    """The rows among the kept tokens, positions, weights and effects of a layer's entries, each once."""
    top = layer.joined("top_tokens")
    row_of = torch.full((layer.tally.num_tokens,), -1)
    row_of[kept] = torch.arange(len(kept))
    where = torch.arange(len(top)).unsqueeze(1).expand_as(top)
    strongest = slice(0, peaks)
    peak_rows = torch.arange(len(kept)).unsqueeze(1).expand(-1, layer.peak_positions[kept, strongest].shape[1])
    rows = torch.cat([row_of[top].flatten(), peak_rows.flatten()]).numpy()
    found = [
        torch.cat([of_top.flatten(), of_peaks[kept, strongest].flatten()]).numpy()
        for of_top, of_peaks in (
            (where, layer.peak_positions),
            (layer.joined("top_weights"), layer.peak_weights),
            (layer.joined("top_effects"), layer.peak_effects),
        )
    ]
    _, first = np.unique(rows * (len(top) + 1) + found[0], return_index=True)
    return rows[first], *(each[first] for each in found)
