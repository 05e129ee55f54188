"""The cache: found again, keyed by content, noticed when broken, whole after a kill, safe for two at a time."""

import io
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from data_files import LINES, byte_stream, ids_of, prepared, same_blocks, write_documents
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.text import TextData, packing
from tokenformer.data.text import data as data_module
from tokenformer.data.text.documents import Piece, Place
from tokenformer.data.text.encode import Batch, ByteEncoder, encode_all
from tokenformer.data.text.packing import BlockWriter
from tokenformer.data.text.settings import TextSettings
from tokenformer.io import MANIFEST

TEXTS = [line.encode() for line in LINES]


@pytest.fixture
def source(tmp_path):
    write_documents(tmp_path / "corpus", TEXTS)
    return tmp_path / "corpus"


def test_a_second_preparation_finds_the_first(tmp_path, source):
    said = io.StringIO()
    first, second = prepared(tmp_path, source), prepared(tmp_path, source, said)
    assert (first.cached, second.cached) == (False, True)
    assert first.key == second.key
    assert first.stats == second.stats
    assert same_blocks(first.train, second.train)
    assert "found in the cache" in said.getvalue()


def test_the_key_is_the_content_not_the_time_or_the_name(tmp_path, source):
    first = prepared(tmp_path, source)
    for path in source.iterdir():
        os.utime(path, (1, 1))
    source.rename(tmp_path / "moved")
    moved = prepared(tmp_path, tmp_path / "moved")
    assert moved.cached
    changed = tmp_path / "moved" / "0000.txt"
    stamp = changed.stat().st_mtime
    changed.write_bytes(TEXTS[0].replace(b"quick", b"quiet"))
    os.utime(changed, (stamp, stamp))
    assert prepared(tmp_path, tmp_path / "moved").key != first.key


def test_where_documents_end_is_part_of_the_key(tmp_path):
    one = prepared(tmp_path, write_documents(tmp_path / "a", [b"ab" * 20, b"c" * 20]))
    other = prepared(tmp_path, write_documents(tmp_path / "b", [b"ab" * 20 + b"c", b"c" * 19]))
    assert one.key != other.key


@pytest.mark.parametrize(
    "change",
    [{"block_length": 8}, {"validation_fraction": 0.2}, {"split": [0.5, 0.5]}, {"errors": "strict"}, {"split_seed": 1}],
)
def test_every_setting_that_matters_is_part_of_the_key(tmp_path, source, change):
    settings = {"validation_fraction": 0.1}
    assert prepared(tmp_path, source, **settings).key != prepared(tmp_path, source, **{**settings, **change}).key


def test_settings_that_do_not_matter_are_not(tmp_path, source):
    key = prepared(tmp_path, source, validation_fraction=0.1).key
    others = {"workers": 2, "shuffle_buffer": 7, "column": "x", "seed": 3}
    assert prepared(tmp_path, source, validation_fraction=0.1, **others).key == key
    halves = {"split": [0.5, 0.5]}
    assert prepared(tmp_path, source, **halves, split_seed=1).key == prepared(tmp_path, source, **halves).key


def _truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", 64)


def _flip(folder: Path) -> None:
    data = bytearray((folder / "train.bin").read_bytes())
    data[100] ^= 1
    (folder / "train.bin").write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        lambda folder: (folder / "train.bin").unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text('{"files": {'),
        lambda folder: (folder / MANIFEST).write_text("[]"),
    ],
    ids=["truncated", "a bit flipped", "no tokens", "no manifest", "half a manifest", "another manifest"],
)
def test_a_broken_entry_is_noticed_and_made_again(tmp_path, source, damage):
    first = prepared(tmp_path, source)
    ids = [item["input_ids"].clone() for item in (first.train[i] for i in range(len(first.train)))]
    damage(first.folder)
    again = prepared(tmp_path, source)
    assert not again.cached
    assert all((again.train[i]["input_ids"] == ids[i]).all() for i in range(len(ids)))
    assert prepared(tmp_path, source).cached


def test_failed_work_leaves_nothing(tmp_path):
    with pytest.raises(BadRequestError):
        prepared(tmp_path, write_documents(tmp_path / "c", [b"short"]))
    assert [path.name for path in (tmp_path / "cache" / "data").iterdir() if not path.name.endswith(".lock")] == []


# Forked: a fresh interpreter would import everything again, and the work here is small.
forked = multiprocessing.get_context("fork")


def test_what_a_killed_process_left_is_never_taken(tmp_path, source, monkeypatch):
    """A process is stopped for good in the middle of writing; the next one starts over."""
    key = prepared(tmp_path / "other", source).key
    add = BlockWriter.add

    def add_and_die(self, *work):
        add(self, *work)
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(BlockWriter, "add", add_and_die)
        run = forked.Process(target=prepared, args=(tmp_path, source))
        run.start()
        run.join()
    assert run.exitcode == -signal.SIGKILL
    home = tmp_path / "cache" / "data"
    assert (home / f".{key}.partial" / "train.bin").exists()
    assert not (home / key).exists()
    data = prepared(tmp_path, source)
    assert not data.cached
    assert same_blocks(data.train, prepared(tmp_path / "other", source).train)
    assert not (home / f".{key}.partial").exists()


def test_two_processes_at_once_make_it_once(tmp_path, source, monkeypatch):
    add, together, answers = BlockWriter.add, forked.Barrier(2), forked.Queue()

    def slowly(self, *work):
        time.sleep(0.5)
        add(self, *work)

    def work():
        together.wait()
        data = prepared(tmp_path, source)
        answers.put((data.cached, ids_of(data.train).tolist()))

    monkeypatch.setattr(BlockWriter, "add", slowly)
    runs = [forked.Process(target=work) for _ in range(2)]
    for run in runs:
        run.start()
    (found_one, ids_one), (found_other, ids_other) = answers.get(timeout=60), answers.get(timeout=60)
    for run in runs:
        run.join()
    assert {found_one, found_other} == {False, True}
    assert ids_one == ids_other == byte_stream(TEXTS)[: len(ids_one)].tolist()
    assert len(list((tmp_path / "cache" / "data").glob("[!.]*"))) == 1


def test_workers_end_with_a_killed_parent():
    """Workers that wait for work would otherwise wait for ever."""
    answers = forked.SimpleQueue()

    def work():
        batches = (Batch("train", [Piece(b"abc", True, Place())]) for _ in range(100))
        encoding = encode_all(batches, ByteEncoder(), 3)
        next(encoding)
        answers.put([child.pid for child in multiprocessing.active_children()])
        os.kill(os.getpid(), signal.SIGKILL)

    forked.Process(target=work).start()
    pids = answers.get()
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while any(_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_running(pid) for pid in pids)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_the_manifest_says_what_was_made(tmp_path, source):
    data = prepared(tmp_path, source, validation_fraction=0.2)
    facts = json.loads((data.folder / packing.FACTS).read_text())
    assert facts["key"] == data.key == data.folder.name
    assert facts["stats"] == data.stats
    assert facts["settings"]["block_length"] == 16
    files = json.loads((data.folder / MANIFEST).read_text())
    assert set(files) == {"train.bin", "validation.bin", packing.FACTS}


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TOKENFORMER_CACHE", raising=False)
    assert TextSettings().cache_folder == tmp_path / ".cache" / "tokenformer"
    monkeypatch.setenv("TOKENFORMER_CACHE", "/elsewhere")
    assert TextSettings().cache_folder == Path("/elsewhere")
    assert TextSettings(cache="~/here").cache_folder == tmp_path / "here"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequestError, match=r"the cache .*file cannot be written: Not a directory; name another"):
        prepared(tmp_path, source, cache=str(tmp_path / "file"))


def test_sources_that_change_while_they_are_read_are_noticed(tmp_path, source, monkeypatch):
    select = data_module.select

    def and_then_change(*args):
        selections = select(*args)
        (source / "0000.txt").write_bytes(TEXTS[0][::-1])  # as long as it was
        return selections

    monkeypatch.setattr(data_module, "select", and_then_change)
    with pytest.raises(BadFileError, match="the sources changed while they were being read"):
        prepared(tmp_path, source)


def test_a_terminal_gets_bars_with_the_time_left(tmp_path, source):
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=120)
    TextData(TextSettings(train=str(source), block_length=16, cache=str(tmp_path / "cache"))).prepare(console)
    for words in ("reading", "tokenizing", "bytes", "0:00:00"):
        assert words in said.getvalue()
    assert "preparing" not in said.getvalue()


def test_lines_outside_of_a_terminal(tmp_path, source):
    said = io.StringIO()
    prepared(tmp_path, source, said)
    lines = said.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("preparing 60 documents, 0.0 MB, with tokenizer bytes")
    assert "tokens prepared in" in lines[1]
