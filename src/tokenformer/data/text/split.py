"""Which document, or which part of one, is for training, for validation or for the test.

Enters: a configuration. Leaves: selections, that is a surveyed corpus whose pieces come with the name of their part.
Held-out documents are chosen by a seeded hash of their content, so copies of one document stay together and a corpus
that grows keeps most of its choice. A corpus of one document, or of copies of one, is cut by position instead.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ...errors import BadFileError, BadRequestError
from ..base import PARTS, seeded
from .documents import Corpus, Hashing, Piece, Survey, character_start, first_documents, ignore, survey
from .settings import TextSettings
from .sources import find_sources

# A stream has no end that could be waited for: its held-out documents are among its first ones.
STREAM_HEAD = 10_000

Parted = Iterator[tuple[str, Piece]]


@dataclass(frozen=True)
class Selection:
    """A corpus, its survey, the parts it fills, and the way to tell the part of a piece, also in words."""

    corpus: Corpus
    survey: Survey
    parts: tuple[str, ...]
    rule: str
    assign: Callable[[Iterable[Piece]], Parted]
    held_out: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    limit: int | None = None

    def pieces(self) -> Parted:
        """The pieces with the names of their parts. They must be those of the survey."""
        hashing = Hashing()
        pieces = hashing.passing(first_documents(self.corpus.pieces(), self.limit))
        yield from ((part, piece) for part, piece in self.assign(pieces) if part in self.parts)
        if hashing.content != self.survey.content:
            raise BadFileError("the sources changed while they were being read; try again")


def select(settings: TextSettings, advance: Callable[[int], None] = ignore) -> list[Selection]:
    """Read everything once and decide: a selection for `train`, and one for `validation` if it has its own sources.

    For a stream `train` is not read: only the head that validation documents come from is.
    """
    selections = []
    if not settings.streaming:
        selections.append(_select_training(settings, advance))
    elif settings.validation is None and settings.validation_fraction > 0:
        selections.append(_select_head(settings, advance))
    if settings.validation is not None:
        corpus = Corpus(find_sources(settings, "validation"), settings.column)
        found = survey(corpus, None, advance)
        selections.append(_select_all(corpus, found, "validation"))
    return selections


def _select_training(settings: TextSettings, advance: Callable[[int], None]) -> Selection:
    corpus = Corpus(find_sources(settings), settings.column)
    found = survey(corpus, None, advance)
    fraction = 0.0 if settings.validation is not None else settings.validation_fraction
    shares = settings.split
    if shares is None and fraction > 0:
        held_out = choose_held_out(found.digests, fraction, settings.split_seed)
        if held_out is not None:
            return _select_documents(settings, corpus, found, PARTS[:2], held_out)
        shares = [1 - fraction, fraction]
    if shares is None:
        return _select_all(corpus, found, "train")
    ends = [round(found.bytes * share) for share in accumulate(shares[:-1])]
    exact = settings.tokenizer == "bytes"
    rule = f"cut at bytes {ends}"
    return Selection(corpus, found, PARTS[: len(shares)], rule, lambda pieces: by_position(pieces, ends, exact))


def _select_head(settings: TextSettings, advance: Callable[[int], None]) -> Selection:
    corpus = Corpus(find_sources(settings), settings.column)
    found = survey(corpus, STREAM_HEAD, advance)
    held_out = choose_held_out(found.digests, settings.validation_fraction, settings.split_seed)
    if held_out is None:
        raise BadRequestError(
            "a stream of one document has none to hold out; set validation, or validation_fraction=0, or "
            "streaming to false"
        )
    return _select_documents(settings, corpus, found, ("validation",), held_out, STREAM_HEAD)


def _select_documents(
    settings: TextSettings,
    corpus: Corpus,
    found: Survey,
    parts: tuple[str, ...],
    held_out: np.ndarray,
    limit: int | None = None,
) -> Selection:
    rule = f"{settings.validation_fraction} of the documents, seed {settings.split_seed}"
    return Selection(corpus, found, parts, rule, lambda pieces: by_document(pieces, held_out), held_out, limit)


def _select_all(corpus: Corpus, found: Survey, part: str) -> Selection:
    return Selection(corpus, found, (part,), "all", lambda pieces: ((part, piece) for piece in pieces))


def training_pieces(settings: TextSettings) -> Iterator[Piece]:
    """The pieces that are trained on."""
    first = next(iter(select(settings)), None)
    if settings.streaming:
        corpus = Corpus(find_sources(settings), settings.column)
        parted = by_document(corpus.pieces(), np.zeros(0, bool) if first is None else first.held_out)
    else:
        assert first is not None
        parted = first.pieces()
    return (piece for part, piece in parted if part == "train")


def choose_held_out(digests: np.ndarray, fraction: float, seed: int) -> np.ndarray | None:
    """True for each document that is held out: at least one, never all; None if all are copies of one."""
    values, inverse, copies = np.unique(seeded(digests, seed), return_inverse=True, return_counts=True)
    if len(values) < 2:
        return None
    wanted = min(max(1, round(fraction * len(digests))), len(digests) - 1)
    chosen = np.zeros(len(values), bool)
    count = 0
    for i, size in enumerate(copies.tolist()):  # in the order of the seeded hashes
        if count + size <= wanted:
            chosen[i] = True
            count += size
            if count == wanted:
                break
    if not count:
        chosen[np.argmin(copies)] = True
    return chosen[inverse]


def by_document(pieces: Iterable[Piece], held_out: np.ndarray) -> Parted:
    """Whole documents to one part or the other."""
    document = 0
    for piece in pieces:
        yield ("validation" if document < len(held_out) and held_out[document] else "train"), piece
        document += piece.last


def by_position(pieces: Iterable[Piece], ends: list[int], exact: bool) -> Parted:
    """Cut the corpus at the bytes `ends`, between two characters unless `exact`. A cut is not the end of a document."""
    bounds, part, position = [*ends, float("inf")], 0, 0
    for piece in pieces:
        while position + len(piece.data) > bounds[part]:
            at = max(int(bounds[part]) - position, 0)
            at = at if exact else character_start(piece.data, at, 1)
            if 0 < at < len(piece.data):
                yield PARTS[part], Piece(piece.data[:at], False, piece.place)
                place = piece.place._replace(offset=piece.place.offset + at)
                piece = Piece(piece.data[at:], piece.last, place)
                position += at
            elif at >= len(piece.data):
                break
            part += 1
        yield PARTS[part], piece
        position += len(piece.data)
