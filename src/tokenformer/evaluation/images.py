"""evaluate_images(): how often an image classifier is right.

    tokenformer eval models/mine --images photos/

Enters: an image classifier from transformers, its image processor, and pictures with classes. Leaves: top-1 and top-5
accuracy, and the counts of every class. Pictures that cannot be decoded are named and left out of every count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from ..data.base import available_cores
from ..data.images.pictures import BadImageError, ImageReadError, open_picture
from ..data.images.sources import Gallery
from ..errors import BadFileError, BadRequestError, did_you_mean, one_line
from ..models.sample import evaluating

TOP = 5


@dataclass(frozen=True)
class ClassScore:
    """How the pictures of one class were classified; `bad` are those that could not be decoded."""

    name: str
    images: int
    correct: int
    bad: int


@dataclass(frozen=True)
class ImageScore:
    """How pictures were classified. `bad` names those that could not be decoded, which are in no count."""

    top1: float
    top5: float | None  # None for a model of five classes or fewer
    images: int
    classes: tuple[ClassScore, ...]  # those that occur among the pictures
    matched: str  # how they were matched with the model's: by name, by number or by position
    bad: tuple[str, ...]


def evaluate_images(
    model: PreTrainedModel,
    processor: Any,
    gallery: Gallery,
    *,
    by_position: bool = False,
    batch_size: int = 64,
    workers: int | None = None,
    strict: bool = False,
    say: Callable[[str], Any] = lambda problem: None,
) -> ImageScore:
    """Classify all pictures of a gallery.

    `processor` is the model's own, from AutoImageProcessor. Classes are matched with the model's by name; or by number,
    if the gallery has only numbers and the model has no classes of such names, or with `by_position`. `workers`
    processes decode, as many as there are cores if None. A picture that cannot be decoded is reported to `say` and left
    out; with `strict` it is an error.
    """
    if batch_size < 1:
        raise BadRequestError(f"batch size {batch_size} was given; at least 1 is needed")
    matched, classes = match_classes(gallery, model.config, by_position)
    targets = torch.tensor(classes)[torch.from_numpy(gallery.labels)]
    pictures = _Pictures(gallery, processor, getattr(model.config, "num_channels", 3))
    cores = available_cores() if workers is None else workers
    loader = DataLoader(pictures, batch_size, collate_fn=_collate, num_workers=min(cores, len(pictures) // batch_size))
    seen, ranked, bad = [], [], []
    with evaluating(model):
        for rows, pixels, problems in loader:
            for problem in problems:
                if strict:
                    raise BadImageError(f"{problem}; fix or remove it, or leave out --strict")
                say(problem)
            bad += problems
            if rows:
                seen += rows
                ranked.append(_right(model, pixels, targets[rows]))
    if not seen:
        raise BadFileError(f"none of {len(gallery):,} images can be decoded: {bad[0]}")
    right = torch.cat(ranked)  # [images, 2]
    labels = torch.from_numpy(gallery.labels)
    asked, images, correct = (
        torch.bincount(some, minlength=len(gallery.names)) for some in (labels, labels[seen], labels[seen][right[:, 0]])
    )
    counts = zip(gallery.names, images.tolist(), correct.tolist(), (asked - images).tolist(), strict=True)
    return ImageScore(
        top1=right[:, 0].double().mean().item(),
        top5=right[:, 1].double().mean().item() if (model.config.num_labels or 0) > TOP else None,
        images=len(seen),
        classes=tuple(one for one in (ClassScore(*found) for found in counts) if one.images or one.bad),
        matched=matched,
        bad=tuple(bad),
    )


def match_classes(gallery: Gallery, config: Any, by_position: bool = False) -> tuple[str, list[int]]:
    """The model's class for each class of a gallery, and how they were matched, in words."""
    known = [config.id2label[i] for i in range(config.num_labels)]
    by_number = gallery.numbered and not set(gallery.names) <= set(known)
    if by_position or by_number:
        # Numbers mean positions even if some are missing; names do so only if none is missing.
        too_few = len(gallery.names) < len(known) and not gallery.numbered
        if too_few or len(gallery.names) > len(known):
            raise BadRequestError(
                f"the images have {len(gallery.names)} classes, and the model knows {len(known)}; use images of its "
                "classes" + (", of all of them by position" if too_few else "")
            )
        how = "by number" if gallery.numbered else "by position"
        return f"{how}: {gallery.names[0]} is {known[0]}", list(range(len(gallery.names)))
    if gallery.names == known:
        return "by name", list(range(len(known)))
    for name in gallery.names:
        if known.count(name) != 1:
            often = "does not know" if name not in known else "has several times"
            raise BadRequestError(
                f"the images have the class {name!r}, which the model {often} (--by-position takes classes by their "
                f"order instead); {did_you_mean(name, known)}"
            )
    return "by name", [known.index(name) for name in gallery.names]


class _Pictures(Dataset[tuple[int, Tensor | str]]):
    """Rows of a gallery as the model takes them, or what is wrong with them."""

    def __init__(self, gallery: Gallery, processor: Any, channels: int) -> None:
        self.gallery, self.processor, self.channels = gallery, processor, channels

    def __len__(self) -> int:
        return len(self.gallery)

    def __getitem__(self, row: int) -> tuple[int, Tensor | str]:
        try:
            picture = open_picture(self.gallery, row, self.channels)
        except BadImageError as error:
            return row, str(error)
        try:
            return row, self.processor(picture, return_tensors="pt")["pixel_values"][0]
        except ValueError as error:
            raise ImageReadError(
                f"the image processor cannot take an image of {self.channels} channels: {one_line(error)}; fix the "
                "model's preprocessor_config.json"
            ) from error


def _collate(samples: Sequence[tuple[int, Tensor | str]]) -> tuple[list[int], Tensor | None, list[str]]:
    good = [(row, sample) for row, sample in samples if isinstance(sample, Tensor)]
    pixels = torch.stack([sample for _, sample in good]) if good else None
    return [row for row, _ in good], pixels, [sample for _, sample in samples if isinstance(sample, str)]


@torch.no_grad()
def _right(model: PreTrainedModel, pixels: Tensor, targets: Tensor) -> Tensor:
    """[batch, 2]: whether the class is the first choice, and whether it is among the first five."""
    logits = model(pixel_values=pixels.to(model.device, model.dtype)).logits.float().cpu()  # [batch, classes]
    if not logits.isfinite().all():
        raise BadFileError("the logits are not finite; are the model's weights broken?")
    chosen = logits.topk(min(TOP, logits.shape[1])).indices == targets[:, None]
    return torch.stack([chosen[:, 0], chosen.any(dim=1)], dim=1)
