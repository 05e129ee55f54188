"""Training on images: a classifier on pixels. task.py says what each method is for."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from .. import cost
from ..data import ImageCollator, ImageConfig, PreparedImages, prepare_images
from ..data.config import as_list
from ..data.image_config import check_image_config
from ..data.mix import check_even_batch
from ..data.prepare_images import image_processor
from ..errors import BadRequestError
from ..models import TokenFormerForImageClassification, TokenFormerVisionConfig
from ..models.images import IMAGE_PROCESSOR_FILE
from ..models.loading import read_tokenformer
from .order import OrderedImages
from .task import Task

logger = logging.getLogger(__name__)


class ImageTask(Task):
    """Images with a class each."""

    kind = "an image recipe"
    mark = "data.images is given"
    unit = "images"
    one_unit = "an image"
    budgets = ("steps", "images", "epochs")
    settings = {"validation_images": None}  # the most that one validation looks at
    decided = {"label_smoothing_factor": "data.augment.label_smoothing"}
    data_class = ImageConfig
    config_class = TokenFormerVisionConfig
    model_class = TokenFormerForImageClassification
    model_keys = ("num_labels",)

    def __init__(self, section: ImageConfig) -> None:
        self.section = section

    @property
    def samples(self) -> str:
        return "images"

    @property
    def units_per_sample(self) -> int:
        return 1

    @property
    def sources(self) -> list[str]:
        return [*as_list(self.section.images or []), *as_list(self.section.validation or [])]

    def check(self, training: dict[str, Any], batch: int) -> None:
        check_image_config(self.section)
        if self.section.augment.mixes:
            check_even_batch(batch)

    def foresee(self, epochs: bool) -> PreparedImages | None:
        return prepare_images(self.section) if epochs else None

    def prepare(self, console: Any) -> PreparedImages:
        return prepare_images(self.section)

    def implied(self, model: dict[str, Any], data: PreparedImages | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"image_size": self.section.size, "num_channels": self.section.channels}
        names = list(data.id2label.values()) if data is not None else self.section.class_names
        if names is not None:
            wanted = model.get("num_labels", len(names))
            if wanted != len(names):
                raise BadRequestError(
                    f"model.num_labels is {wanted}; the images have {len(names)} classes: leave it out"
                )
            fields |= _classes(names)
        return fields

    def refitted(self) -> dict[str, Any]:
        return {"image_size": self.section.size}  # positions are stretched

    def settle(self, config: TokenFormerVisionConfig, data: PreparedImages | None) -> None:
        for field, key in (("image_size", "size"), ("num_channels", "channels")):
            ours, theirs = getattr(config, field), getattr(self.section, key)
            if ours != theirs:
                raise BadRequestError(
                    f"data.{key} is {theirs}, and the model takes {ours} (model.{field}); make them equal"
                )
        if data is not None:  # also where a checkpoint was trained on other classes
            if len(data.id2label) < 2:
                raise BadRequestError(f"the images have one class, {data.id2label[0]}; a classifier needs at least two")
            for field, value in _classes(list(data.id2label.values())).items():
                setattr(config, field, value)
        # Or else the mixed labels, which are not whole numbers, would be taken for many labels an image.
        config.problem_type = "single_label_classification"

    def first_model(
        self, config: TokenFormerVisionConfig, checkpoint: str | None
    ) -> tuple[TokenFormerForImageClassification, bool]:
        """Of a checkpoint that knows other classes, all but the classifier."""
        model = TokenFormerForImageClassification(config)
        if checkpoint is None:
            return model, False
        trained = read_tokenformer(checkpoint, dtype=torch.float32)
        self._compare_pixels(checkpoint, trained.base_model.loaded_processor)
        known = trained.config.id2label
        unnamed = known == {i: f"LABEL_{i}" for i in range(config.num_labels or 0)}
        if known == config.id2label or unnamed:
            model.load_state_dict(trained.state_dict())
            return model, True
        model.model.load_state_dict(trained.model.state_dict())
        return model, False

    def _compare_pixels(self, checkpoint: str, processor: str | None) -> None:
        """Say so if a checkpoint knows pixels of another mean or deviation than it will be given."""
        try:
            known, given = json.loads(processor or "{}"), image_processor(self.section)
        except json.JSONDecodeError:  # this run writes its own
            return
        other = [key for key in ("image_mean", "image_std") if known.get(key, given[key]) != given[key]]
        if other:
            logger.warning(
                "%s was trained on pixels of %s, and is given %s; data.normalise, or data.mean and data.std, decide it",
                checkpoint,
                ", ".join(f"{key} {known[key]}" for key in other),
                ", ".join(str(given[key]) for key in other),
            )

    def for_use(self, config: TokenFormerVisionConfig) -> None:
        pass

    def arguments(self, data: PreparedImages, training: dict[str, Any]) -> dict[str, Any]:
        workers = data.workers
        if self.section.workers is None:  # all cores, shared by the processes of this machine
            workers = max(1, workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return {"dataloader_num_workers": training.get("dataloader_num_workers", workers)}

    def ordered(self, data: PreparedImages, steps: int, samples_per_step: int, checkpoint: Path) -> Dataset:
        return OrderedImages(data.train, steps * samples_per_step, self.section.seed)

    def collate(self, data: PreparedImages) -> ImageCollator:
        return data.collate

    def held_out(self, data: PreparedImages, training: dict[str, Any]) -> Dataset | None:
        if data.validation is None:
            return None
        most = min(training["validation_images"] or len(data.validation), len(data.validation))
        # Not the first ones: images often come sorted by class.
        chosen = np.random.default_rng(self.section.split_seed % 2**64).permutation(len(data.validation))[:most]
        return Subset(data.validation, sorted(chosen.tolist()))

    def score(self, model: nn.Module, batch: Any) -> dict[str, float]:
        logits, labels = model(batch["pixel_values"]).logits.float(), batch["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(dim=1) == labels).sum()
        return {"loss": loss.item(), "accuracy": right.item()}

    def save_beside(self, data: PreparedImages, folder: Path) -> None:
        (folder / IMAGE_PROCESSOR_FILE).write_text(json.dumps(data.processor, indent=2) + "\n")

    def bad_samples(self, data: PreparedImages) -> list[str]:
        return [name for part in (data.train, data.validation) if part is not None for name in part.bad_images]

    def assumed(self, config: TokenFormerVisionConfig, data: PreparedImages | None) -> dict[str, str]:
        if data is not None or self.section.class_names is not None:
            return {}
        return {"classes": f"{config.num_labels:,} are assumed: the images were not looked at"}

    def flops(self, config: TokenFormerVisionConfig) -> tuple[float, float]:
        return cost.forward_flops_per_image(config), cost.training_flops_per_image(config)

    def memory(self, config: TokenFormerVisionConfig, batch: int, gradient_checkpointing: bool) -> cost.TrainingMemory:
        return cost.training_memory(config, batch, gradient_checkpointing=gradient_checkpointing)


def _classes(names: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
