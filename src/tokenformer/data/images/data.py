"""ImageData: images with a class each, as a classifier is trained on them.

Enters: ImageSettings. Leaves: pictures for training, validation and test, the names of the classes, and batches. Images
stay where they are, encoded; only labels are read here, and, to hold some out, every image once, undecoded: a seeded
hash of the content chooses, so that copies of one image are on one side.
"""

import hashlib
import json
import logging
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset
from typing_extensions import Self

from ... import cost
from ...errors import BadRequestError
from ...models import TokenFormerForImageClassification, TokenFormerVisionConfig
from ...models.images import IMAGE_PROCESSOR_FILE
from ...models.loading import read_model
from ..base import PARTS, Shuffled, TrainingData, available_cores, seeded
from ..sources import as_list
from .augment import ImageCollator, check_even_batch, load_kornia
from .pictures import Pictures, load_pillow
from .settings import ImageSettings
from .sources import Gallery, find_images

logger = logging.getLogger(__name__)


class AugmentedInOrder(Shuffled):
    """The pictures of a run in its order, each augmented for its place in it."""

    def __getitem__(self, index: int) -> Any:
        return self.items.augmented(self.row(index), index)


class ImageData(TrainingData):
    """Images with a class each. After `prepare`:

    train, validation, test: the pictures of each part; validation and test are None if there are none.
    id2label: the names of the classes.
    collate: makes batches of any part; it mixes and smooths those samples that were augmented.
    stats: the number of images of each part.
    """

    unit, per_unit = "images", "per image"
    config_class, model_class = TokenFormerVisionConfig, TokenFormerForImageClassification

    settings: ImageSettings
    train: Pictures
    validation: Pictures | None = None
    test: Pictures | None = None
    stats: dict[str, int]

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self.id2label: dict[int, str] | None = None  # None until the images are found

    @property
    def samples_name(self) -> str:
        return "images"

    @property
    def units_per_sample(self) -> int:
        return 1

    @property
    def sources(self) -> list[str]:
        return [*as_list(self.settings.images), *as_list(self.settings.validation)]

    def check(self, batch: int, loader_workers: int) -> None:
        if self.settings.augment.mixes:
            check_even_batch(batch)

    def inspect(self, *, count_samples: bool) -> None:
        if count_samples:
            self.prepare()

    def prepare(self, console: Console | None = None) -> Self:
        """Find the images and their classes, and hold some out."""
        settings = self.settings
        load_pillow()
        if settings.augment.rand_augment:
            load_kornia()
        gallery = find_images(settings)
        fingerprints = [gallery.fingerprint]
        parts = {part: Pictures(gallery, rows, settings) for part, rows in _parted(gallery, settings).items()}
        if settings.validation is not None:
            held_out = find_images(settings, "validation", gallery)
            fingerprints.append(held_out.fingerprint)
            parts["validation"] = Pictures(held_out, np.arange(len(held_out)), settings)
        whole = hashlib.blake2b(" ".join(fingerprints).encode(), digest_size=16)
        for pictures in parts.values():
            whole.update(pictures.rows.tobytes())
        self.train, self.validation, self.test = parts["train"], parts.get("validation"), parts.get("test")
        self.id2label = dict(enumerate(gallery.names))
        self.collate = ImageCollator(len(gallery.names), settings.augment, settings.seed)
        self.stats = {part: len(pictures) for part, pictures in parts.items()}
        self.key = whole.hexdigest()
        return self

    def config_fields(self, given: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {"image_size": self.settings.size, "num_channels": self.settings.channels}
        names = list(self.id2label.values()) if self.id2label is not None else self.settings.class_names
        if names is not None:
            wanted = given.get("num_labels", len(names))
            if wanted != len(names):
                raise BadRequestError(
                    f"model.num_labels is {wanted}; the images have {len(names)} classes: leave it out"
                )
            fields |= _classes(names)
        return fields

    def adjust_checkpoint_config(self, config: TokenFormerVisionConfig) -> None:
        config.image_size = self.settings.size  # positions are stretched

    def adjust_config(self, config: TokenFormerVisionConfig) -> None:
        for field, key in (("image_size", "size"), ("num_channels", "channels")):
            ours, theirs = getattr(config, field), getattr(self.settings, key)
            if ours != theirs:
                raise BadRequestError(
                    f"data.{key} is {theirs}, and the model takes {ours} (model.{field}); make them equal"
                )
        if self.id2label is not None:  # also where a checkpoint was trained on other classes
            if len(self.id2label) < 2:
                raise BadRequestError(f"the images have one class, {self.id2label[0]}; a classifier needs at least two")
            for field, value in _classes(list(self.id2label.values())).items():
                setattr(config, field, value)
        # Or else mixed labels, which are not whole numbers, would be treated as several labels per image.
        config.problem_type = "single_label_classification"

    def first_model(
        self, config: TokenFormerVisionConfig, checkpoint: str | None
    ) -> tuple[TokenFormerForImageClassification, bool]:
        """From a checkpoint trained on other classes, all but the classifier is kept."""
        model = TokenFormerForImageClassification(config)
        if checkpoint is None:
            return model, False
        trained = read_model(checkpoint, dtype=torch.float32)
        self._compare_pixels(checkpoint, trained.base_model.loaded_processor)
        known = trained.config.id2label
        unnamed = known == {i: f"LABEL_{i}" for i in range(config.num_labels or 0)}
        if known == config.id2label or unnamed:
            model.load_state_dict(trained.state_dict())
            return model, True
        model.model.load_state_dict(trained.model.state_dict())
        return model, False

    def _compare_pixels(self, checkpoint: str, processor: str | None) -> None:
        """Warn if a checkpoint was trained on pixels of another mean or deviation than it will be given."""
        try:
            known, given = json.loads(processor or "{}"), image_processor(self.settings)
        except (json.JSONDecodeError, RecursionError):  # this run writes its own
            return
        other = [key for key in ("image_mean", "image_std") if known.get(key, given[key]) != given[key]]
        if other:
            logger.warning(
                "%s was trained on pixels of %s, and is given %s; data.normalise, or data.mean and data.std, decide it",
                checkpoint,
                ", ".join(f"{key} {known[key]}" for key in other),
                ", ".join(str(given[key]) for key in other),
            )

    def implied_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        workers = self.settings.workers
        if workers is None:  # all cores, shared by the processes of this machine
            workers = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return {"dataloader_num_workers": given.get("dataloader_num_workers", workers)}

    def in_order(self, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        return AugmentedInOrder(self.train, steps * samples_per_step, self.settings.seed)

    def held_out(self, most: int | None) -> Dataset | None:
        if self.validation is None:
            return None
        most = min(most or len(self.validation), len(self.validation))
        # Not the first ones: images often come sorted by class.
        chosen = np.random.default_rng(self.settings.split_seed % 2**64).permutation(len(self.validation))[:most]
        return Subset(self.validation, sorted(chosen.tolist()))

    def score(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
        logits, labels = model(batch["pixel_values"]).logits.float(), batch["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(dim=1) == labels).sum()
        return {"loss": loss.item(), "accuracy": right.item()}

    def save_beside(self, folder: Path) -> None:
        (folder / IMAGE_PROCESSOR_FILE).write_text(json.dumps(image_processor(self.settings), indent=2) + "\n")

    def unreadable(self) -> list[str]:
        return [name for part in (self.train, self.validation) if part is not None for name in part.bad_images]

    def assumptions(self, config: TokenFormerVisionConfig) -> dict[str, str]:
        if self.id2label is not None or self.settings.class_names is not None:
            return {}
        return {"classes": f"{config.num_labels:,} are assumed: the images were not looked at"}

    def flops(self, config: TokenFormerVisionConfig) -> tuple[float, float]:
        return cost.forward_flops_per_image(config), cost.training_flops_per_image(config)

    def memory(
        self, config: TokenFormerVisionConfig, batch: int, optimizer: str, gradient_checkpointing: bool
    ) -> cost.TrainingMemory:
        return cost.training_memory(config, batch, optimizer=optimizer, gradient_checkpointing=gradient_checkpointing)


def _classes(names: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def _parted(gallery: Gallery, settings: ImageSettings) -> dict[str, np.ndarray]:
    """The rows of each part that comes from the training images, in their order."""
    shares = settings.split or [1 - settings.validation_fraction, settings.validation_fraction]
    if settings.validation is not None or shares[1] == 0:
        return {"train": np.arange(len(gallery))}
    part_of = assign_parts(gallery.digests(), shares, settings.split_seed)
    parts = {PARTS[i]: np.flatnonzero(part_of == i) for i in range(len(shares))}
    for part, rows in parts.items():
        if not len(rows):
            raise BadRequestError(
                f"{len(gallery)} images (duplicates counted once) are too few to give {part} a share of "
                f"{shares[PARTS.index(part)]:g}; use more images or other shares, or set validation"
            )
    return parts


def assign_parts(digests: np.ndarray, shares: list[float], seed: int) -> np.ndarray:
    """The part of each image: 0, 1, … in the order of their seeded hashes, at least one for all but the first.

    Not by position, as text is cut: images often come sorted by class.
    """
    hashes = seeded(digests, seed)
    ascending = np.sort(hashes)
    sizes = [max(1, round(share * len(hashes))) for share in shares[1:]]
    # Below the first bound is the last part, and so on; copies have one hash and stay together.
    bounds = ascending[np.minimum(list(accumulate(reversed(sizes))), len(ascending) - 1)]
    part_of = np.zeros(len(hashes), np.int64)
    for bound in bounds:
        part_of += hashes < bound
    return part_of


def image_processor(settings: ImageSettings) -> dict[str, Any]:
    """The settings of a transformers image processor that does what `ImageData` does for validation."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": settings.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": settings.shorter_side},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": settings.size, "width": settings.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": settings.pixel_mean,
        "image_std": settings.pixel_std,
    }
