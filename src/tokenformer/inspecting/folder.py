"""The page of a saved model: a model folder and a text or an image in, one HTML file out.

    tokenformer inspect runs/demo/stage-3/model --text book.txt --out inspect.html

The request is checked before a weight is read.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadRequestError
from ..inside.places import Layers
from ..io import existing_file
from .contexts import Contexts
from .page import MOST_BYTES, check_target, make_page, write_page
from .reading import TOP
from .sheet import ENTRIES, make_sheet
from .sources import ImageSource, Source, TextSource, image_source, text_file, text_source
from .subject import Subject, load_subject

SMALLER = 0.93  # than what would just fit
FEWEST = 16  # positions


class Written(NamedTuple):
    """A page that was written."""

    path: Path
    size: int
    positions: int
    unit: str
    tokens: int
    notes: list[str]


class Inspection:
    """A model, what it reads, and the sheet of it: `page()` is the static page, the live one asks for more."""

    def __init__(self, subject: Subject, source: Source, contexts: Contexts | None = None) -> None:
        self.subject, self.contexts = subject, contexts
        self.source, self.sheet, self.page = fitting(subject, source, contexts)

    @property
    def tokens(self) -> int:
        """How many parameter tokens have a card."""
        table = self.sheet["arrays"]["table"]
        return table["token_ids"][2]


def load_inspection(
    folder: str | os.PathLike,
    *,
    text: str | os.PathLike | None = None,
    prompt: bytes | None = None,
    image: str | os.PathLike | None = None,
    before: str | os.PathLike | None = None,
    index: str | os.PathLike | None = None,
    layers: Layers = None,
    device: str | None = "cpu",
    put_beside: Any = lambda model: None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Read a model and show it a text, a prompt or an image.

    Args:
        folder: the model.
        text: a file, of whose beginning as much is shown as fits. prompt: a text itself. image: a file.
        before: an earlier model, to see what growth changed; that of the stage before unless given.
        index: a folder of `index_tokens`, whose contexts are shown on the cards.
        layers: names or patterns; all Pattentions unless given.
        put_beside: loads token groups onto the model.
    """
    given = [one for one in (text, prompt, image) if one is not None]
    if len(given) != 1:
        raise BadRequestError(f"{len(given) or 'no'} things to look at were given; give a text, a prompt or an image")
    for path in (text, image):
        if path is not None:
            existing_file(path)
    contexts = None if index is None else Contexts(index)
    subject = load_subject(
        folder,
        before=before,
        layers=layers,
        images=image is not None,
        device=device,
        put_beside=put_beside,
        trust_remote_code=trust_remote_code,
    )
    source: Source
    if image is not None:
        source = image_source(subject, image)
    elif text is not None:
        source = text_file(subject, text)
    else:
        source = text_source(subject, prompt or b"", "the prompt")
    return Inspection(subject, source, contexts)


def write_inspection(inspection: Inspection, out: str | os.PathLike) -> Written:
    """Write the page of an inspection, or replace an earlier page."""
    out = Path(out)
    check_target(out)
    size, source = write_page(inspection.page, out), inspection.source
    return Written(out, size, len(source.pieces), source.unit, inspection.tokens, source.notes)


def fitting(
    subject: Subject, source: Source, contexts: Contexts | None = None, most: int = MOST_BYTES
) -> tuple[Source, dict[str, Any], str]:
    """As much of a source as a page has room for, its sheet and the page."""
    affordable = max(FEWEST, int(1.3 * ENTRIES) // (TOP * len(subject.places)))
    if isinstance(source, TextSource) and len(source.ids) > affordable:
        source = source.shorter(affordable)
    while True:
        sheet = make_sheet(subject, source, contexts)
        page = make_page(sheet)
        size, count = len(page.encode()), len(source.pieces)
        if size <= most or isinstance(source, ImageSource) or count <= FEWEST:
            break
        source = source.shorter(max(FEWEST, int(count * SMALLER * most / size)))
    if size > most:
        raise BadRequestError(
            f"the page of {count} {source.unit}s would have {size:,} bytes, and {most:,} are the most; choose fewer "
            "layers with --layers"
        )
    return source, sheet, page
