"""A corpus as a run of pieces: documents one after the other, long ones cut into pieces of at most 256 KiB.

Enters: sources. Leaves: pieces, each with its place in the corpus, from which reading can begin again; and a survey of
them: how many, how large, and a hash of the content. Pieces keep memory small whatever the size of a file, let cores
share a long document, and are cut where tokenizers divide text anyway: at the end of a line before an unindented one.
"""

import hashlib
import io
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from ...errors import BadFileError, BadRequestError
from ..sources import opened
from .sources import Source, TextFile

PIECE_BYTES = 256 * 1024
SNIFFED_BYTES = 8192
# The last line end that stands between two other characters than space; greedy, so the last one is found first.
_LINE_END = re.compile(rb".*\S\n(?=\S)", re.DOTALL)


class Place(NamedTuple):
    """Where a piece begins: which source, which row in it, which byte of the row's text."""

    source: int = 0
    row: int = 0
    offset: int = 0


START = Place()


class Piece(NamedTuple):
    """A document or a part of one; `last` if the document ends with it."""

    data: bytes
    last: bool
    place: Place

    @property
    def next_place(self) -> Place:
        """Where the piece after this one begins."""
        if self.last:
            return Place(self.place.source, self.place.row + 1)
        return self.place._replace(offset=self.place.offset + len(self.data))


class Corpus:
    """The documents of some sources. `counts` has what was passed over: empty, null, binary."""

    def __init__(self, sources: list[Source], column: str):
        self.sources = sources
        self.column = column
        self.counts: Counter[str] = Counter()

    def pieces(self, start: Place = START) -> Iterator[Piece]:
        """All pieces from `start` on. The counts begin anew."""
        self.counts.clear()
        for index in range(start.source, len(self.sources)):
            source = self.sources[index]
            begin = start if index == start.source else Place(index)
            if isinstance(source, TextFile):
                yield from self._text_pieces(source, begin)
            else:
                yield from self._row_pieces(source, begin)

    def where(self, place: Place) -> str:
        """How a message names the document at a place."""
        return self.sources[place.source].where(place.row)

    def _text_pieces(self, source: TextFile, begin: Place) -> Iterator[Piece]:
        if begin.row > 0:  # a text file has one document, and it has been read
            return
        with opened(source.name) as file:
            if begin.offset == 0:
                head = file.read(SNIFFED_BYTES)
                if not head:
                    self.counts["empty"] += 1
                    return
                if b"\0" in head:
                    if not source.found:
                        raise BadFileError(f"{source.name} is a binary file, not text (there is a zero byte in it)")
                    self.counts["binary"] += 1
                    return
            file.seek(begin.offset)
            yield from _cut(file, begin)

    def _row_pieces(self, source: Source, begin: Place) -> Iterator[Piece]:
        assert not isinstance(source, TextFile)
        any_row = begin.row > 0
        for row, data in source.rows(self.column, begin.row):
            any_row = True
            if data is None:
                self.counts["null"] += 1
            elif not data:
                self.counts["empty"] += 1
            else:
                place = Place(begin.source, row, begin.offset if row == begin.row else 0)
                yield from _cut(io.BytesIO(data[place.offset :]), place)
        if not any_row:
            self.counts["empty"] += 1


def _cut(file: BinaryIO, place: Place) -> Iterator[Piece]:
    """A document from `place` on, in pieces. Where a piece ends depends only on where it begins."""
    held = b""
    while True:
        held += file.read(PIECE_BYTES + 1 - len(held))  # one byte more than a piece tells whether there is more
        end = len(held) if len(held) <= PIECE_BYTES else _cut_at(held)
        piece = Piece(held[:end], end == len(held), place)
        yield piece
        if piece.last:
            return
        held, place = held[end:], piece.next_place


def _cut_at(held: bytes) -> int:
    """Where to cut: at the end of a line, else before a space, else between two characters."""
    if line_end := _LINE_END.match(held):
        return line_end.end()
    if (end := held.rfind(b"\n", 0, PIECE_BYTES) + 1) > 0 or (end := held.rfind(b" ")) > 0:
        return end
    return character_start(held, PIECE_BYTES, -1)


def character_start(data: bytes, position: int, direction: int) -> int:
    """The nearest position before (-1) or after (1) this one at which no UTF-8 character is cut in two."""
    for _ in range(3):
        if not 0 < position < len(data) or data[position] & 0xC0 != 0x80:
            break
        position += direction
    return position


class Hashing:
    """Pieces on their way to somebody else, counted and hashed as they pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self.digests = array("Q")  # 64 bits of each document's hash
        self._whole = hashlib.blake2b(digest_size=16)

    @property
    def content(self) -> str:
        """What stands for all documents that have passed, and for where each ends."""
        return self._whole.hexdigest()

    def passing(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The same pieces."""
        document = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            document.update(piece.data)
            self.bytes += len(piece.data)
            if piece.last:
                digest = document.digest()
                self._whole.update(digest)
                self.digests.append(int.from_bytes(digest[:8], "little"))
                document = hashlib.blake2b(digest_size=16)
            yield piece


@dataclass(frozen=True)
class Survey:
    """A corpus, counted. `digests` has a hash of each document's content, 64 bits; `content` stands for it all."""

    documents: int
    bytes: int
    digests: np.ndarray
    content: str
    counts: dict[str, int]


def ignore(_count: int) -> None:
    """Progress that nobody watches."""


def survey(corpus: Corpus, limit: int | None = None, advance: Callable[[int], None] = ignore) -> Survey:
    """Read the corpus, or its first `limit` documents, and count and hash. `advance` is told of bytes read."""
    hashing, reported = Hashing(), 0
    for _ in hashing.passing(first_documents(corpus.pieces(), limit)):
        if hashing.bytes - reported >= PIECE_BYTES:  # not for every short row
            advance(hashing.bytes - reported)
            reported = hashing.bytes
    if not hashing.digests:
        raise BadRequestError(f"there is no text in the sources: {describe(corpus.counts)}")
    digests = np.frombuffer(hashing.digests, np.uint64)
    return Survey(len(digests), hashing.bytes, digests, hashing.content, dict(corpus.counts))


def first_documents(pieces: Iterable[Piece], limit: int | None) -> Iterator[Piece]:
    """The pieces of the first `limit` documents; all if None."""
    seen = 0
    for piece in pieces:
        yield piece
        seen += piece.last
        if seen == limit:
            return


def describe(counts: Counter[str] | dict[str, int]) -> str:
    """What was passed over, in words."""
    names = {"empty": "empty", "null": "without text", "binary": "binary"}
    return ", ".join(f"{counts[key]:,} {name}" for key, name in names.items() if counts.get(key)) or "nothing in them"
