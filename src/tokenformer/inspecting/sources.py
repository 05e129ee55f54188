"""What a model is shown: a text from a file or the command line, or an image.

Enters: bytes, or the path of an image. Leaves: a `TextSource` with ids and pieces, or an `ImageSource` with pixels and
patches, both of which say what a position is called, and how an id of the vocabulary, or a class, is written.
"""

import base64
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadFileError, BadRequestError, one_line, require
from ..io import existing_file
from ..models.text import reads_bytes
from .pieces import check_not_empty, cut_into_pieces, label
from .subject import Subject

MOST = 16_384  # positions of a text
MOST_BYTES_EACH = 16  # that are read of a file
PICTURE = 448  # pixels of the longer side, as it is shown
SHOWN_TITLE = 60


@dataclass
class TextSource:
    """A text that is read, or the beginning of one. whole: what it is the beginning of, empty if all of it is here."""

    ids: list[int]
    pieces: list[str]
    title: str
    tokenizer: Any
    whole: str = ""

    @property
    def unit(self) -> str:
        return "byte" if reads_bytes(self.tokenizer) else "token"

    @property
    def notes(self) -> list[str]:
        """What the reader of the page is told."""
        return [f"Shown are the first {len(self.ids):,} {self.unit}s of {self.whole}."] if self.whole else []

    def label(self, token: int) -> str:
        """An entry of the vocabulary."""
        return label(self.tokenizer, token)

    def shorter(self, most: int) -> "TextSource":
        """Its beginning."""
        whole = self.whole or f"{len(self.ids):,}: a page has at most 5 MB"
        return TextSource(self.ids[:most], self.pieces[:most], self.title, self.tokenizer, whole)


@dataclass
class ImageSource:
    """An image that is read, in patches, row by row."""

    pixels: Tensor  # [1, channels, height, width]
    pieces: list[str]
    title: str
    classes: dict[int, str]
    rows: int
    columns: int
    image: Any
    notes: list[str] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    unit: str = "patch"

    def label(self, token: int) -> str:
        """A class."""
        return str(self.classes.get(token, f"class {token}"))

    def picture(self) -> dict[str, Any]:
        """The image as the page shows it, and where its patches are."""
        content = io.BytesIO()
        self.image.save(content, "PNG", optimize=True)
        return {
            "url": "data:image/png;base64," + base64.b64encode(content.getvalue()).decode(),
            "rows": self.rows,
            "columns": self.columns,
            "extra": len(self.pieces) - self.rows * self.columns,
        }


Source = TextSource | ImageSource


def text_source(subject: Subject, text: bytes, title: str) -> TextSource:
    """A text, cut off where no page could hold more."""
    pieces = cut_into_pieces(subject.reads, text, subject.vocab_size, MOST)
    check_not_empty(pieces, title)
    whole = f"{len(text):,} bytes of text" if pieces.left_out > 0 else ""
    return TextSource(pieces.ids, pieces.shown, title, subject.reads, whole)


def text_file(subject: Subject, path: str | os.PathLike) -> TextSource:
    """The beginning of a file."""
    path = existing_file(path)
    try:
        with path.open("rb") as file:
            text = file.read(MOST * MOST_BYTES_EACH)
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror or error}") from error
    whole = path.stat().st_size
    while text and not reads_bytes(subject.reads) and whole > len(text) and text[-1] >= 0x80:
        text = text[:-1]  # half a character
    source = text_source(subject, text, path.name)
    if whole > len(text):
        source.whole = f"a file of {whole:,} bytes"
    return source


def image_source(subject: Subject, path: str | os.PathLike) -> ImageSource:
    """An image, as the model's own processor gives it."""
    require("tokenformer inspect --image", "vision", "PIL")
    from PIL import Image

    path = existing_file(path)
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if subject.model.config.num_channels == 1 else "RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise BadFileError(f"{path} cannot be read as an image: {one_line(error)}") from error
    pixels = subject.reads(image, return_tensors="pt")["pixel_values"].to(next(subject.model.parameters()).dtype)
    config = subject.model.config
    side = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    rows, columns = pixels.shape[-2] // side, pixels.shape[-1] // side
    extra = [] if getattr(config, "pooling", "cls") != "cls" else ["class token"]
    patches = [f"row {row + 1}, column {column + 1}" for row in range(rows) for column in range(columns)]
    return ImageSource(
        pixels,
        [*extra, *patches],
        Path(path).name,
        dict(config.id2label or {}),
        rows,
        columns,
        _as_read(pixels, subject.reads),
    )


def _as_read(pixels: Tensor, processor: Any) -> Any:
    """The pixels as an image again, which shows what the model sees, so that patches lie where they are."""
    from PIL import Image

    mean, std = (
        torch.tensor(getattr(processor, name, None) or [default]).view(-1, 1, 1)
        for name, default in (("image_mean", 0.0), ("image_std", 1.0))
    )
    found = ((pixels[0].float() * std + mean).clamp(0, 1) * 255).round().byte()
    image = Image.fromarray(found.permute(1, 2, 0).squeeze(-1).numpy())
    larger = max(1, PICTURE // max(image.size))
    return image.resize((image.width * larger, image.height * larger), Image.Resampling.NEAREST)
