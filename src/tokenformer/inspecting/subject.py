"""What is looked at: a model, what reads its text or images, and the models that it grew from.

Enters: a model folder; an earlier model, if one is named. Leaves: `Subject`. In a run's folder, RUN/stage-3/model, the
stages before it are found, and the last of them is the one to compare with unless another is named.
"""

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from ..errors import BadRequestError
from ..inside import token_ages
from ..inside.ages import earlier_layer
from ..inside.places import Layers, Place, find_places
from ..inside.readout import Readout, find_readout
from ..models import TokenFormerVisionConfig, growth_records
from ..models.images import read_image_processor
from ..models.loading import check_finite, empty_model, read_config, read_model
from ..models.text import read_tokenizer

STAGE = re.compile(r"stage-(\d+)")
# What a projection of ours is called on the page.
ROLES = {
    "query": "attention, query",
    "key": "attention, key",
    "value": "attention, value",
    "out": "attention, output",
    "ffn": "feed-forward",
}


@dataclass(frozen=True)
class Layer:
    """A layer of the page. block: the number of its block, from 1; None if it is in none."""

    name: str
    block: int | None
    title: str
    tokens: int
    writes: bool


@dataclass(frozen=True)
class Stage:
    """An earlier model. layers: by a layer's name now, what it was called then, where tokens kept their numbers."""

    title: str
    model: Any
    layers: dict[str, str]
    steps: int  # of growth that it had had


@dataclass
class Subject:
    """A model to be looked at, and all that does not depend on a text."""

    folder: Path
    model: Any
    reads: Any  # a tokenizer, or an image processor
    places: dict[str, Place]
    stages: list[Stage] = field(default_factory=list)
    before: Stage | None = None

    @property
    def takes_images(self) -> bool:
        return self.model.main_input_name == "pixel_values"

    @property
    def name(self) -> str:
        """The last parts of the path that say which model it is."""
        parts = self.folder.resolve().parts[-3:]
        return "/".join(parts if STAGE.fullmatch(parts[-2]) else parts[-1:])

    @cached_property
    def readout(self) -> Readout | None:
        """How its stream becomes logits, if that is known."""
        try:
            return find_readout(self.model, "inspect")
        except BadRequestError:
            return None

    @cached_property
    def ages(self) -> dict[str, Tensor]:
        """By layer, the growth step that every token came with."""
        return token_ages(self.model, list(self.places))

    @cached_property
    def growth(self) -> list[str]:
        """Its growth steps, in words."""
        records = growth_records(self.model)
        history = (getattr(records[0][1], "growth_history", None) or []) if records else []
        return [_step_in_words(step) for step in history]

    @property
    def new_after(self) -> int:
        """Tokens that came with a later growth step than this one are new: those since `before`, or the last step's."""
        return self.before.steps if self.before is not None else max(0, len(self.growth) - 1)

    def is_new(self, name: str) -> Tensor:
        """Of a layer, which tokens are new: [n]."""
        return self.ages[name] > self.new_after

    @cached_property
    def layers(self) -> list[Layer]:
        """Its layers, in order."""
        readout = self.readout
        writers = set(readout.writers) if readout is not None else set()
        return [
            Layer(name, *_block_and_title(name, place), place.num_tokens, place.layer_name in writers)
            for name, place in self.places.items()
        ]

    @property
    def context(self) -> int:
        config = self.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or 1024

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size


def load_subject(
    folder: str | os.PathLike,
    *,
    before: str | os.PathLike | None = None,
    layers: Layers = None,
    images: bool = False,
    device: str | None = "cpu",
    put_beside: Any = lambda model: None,
    trust_remote_code: bool = False,
) -> Subject:
    """Read a model and those it grew from. `images`: whether it is to be shown an image, and not a text."""
    folder = Path(folder)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    takes_images = isinstance(config, TokenFormerVisionConfig) or hasattr(config, "image_size")
    if images != takes_images:
        wanted = "an image; give --image FILE" if takes_images else "text; give --text FILE or --prompt TEXT"
        raise BadRequestError(f"{folder} holds a {config.model_type} model, which takes {wanted}")
    find_places(empty_model(config), layers, "inspect")
    auto = AutoModelForImageClassification if images else AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    read = read_image_processor if images else lambda name, **how: read_tokenizer(name, config, **how)
    reads, model = read(folder, **options), read_model(folder, device, auto, **options)
    put_beside(model)
    check_finite(model, folder)
    subject = Subject(folder, model, reads, find_places(model, layers, "inspect"))
    for title, path in earlier_folders(folder, before):
        earlier = read_config(path, trust_remote_code=trust_remote_code)
        if type(earlier) is not type(config) or getattr(earlier, "vocab_size", 0) != getattr(config, "vocab_size", 0):
            raise BadRequestError(
                f"{path} is a model of another kind or vocabulary than {folder}; give one it grew from"
            )
        stage = _stage(title, read_model(path, device, auto, **options), subject)
        subject.stages.append(stage)
        if title == BEFORE or before is None:
            subject.before = stage
    return subject


BEFORE = "before"


def earlier_folders(folder: Path, before: str | os.PathLike | None) -> list[tuple[str, Path]]:
    """The models of the stages before one in a run's folder, and the one that is named, by what they are called."""
    found = []
    resolved = folder.resolve()
    number = STAGE.fullmatch(resolved.parent.name)
    for earlier in range(1, int(number[1]) if number else 1):
        path = resolved.parent.parent / f"stage-{earlier}" / resolved.name
        if (path / "config.json").is_file():
            found.append((f"stage {earlier}", path))
    if before is not None:
        named = Path(before)
        read_config(named)
        if named.resolve() == resolved:
            raise BadRequestError(f"--before {before} is the model itself; give one that it grew from")
        found = [(title, path) for title, path in found if path.resolve() != named.resolve()]
        found.append((BEFORE, named))
    return found


def _stage(title: str, model: Any, subject: Subject) -> Stage:
    """An earlier model, and which of its layers can be compared token by token."""
    records = growth_records(model)
    history = (getattr(records[0][1], "growth_history", None) or []) if records else []
    there, same = find_places(model, None, "inspect"), {}
    for name in subject.places:
        earlier = earlier_layer(subject.model, name, len(history))
        ages = subject.ages[name]
        kept = int(((ages >= 0) & (ages <= len(history))).sum())
        if earlier in there and there[earlier].num_tokens == kept and bool((ages >= 0).all()):
            same[name] = earlier
    return Stage(title, model, same, len(history))


def _block_and_title(name: str, place: Place) -> tuple[int | None, str]:
    """The number of the block, and the layer in words: `block 3, feed-forward`."""
    parts = place.layer_name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    role = ROLES.get(parts[-1], ".".join(parts[at + 1 :] if at is not None else parts[-2:]))
    group = f", group {place.group}" if place.group else ""
    return (None, f"{role}{group}") if at is None else (int(parts[at]) + 1, f"{role}{group}")


def _step_in_words(step: Any) -> str:
    """A growth step as one reads it: ffn 512 → 1,024."""
    before, after = step.get("before", {}), step.get("after", {})
    sizes = [f"{role} {before[role]:,} → {after[role]:,}" for role in after if before.get(role) != after[role]]
    depth = ["more blocks"] if "blocks" in step else []
    return ", ".join([*sizes, *depth]) or str(step.get("method", "growth"))
