"""Pieces of text to token ids, in this process or over the cores.

Enters: batches of pieces. Leaves: their ids in the same order, the same whatever the number of workers, with the end
token after each piece that ends a document.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ...errors import BadFileError
from .documents import Corpus, Piece, Place

BATCH_BYTES = 1024 * 1024


class Batch(NamedTuple):
    """Pieces of one part of the corpus, to be encoded together."""

    part: str
    pieces: list[Piece]


class Encoded(NamedTuple):
    """Their ids, and how often broken UTF-8 was replaced in them."""

    ids: np.ndarray
    replaced: int


class NotUtf8Error(Exception):
    """Broken UTF-8 where none is allowed: the place of the piece and the byte in the document."""

    def __init__(self, place: Place, offset: int):
        super().__init__(place, offset)
        self.place, self.offset = place, offset


@contextmanager
def naming_bad_text(corpus: Corpus) -> Iterator[None]:
    """Turn broken UTF-8 into one line that names the file and the byte."""
    try:
        yield
    except NotUtf8Error as error:
        raise BadFileError(
            f"{corpus.where(error.place)} is not UTF-8 at byte {error.offset} (errors=replace would go on)"
        ) from error


class Encoder(Protocol):
    """What turns pieces into ids."""

    vocab_size: int
    eos_token_id: int
    fingerprint: str

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """The ids of the pieces, one after the other."""


class ByteEncoder:
    """What the `bytes` tokenizer computes, by numpy: a hundred times faster, and on any bytes."""

    vocab_size, eos_token_id, fingerprint = 257, 256, "bytes"

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """A byte is its own id; a zero byte is put where an end token comes."""
        joined = b"".join(part for piece in pieces for part in (piece.data, b"\0" * piece.last))
        ids = np.frombuffer(joined, np.uint8).astype(np.uint16)
        ends = np.cumsum([len(piece.data) + piece.last for piece in pieces]) - 1
        ids[ends[[piece.last for piece in pieces]]] = self.eos_token_id
        return Encoded(ids, 0)


class TokenizerEncoder:
    """A real tokenizer. Text that spells one of its special tokens stays text, so only documents' ends are ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, strict: bool):
        # A copy: limits and padding that the file asks for have no place in a corpus.
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.strict = strict
        self.eos_token_id = tokenizer.eos_token_id
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.fingerprint = hashlib.blake2b(self.tokenizer.to_str().encode(), digest_size=16).hexdigest()

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """Tokenize each piece by itself."""
        texts, replaced = [], 0
        for piece in pieces:
            text, count = self._decode(piece)
            texts.append(text)
            replaced += count
        with _one_thread():
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids: list[int] = []
        for piece, encoding in zip(pieces, encodings, strict=True):
            ids += encoding.ids
            if piece.last:
                ids.append(self.eos_token_id)
        return Encoded(narrow(np.array(ids, np.uint32), self.vocab_size), replaced)

    def _decode(self, piece: Piece) -> tuple[str, int]:
        try:
            return piece.data.decode(), 0
        except UnicodeDecodeError as error:
            if self.strict:
                raise NotUtf8Error(piece.place, piece.place.offset + error.start) from None
        text = piece.data.decode("utf-8", "replace")
        return text, text.count("\ufffd") - piece.data.count("\ufffd".encode())


def make_encoder(tokenizer: PreTrainedTokenizerFast, name: str, strict: bool) -> Encoder:
    """The encoder for a tokenizer that was loaded by that name."""
    return ByteEncoder() if name == "bytes" else TokenizerEncoder(tokenizer, strict)


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type on disk that holds every id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def narrow(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids in the type they are stored in; every one must be in the vocabulary, and so fit."""
    if len(ids) and ids.max() >= vocab_size:
        raise BadFileError(f"the tokenizer gave the id {ids.max()}, and its vocabulary ends at {vocab_size - 1}")
    return ids.astype(token_type(vocab_size))


def batches(parted: Iterable[tuple[str, Piece]]) -> Iterator[Batch]:
    """Pieces gathered to about 1 MiB a batch, each part by itself and in its order."""
    waiting: dict[str, list[Piece]] = {}
    sizes: dict[str, int] = {}
    for part, piece in parted:
        waiting.setdefault(part, []).append(piece)
        sizes[part] = sizes.get(part, 0) + len(piece.data)
        if sizes[part] >= BATCH_BYTES:
            yield Batch(part, waiting.pop(part))
            sizes[part] = 0
    yield from (Batch(part, pieces) for part, pieces in waiting.items())


def encode_all(work: Iterable[Batch], encoder: Encoder, workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Encode batches, in order. With several workers a few batches a worker are under way at a time."""
    if workers == 1:
        yield from ((batch, encoder(batch.pieces)) for batch in work)
        return
    # Forked where there is forking: workers start at once, and the caller's script need not guard its main.
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(start)
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_work, initargs=(encoder,))
    try:
        for batch in work:
            with _one_thread():  # the first batch starts the workers
                under_way.append((batch, pool.submit(_work, batch.pieces)))
            if len(under_way) >= 4 * workers:
                yield _finished(under_way)
        while under_way:
            yield _finished(under_way)
    except BrokenProcessPool as error:
        raise RuntimeError("a worker was killed, perhaps for want of memory; try fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(under_way: deque[tuple[Batch, "Future[Encoded]"]]) -> tuple[Batch, Encoded]:
    batch, future = under_way.popleft()
    return batch, future.result()


_encoder: Encoder = ByteEncoder()


def _begin_work(encoder: Encoder) -> None:
    """In a worker: keep the encoder, leave Ctrl-C to the parent, and end when the parent has ended, however it did."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(pieces: list[Piece]) -> Encoded:
    return _encoder(pieces)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep the tokenizers library from threads of its own: the cores are shared out here, and it warns of forks."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
