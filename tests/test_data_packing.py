"""Packing: blocks are the documents joined by the end token, cut every block_length tokens, and nothing else."""

import pickle
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import LINES, byte_stream, ids_of, prepared, same_blocks, write_documents, write_jsonl
from tokenformer import BadFileError
from tokenformer.data.text import TextSettings, documents, encode, load_tokenizer, train_tokenizer
from tokenformer.data.text.documents import Corpus, Piece, Place
from tokenformer.data.text.sources import TextFile

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The folder of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("bpe")
    write_documents(folder / "corpus", ["".join(LINES).encode()])
    config = TextSettings(train=str(folder / "corpus"), validation_fraction=0.0)
    train_tokenizer(config, 320).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


@given(
    documents=st.lists(st.binary(max_size=80).map(lambda b: b.replace(b"\0", b" ")), min_size=1),
    length=st.integers(2, 40),
)
def test_blocks_and_the_tail_are_the_stream_of_bytes(documents, length):
    stream = byte_stream(documents)
    if len(stream) < length:
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = write_documents(Path(folder), documents)
        data = prepared(Path(folder), paths, block_length=length)
        ids = ids_of(data.train)
    assert np.array_equal(ids, stream[: len(ids)])
    assert len(stream) - len(ids) == data.stats["dropped"] < length
    assert data.stats["tokens"] == len(stream)
    assert data.stats["empty"] == documents.count(b"")


@settings(max_examples=12)
@given(documents=st.lists(texts, min_size=4, max_size=30), length=st.integers(2, 8), workers=st.sampled_from([1, 2, 3]))
def test_blocks_and_the_tail_are_the_stream_of_a_tokenizer(bpe, documents, length, workers):
    tokenizer = load_tokenizer(bpe)
    stream = [i for text in documents for i in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(encode, "BATCH_BYTES", 100):
        source = write_jsonl(Path(folder, "a.jsonl"), documents)
        data = prepared(Path(folder), source, block_length=length, tokenizer=str(bpe), workers=workers)
        ids = ids_of(data.train).tolist()
    assert ids == stream[: len(ids)]
    assert len(stream) - len(ids) == data.stats["dropped"] < length


def test_the_number_of_workers_changes_nothing(tmp_path, bpe):
    source = write_jsonl(tmp_path / "a.jsonl", LINES * 20)
    with mock.patch.object(encode, "BATCH_BYTES", 1000), mock.patch.object(documents, "PIECE_BYTES", 300):
        runs = [
            prepared(
                tmp_path / str(workers),
                source,
                workers=workers,
                tokenizer=str(bpe),
                validation_fraction=0.2,
                split=None,
            )
            for workers in (1, 2, 3)
        ]
    assert runs[0].key == runs[1].key == runs[2].key
    for run in runs[1:]:
        assert same_blocks(run.train, runs[0].train)
        assert same_blocks(run.validation, runs[0].validation)
        assert run.stats == runs[0].stats


def test_a_document_longer_than_any_block_spans_blocks(tmp_path):
    data = prepared(tmp_path, write_documents(tmp_path / "c", [b"a" * 50, b"b" * 5]))
    assert len(data.train) == 57 // 16
    assert data.train[2]["input_ids"].tolist() == [97] * 16


def test_items_are_long_tensors(tmp_path):
    data = prepared(tmp_path, write_documents(tmp_path / "c", [line.encode() for line in LINES]))
    item = data.train[0]
    assert set(item) == {"input_ids", "labels"}
    assert item["input_ids"].dtype == item["labels"].dtype == torch.long
    assert item["input_ids"].shape == item["labels"].shape == (16,)
    assert torch.equal(item["input_ids"], item["labels"])
    with pytest.raises(IndexError):
        data.train[len(data.train)]
    batch = next(iter(torch.utils.data.DataLoader(data.train, batch_size=4)))
    assert batch["input_ids"].shape == (4, 16)


def test_a_pickled_dataset_maps_the_file_again(tmp_path):
    data = prepared(tmp_path, write_documents(tmp_path / "c", [b"x" * 100_000]))
    packed = pickle.dumps(data.train)
    assert len(packed) < 1000
    assert same_blocks(pickle.loads(packed), data.train)


def test_reading_a_block_is_cheap(tmp_path):
    """A step of the smallest model takes tens of milliseconds; 2 % of that is far more than this."""
    data = prepared(tmp_path, write_documents(tmp_path / "c", [b"x" * 300_000]), block_length=256)
    began = time.perf_counter()
    for i in range(1000):
        data.train[i]
    assert (time.perf_counter() - began) / 1000 < 2e-4


def test_ids_are_stored_in_the_smallest_type_that_fits():
    assert encode.token_type(257) is np.uint16
    assert encode.token_type(2**16) is np.uint16
    assert encode.token_type(2**16 + 1) is np.uint32


def test_an_id_that_does_not_fit_is_refused():
    assert encode.narrow(np.array([0, 65535], np.uint32), 2**16).dtype == np.uint16
    with pytest.raises(BadFileError, match="gave the id 65536, and its vocabulary ends at 65535"):
        encode.narrow(np.array([0, 65536], np.uint32), 2**16)


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 70_000, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    data = prepared(
        tmp_path, write_documents(tmp_path / "c", [b"a b c"]), tokenizer=str(tmp_path / "words.json"), block_length=4
    )
    assert data.vocab_size == 70_001
    assert data.train[0]["input_ids"].tolist() == [1, 70_000, 2, 0]


@given(text=st.text("ab \n\u00e9\U0001f600", max_size=200), size=st.integers(4, 30))
def test_pieces_are_the_document_and_can_be_read_from_any_of_them(text, size):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(documents, "PIECE_BYTES", size):
        path = Path(folder, "a.txt")
        path.write_text("x" + text, newline="")
        corpus = Corpus([TextFile(str(path))], "text")
        pieces = list(corpus.pieces())
        assert b"".join(piece.data for piece in pieces) == path.read_bytes()
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for i, piece in enumerate(pieces):
            assert 0 < len(piece.data) <= size
            piece.data.decode()  # no character is cut in two
            assert list(corpus.pieces(piece.place)) == pieces[i:]
        assert list(corpus.pieces(pieces[-1].next_place)) == []


def test_long_documents_are_cut_where_tokenizers_divide_text(tmp_path, bpe):
    text = "".join(LINES * 40)
    tokenizer = load_tokenizer(bpe)
    with mock.patch.object(documents, "PIECE_BYTES", 1000):
        data = prepared(tmp_path, write_documents(tmp_path / "c", [text.encode()]), tokenizer=str(bpe), block_length=8)
    ids = ids_of(data.train).tolist()
    assert ids == [*tokenizer(text).input_ids, tokenizer.eos_token_id][: len(ids)]


def test_cuts_prefer_lines_then_spaces_then_characters():
    size = documents.PIECE_BYTES
    assert documents._cut_at(b"a\n" * (size // 2) + b"a") == size
    assert documents._cut_at(b"a\nb" + b"\n  c" * size) % 4 == 2
    assert documents._cut_at(b"aaaa b" + b"c" * size) == 4
    assert documents._cut_at("aé".encode() * size) in (size, size - 1)


def test_bytes_of_numpy_are_those_of_the_byte_tokenizer():
    pieces = [Piece(b"ab", True, Place()), Piece(b"\xff\x00c", False, Place()), Piece(b"d", True, Place())]
    assert encode.ByteEncoder()(pieces).ids.tolist() == [97, 98, 256, 255, 0, 99, 100, 256]
    assert encode.ByteEncoder()(pieces[1:2]).ids.tolist() == [255, 0, 99]
