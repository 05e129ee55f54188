"""Held-out text: by document and seeded, by position where it must be, or from its own sources."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_files import LINES, byte_stream, ids_of, prepared, same_blocks, write_documents, write_jsonl
from tokenformer.data.text.documents import Piece, Place
from tokenformer.data.text.split import PARTS, by_position, choose_held_out


def documents_of(blocks) -> set[bytes]:
    """The whole documents in a run of blocks."""
    stream = "".join(chr(i) for i in ids_of(blocks))
    return {part.encode("latin-1") for part in stream.split(chr(256))[:-1]}


def test_documents_are_held_out_whole_and_by_seed(tmp_path):
    texts = [line.encode() for line in LINES]
    source = write_jsonl(tmp_path / "a.jsonl", LINES)
    runs = [prepared(tmp_path, source, validation_fraction=0.2, split_seed=seed, block_length=2) for seed in (0, 1, 0)]
    held_out = [documents_of(run.validation) for run in runs]
    assert [run.stats["parts"]["validation"]["documents"] for run in runs] == [12, 12, 12]
    assert held_out[0] == held_out[2] != held_out[1]
    for run, left_out in zip(runs, held_out, strict=True):
        assert left_out <= set(texts)
        trained_on = documents_of(run.train)
        assert not trained_on & left_out
        assert len(trained_on | left_out) >= len(texts) - 2  # the last of each part may lie in a dropped tail


def test_none_are_held_out_if_none_are_asked_for(tmp_path):
    data = prepared(tmp_path, write_documents(tmp_path / "c", [b"one" * 10, b"two" * 10]), validation_fraction=0.0)
    assert data.validation is None
    assert data.test is None


def test_one_document_is_split_by_position(tmp_path):
    text = "".join(LINES).encode()
    for name, documents in (("one", [text]), ("copies", [text[:300]] * 3)):
        data = prepared(tmp_path, write_documents(tmp_path / name, documents), validation_fraction=0.1, block_length=2)
        whole = b"".join(documents)
        assert data.stats["parts"]["train"]["bytes"] == round(len(whole) * 0.9)
        stream = byte_stream(documents)
        assert ids_of(data.train).tolist() == stream[: len(data.train) * 2].tolist()
        validation = ids_of(data.validation)
        begin = data.stats["parts"]["train"]["tokens"]
        assert validation.tolist() == stream[begin : begin + len(validation)].tolist()


def test_the_split_of_enwik8_is_in_order_and_exact(tmp_path):
    text = bytes(range(1, 201)) * 5  # 1,000 bytes, most of them in no valid character
    (tmp_path / "a").write_bytes(text)
    data = prepared(tmp_path, tmp_path / "a", split=[0.9, 0.05, 0.05], block_length=2)
    assert bytes(ids_of(data.train).tolist()) == text[:900]
    assert bytes(ids_of(data.validation).tolist()) == text[900:950]
    assert ids_of(data.test).tolist() == list(text[950:])
    assert data.stats["parts"]["test"]["tokens"] == 51  # the document ends here, and only here


@given(
    documents=st.lists(st.text("aé😀", min_size=1, max_size=8), min_size=1, max_size=8),
    shares=st.lists(st.integers(0, 100), min_size=1, max_size=2),
    exact=st.booleans(),
)
def test_cuts_by_position_lose_nothing_and_no_character(documents, shares, exact):
    pieces = [Piece(text.encode(), True, Place(0, row)) for row, text in enumerate(documents)]
    whole = b"".join(piece.data for piece in pieces)
    ends = sorted(len(whole) * share // 100 for share in shares)
    parted = list(by_position(pieces, ends, exact))
    assert b"".join(piece.data for _, piece in parted) == whole
    assert sum(piece.last for _, piece in parted) == len(documents)
    assert [PARTS.index(part) for part, _ in parted] == sorted(PARTS.index(part) for part, _ in parted)
    position = 0
    for end, part in zip(ends, PARTS, strict=False):
        position += sum(len(piece.data) for name, piece in parted if name == part)
        assert position == end if exact else end <= position <= end + 3
    if not exact:
        for _, piece in parted:
            piece.data.decode()


def test_validation_sources_are_all_that_is_held_out(tmp_path):
    train, held_out = write_documents(tmp_path / "c", [b"train" * 10, b"held out" * 10])
    data = prepared(tmp_path, train, validation=str(held_out), validation_fraction=0.5)
    assert data.stats["parts"]["train"]["documents"] == 1
    assert set(ids_of(data.train)) == set(b"train")
    assert set(ids_of(data.validation)) == set(b"held out")
    alone = prepared(tmp_path, train)
    assert same_blocks(alone.train, data.train)
    assert alone.key != data.key


@given(
    digests=st.lists(st.integers(0, 20), min_size=2, max_size=60),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_copies_stay_together_and_the_share_is_kept(digests, fraction, seed):
    held_out = choose_held_out(np.array(digests, np.uint64), fraction, seed)
    if len(set(digests)) == 1:
        assert held_out is None
        return
    assert 0 < held_out.sum() < len(digests)
    sides = [{bool(held_out[i]) for i, digest in enumerate(digests) if digest == value} for value in set(digests)]
    assert all(len(side) == 1 for side in sides)
    smallest = min(digests.count(value) for value in set(digests))
    assert held_out.sum() <= max(round(fraction * len(digests)), smallest, 1)


def test_distinct_documents_are_held_out_in_the_number_asked_for():
    digests = np.random.default_rng(0).integers(2**63, size=1000).astype(np.uint64)
    for fraction in (0.0001, 0.01, 0.5, 0.9999):
        assert choose_held_out(digests, fraction, 0).sum() == min(max(1, round(1000 * fraction)), 999)


def test_a_corpus_that_grows_keeps_most_of_its_choice():
    digests = np.random.default_rng(0).integers(2**63, size=1000).astype(np.uint64)
    before, after = choose_held_out(digests[:900], 0.1, 7), choose_held_out(digests, 0.1, 7)
    assert (before & after[:900]).sum() >= 0.8 * before.sum()


def test_bytes_per_token_is_of_the_validation_text(tmp_path):
    train, held_out = write_documents(tmp_path / "c", [b"x" * 100, b"y" * 19])
    data = prepared(tmp_path, train, validation=str(held_out))
    assert data.bytes_per_token == pytest.approx(19 / 20)
    assert prepared(tmp_path, train).bytes_per_token == pytest.approx(100 / 101)
