"""Streams: the same blocks as prepared data, shuffled by seed, resumable after every block, shared by shards."""

import io
from itertools import islice
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from data_files import LINES, byte_stream, ids_of, prepared, write_documents, write_jsonl
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.text import documents, split, train_tokenizer
from tokenformer.data.text.settings import TextSettings


@pytest.fixture
def source(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [*LINES[:20], None, "", *LINES[20:40]])
    write_documents(tmp_path / "texts", ["".join(LINES[40:]).encode(), b"", b"the end"])
    return [tmp_path / "a.jsonl", tmp_path / "texts"]


def stream(tmp_path, source, **settings):
    return prepared(tmp_path, source, streaming=True, **{"shuffle_buffer": 5, **settings}).train


def blocks(dataset):
    return [tuple(item["input_ids"].tolist()) for item in dataset]


def test_without_shuffling_a_stream_is_the_prepared_data(tmp_path, source):
    with mock.patch.object(documents, "PIECE_BYTES", 200):
        ids = [i for block in blocks(stream(tmp_path, source, shuffle_buffer=0)) for i in block]
        assert ids == ids_of(prepared(tmp_path, source).train).tolist()


def test_shuffling_keeps_every_block_and_depends_on_seed_and_epoch(tmp_path, source):
    in_order = blocks(stream(tmp_path, source, shuffle_buffer=0))
    shuffled = stream(tmp_path, source)
    first, second = blocks(shuffled), blocks(shuffled)
    assert first == second != in_order
    assert sorted(first) == sorted(in_order)
    assert blocks(stream(tmp_path, source, seed=1)) != first
    shuffled.set_epoch(1)
    third = blocks(shuffled)
    assert third != first
    assert sorted(third) == sorted(in_order)


@pytest.mark.parametrize("buffer", [0, 5, 1000])
def test_a_stream_resumes_exactly_after_every_block(tmp_path, source, buffer):
    """Through a file, as a checkpoint does it, and with small pieces, so that places within documents are met."""
    with mock.patch.object(documents, "PIECE_BYTES", 150):
        whole = blocks(stream(tmp_path, source, shuffle_buffer=buffer))
        running = stream(tmp_path, source, shuffle_buffer=buffer)
        states = [running.state_dict()]
        states += [running.state_dict() for _ in running]
        assert len(states) == len(whole) + 1
        for done, state in enumerate(states):
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            resumed = stream(tmp_path, source, shuffle_buffer=buffer)
            resumed.load_state_dict(torch.load(file, weights_only=True))
            assert blocks(islice(resumed, 10)) == whole[done : done + 10]
            if done % 20 == 0:
                resumed.load_state_dict(state)
                assert blocks(resumed) == whole[done:]
                assert blocks(resumed) == whole  # the next epoch is whole again


def test_resuming_is_exact_with_a_tokenizer_and_held_out_documents(tmp_path, source):
    train_tokenizer(TextSettings(train=str(source[0])), 300).save_pretrained(tmp_path / "bpe")
    settings = {"tokenizer": str(tmp_path / "bpe"), "validation_fraction": 0.1, "block_length": 8}
    whole = blocks(stream(tmp_path, source, **settings))
    running = stream(tmp_path, source, **settings)
    iterator = iter(running)
    for done in range(1, len(whole)):
        next(iterator)
        resumed = stream(tmp_path, source, **settings)
        resumed.load_state_dict(running.state_dict())
        assert blocks(resumed) == whole[done:]


def test_the_epoch_of_a_loaded_state_is_kept(tmp_path, source):
    running = stream(tmp_path, source)
    running.set_epoch(3)
    iterator = iter(running)
    next(iterator)
    expected = [tuple(item["input_ids"].tolist()) for item in iterator]
    running = stream(tmp_path, source)
    running.set_epoch(3)
    next(iter(running))
    resumed = stream(tmp_path, source)
    resumed.load_state_dict(running.state_dict())
    resumed.set_epoch(3)  # as a trainer does before each epoch
    assert blocks(resumed) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_blocks_in_turns(tmp_path, source, world_size):
    whole = blocks(stream(tmp_path, source))
    shares = [blocks(stream(tmp_path, source).for_rank(rank, world_size)) for rank in range(world_size)]
    rounds = len(whole) // world_size
    for rank, share in enumerate(shares):
        assert share == whole[rank : rounds * world_size : world_size]


def test_workers_share_the_blocks_too(tmp_path, source):
    whole = blocks(stream(tmp_path, source))
    for workers in (0, 2):
        loader = DataLoader(stream(tmp_path, source), batch_size=None, num_workers=workers)
        assert blocks(loader) == whole[: len(whole) // 2 * 2] if workers else blocks(loader) == whole
    shares = [
        blocks(DataLoader(stream(tmp_path, source).for_rank(rank, 2), batch_size=None, num_workers=2))
        for rank in range(2)
    ]
    rounds = whole[: len(whole) // 4 * 4]
    assert [block for i, block in enumerate(rounds) if i % 4 < 2] == shares[0]
    assert [block for i, block in enumerate(rounds) if i % 4 >= 2] == shares[1]


def test_a_state_of_two_ranks_goes_on_with_one(tmp_path, source):
    whole = blocks(stream(tmp_path, source))
    running = stream(tmp_path, source).for_rank(1, 2)
    iterator = iter(running)
    for _ in range(3):
        next(iterator)
    resumed = stream(tmp_path, source)
    resumed.load_state_dict(running.state_dict())
    assert blocks(resumed) == whole[6:]


def test_documents_are_held_out_of_a_stream(tmp_path, source):
    with mock.patch.object(split, "STREAM_HEAD", 10):
        data = prepared(tmp_path, source, streaming=True, validation_fraction=0.2, shuffle_buffer=0, block_length=4)
        held_out = bytes(i for i in ids_of(data.validation).tolist() if i < 256)
        texts = [text.encode() for text in LINES[:10]]
        assert sum(text in held_out for text in texts) >= 1
        ids = [i for block in blocks(data.train) for i in block]
        trained_on = "".join(map(chr, ids)).split(chr(256))
        assert not any(text in held_out for text in (t.encode("latin-1") for t in trained_on if len(t) > 20))
        assert data.stats["parts"]["validation"]["documents"] == 2
        assert len(ids) + data.stats["bytes"] >= len("".join(LINES[:40])) - 8


def test_a_stream_takes_validation_sources(tmp_path, source):
    held_out = write_documents(tmp_path / "v", [b"held out" * 4])
    data = prepared(tmp_path, source, streaming=True, validation=[str(held_out[0])])
    assert set(ids_of(data.validation)) <= {*b"held out", 256}
    assert data.bytes_per_token == pytest.approx(32 / 33)
    alone = prepared(tmp_path, source, streaming=True)
    assert alone.validation is None
    assert alone.bytes_per_token is None
    assert alone.key != prepared(tmp_path, source[:1], streaming=True).key


def test_a_tokenizer_for_a_stream_does_not_see_what_is_held_out(tmp_path):
    texts = [letter * 30 for letter in "abcdefghij"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for streaming in (False, True):
        config = TextSettings(train=str(source), streaming=streaming, validation_fraction=0.2)
        vocabulary = train_tokenizer(config, 400).get_vocab()
        assert sum(letter * 8 in vocabulary for letter in "abcdefghij") == 8


def test_parquet_resumes_within_a_row_group(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"text": LINES})
    table.to_parquet(tmp_path / "a.parquet", batch_size=7)
    table.to_csv(tmp_path / "a.csv", index=False)
    table.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "a.csv", "saved"):
        whole = blocks(stream(tmp_path, tmp_path / name, shuffle_buffer=0))
        running = stream(tmp_path, tmp_path / name, shuffle_buffer=0)
        iterator = iter(running)
        for done in range(1, len(whole), 9):
            for _ in range(1 if done == 1 else 9):
                next(iterator)
            resumed = stream(tmp_path, tmp_path / name, shuffle_buffer=0)
            resumed.load_state_dict(running.state_dict())
            assert blocks(resumed) == whole[done:]


def test_requests_that_a_stream_cannot_meet(tmp_path, source):
    with pytest.raises(BadRequestError, match="split cuts by position, and the length of a stream is not known"):
        stream(tmp_path, source, split=[0.9, 0.1])
    one = write_documents(tmp_path / "one", [b"x" * 100])
    with pytest.raises(BadRequestError, match="a stream of one document has none to hold out"):
        stream(tmp_path, one, validation_fraction=0.1)
    with pytest.raises(BadRequestError, match="rank 2 of 2"):
        stream(tmp_path, source).for_rank(2, 2)
    state = stream(tmp_path, source).state_dict()
    with pytest.raises(BadRequestError, match="the state is of a stream with"):
        stream(tmp_path, source, block_length=8).load_state_dict(state)


def test_bad_text_in_a_stream_is_named(tmp_path):
    train_tokenizer(TextSettings(train=str(write_documents(tmp_path / "c", [b"abc abd"])[0])), 257).save_pretrained(
        tmp_path / "bpe"
    )
    bad = write_documents(tmp_path / "bad", [b"abc" * 20 + b"\xff"])[0]
    with pytest.raises(BadFileError, match=r"0000\.txt is not UTF-8 at byte 60"):
        blocks(stream(tmp_path, bad, tokenizer=str(tmp_path / "bpe"), errors="strict"))
    assert len(blocks(stream(tmp_path, bad, tokenizer=str(tmp_path / "bpe"), shuffle_buffer=0))) == (63 + 1) // 16


def test_a_stream_of_bytes_is_the_bytes(tmp_path):
    texts = [line.encode() for line in LINES]
    ids = [
        i for block in blocks(stream(tmp_path, write_documents(tmp_path / "c", texts), shuffle_buffer=0)) for i in block
    ]
    assert ids == byte_stream(texts)[: len(ids)].tolist()
