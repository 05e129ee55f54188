"""What the card of a token says that no single position does: use, words, neighbours, age, use in a run's stages.

Enters: a subject, its reading, and which tokens are kept. Leaves: arrays with a row for each kept token, by layer.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..inside import token_statistics
from ..inside.places import Place
from ..inside.readout import Readout
from ..inside.statistics import nearest_tokens
from .packing import as_bytes, smallest
from .reading import LayerReading, Reading, Window, windows
from .sources import ImageSource, Source
from .subject import Stage, Subject

WORDS, NEIGHBOURS = 8, 5
STEPS_OF_USE = 16  # of a byte, for the use of the mean token of a layer
AT_A_TIME = 1024


def card_arrays(
    subject: Subject, reading: Reading, kept: dict[str, Tensor], source: Source, length: int
) -> dict[str, np.ndarray]:
    """The arrays of all kept tokens."""
    stages = [_use_in(stage, source, length) for stage in subject.stages]
    parts: dict[str, list[Tensor]] = {}
    for name, layer in reading.layers.items():
        for what, found in _of_layer(subject, name, layer, kept[name], reading.positions, stages).items():
            parts.setdefault(what, []).append(found)
    arrays = {what: torch.cat(found).numpy() for what, found in parts.items()}
    most = max(place.num_tokens for place in subject.places.values())
    for what in ("token_ids", "near"):
        arrays[what] = smallest(arrays[what], most)
    for what in ("promoted", "suppressed"):
        arrays[what] = smallest(arrays[what], int(arrays[what].max(initial=0)))
    scale = np.maximum(*(np.abs(arrays[f"{what}_logits"]).max(1) for what in ("promoted", "suppressed")))
    for what in ("promoted_logits", "suppressed_logits"):
        arrays[what] = as_bytes(arrays[what], scale[:, None])
    return arrays | {
        "token_counts": np.array([len(kept.get(layer.name, ())) for layer in subject.layers], np.uint32),
        "ages": arrays["ages"].clip(-1, 127).astype(np.int8),
        "near_cosines": as_bytes(arrays["near_cosines"], 1.0),
        "use_ranks": (arrays["use_ranks"] * 255).round().astype(np.uint8),
        "stage_use": (arrays["stage_use"] * STEPS_OF_USE).round().clip(0, 255).astype(np.uint8),
        "word_scales": scale.astype(np.float32),
    }


def _of_layer(
    subject: Subject, name: str, layer: LayerReading, kept: Tensor, positions: int, stages: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The same of one layer."""
    place, statistics = subject.places[name], layer.tally.statistics(subject.ages[name])
    use = statistics.use.float()
    ranks = use.argsort().argsort().float() / max(1, len(use) - 1)
    near, cosines = _nearest(place, kept)
    over_stages = [_aligned(stage.get(name), len(use)) for stage in stages] + [_against_mean(use)]
    return {
        "token_ids": kept,
        "largest": layer.tally.largest[kept],
        "lengths": layer.lengths[kept],
        "use": use[kept],
        "use_ranks": ranks[kept],
        "selectivity": statistics.selectivity[kept].float(),
        "ages": statistics.age[kept],
        "helps": layer.helps[kept] / positions,
        "near": near,
        "near_cosines": cosines,
        "stage_use": torch.stack(over_stages, dim=1)[kept],
        **_words(place, kept, subject.readout, _writes(subject, name)),
    }


def _writes(subject: Subject, name: str) -> bool:
    return next(layer.writes for layer in subject.layers if layer.name == name)


def _nearest(place: Place, kept: Tensor) -> tuple[Tensor, Tensor]:
    """[kept, NEIGHBOURS] each; where there are fewer tokens, the cosine is 0."""
    found = [nearest_tokens(place, chunk.tolist(), NEIGHBOURS) for chunk in kept.split(AT_A_TIME)]
    near, cosines = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    missing = (0, NEIGHBOURS - near.shape[1])
    return torch.nn.functional.pad(near, missing), torch.nn.functional.pad(cosines.float(), missing)


def _words(place: Place, kept: Tensor, readout: Readout | None, writes: bool) -> dict[str, Tensor]:
    """What values point to and away from, [kept, WORDS]; of a layer that does not write to the stream zeros."""
    empty = {"ids": torch.zeros(len(kept), WORDS, dtype=torch.long), "logits": torch.zeros(len(kept), WORDS)}
    if readout is None or not writes:
        return {f"{what}{end}": empty[kind] for what in WAYS for kind, end in (("ids", ""), ("logits", "_logits"))}
    found: dict[str, list[Tensor]] = {}
    for values in place.values[kept.to(place.values.device)].split(AT_A_TIME):
        logits = readout.logits(values)
        for what, largest in WAYS.items():
            best = logits.topk(min(WORDS, logits.shape[1]), dim=1, largest=largest)
            missing = (0, WORDS - best.indices.shape[1])
            found.setdefault(what, []).append(torch.nn.functional.pad(best.indices.cpu(), missing))
            found.setdefault(f"{what}_logits", []).append(torch.nn.functional.pad(best.values.cpu(), missing))
    return {what: torch.cat(parts) for what, parts in found.items()}


WAYS = {"promoted": True, "suppressed": False}


def _use_in(stage: Stage, source: Source, length: int) -> dict[str, Tensor]:
    """What every token of an earlier model does in the same text, by the names of the layers now."""
    if not stage.layers:
        return {}
    parts: Any = [Window({"pixel_values": source.pixels})] if isinstance(source, ImageSource) else ()
    context = getattr(stage.model.config.get_text_config(), "max_position_embeddings", None) or length
    parts = parts or windows(list(source.ids), min(length, context))
    found = token_statistics(stage.model, [window.batch for window in parts], list(stage.layers.values()))
    return {now: found[then].use.float() for now, then in stage.layers.items() if then in found}


def _aligned(use: Tensor | None, count: int) -> Tensor:
    """By the tokens' numbers now; zero for those that were not there."""
    found = torch.zeros(count)
    if use is not None:
        found[: len(use)] = _against_mean(use)
    return found


def _against_mean(use: Tensor) -> Tensor:
    """What every token adds, against the mean token of its layer."""
    return use / use.mean().clamp(min=torch.finfo(use.dtype).tiny)
