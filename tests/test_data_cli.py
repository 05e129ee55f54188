"""tokenformer prepare: what it prints, what it leaves, and that training finds it."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from command import ended, run
from data_files import LINES, write_documents, write_jsonl
from tokenformer.data.text import TextData, TextSettings


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENFORMER_CACHE", str(tmp_path / "cache"))
    write_documents(tmp_path / "corpus", [line.encode() for line in LINES])
    return tmp_path / "corpus"


def test_text_is_prepared_and_found_again(tmp_path, source):
    (source / "empty.txt").write_text("")
    arguments = ("prepare", source, "--block-length", 32, "--validation-fraction", 0.1)
    first = run(*arguments)
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith("Prepared\n")
    for words in ("60, 0.0 MB", "bytes: 257 entries", "blocks of 32", "tokens dropped", "1 empty", str(tmp_path)):
        assert words in first.stdout
    tokens = sum(len(line.encode()) + 1 for line in LINES)
    assert [line.split()[0] for line in first.stderr.splitlines()] == ["preparing", f"{tokens:,}"]
    again = run(*arguments)
    assert again.stdout.replace("Found", "Prepared") == first.stdout
    assert TextData(TextSettings(train=[str(source)], block_length=32, validation_fraction=0.1)).prepare().cached


def test_a_tokenizer_is_trained_saved_and_used(tmp_path, source):
    arguments = ("--train-tokenizer", 300, "--tokenizer-out", tmp_path / "tok", "--validation-fraction", 0.1)
    result = run("prepare", source, *arguments, "--block-length", 16, "--workers", 2)
    assert result.exit_code == 0, result.stderr
    assert "300 entries" in result.stdout
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tok")) == 300
    ended(run("prepare", source, *arguments), 2, "tok exists already")


def test_every_option_reaches_the_configuration(tmp_path, source):
    rows = write_jsonl(tmp_path / "a.jsonl", LINES, column="body")
    options = (
        "--column",
        "body",
        "--split-seed",
        3,
        "--errors",
        "strict",
        "--cache",
        tmp_path / "other",
        "--block-length",
        8,
    )
    result = run("prepare", rows, *options, "--split", "0.8,0.1,0.1", "--eos-token", "<|endoftext|>", "--workers", 1)
    assert result.exit_code == 0, result.stderr
    assert all(part in result.stdout for part in ("train ", "validation ", "test ", str(tmp_path / "other")))
    result = run("prepare", source, "--validation", rows, "--column", "body", "--cache", tmp_path / "other")
    assert result.exit_code == 0, result.stderr
    ended(run("prepare", "owner/name", "--hub-config", "c", "--hub-split", "s"), 2, "config 'c', split 's'")


def test_mistakes_are_one_line(tmp_path, source):
    ended(run("prepare"), 2, "SOURCE")
    ended(run("prepare", tmp_path / "none.txt"), 2, "there is no file or folder")
    ended(run("prepare", source, "--train-tokenizer", 300), 2, "go together")
    ended(run("prepare", source, "--tokenizer-out", tmp_path / "tok"), 2, "go together")
    ended(run("prepare", source, "--split", "most"), 2, "--split most was given")
    ended(run("prepare", source, "--split", "0.9,0.2"), 2, "add up to 1")
    ended(run("prepare", source, "--train-tokenizer", 20, "--tokenizer-out", tmp_path / "tok"), 2, "at least 257")
    assert not (tmp_path / "tok").exists()
    (tmp_path / "a.jsonl").write_text("{")
    ended(run("prepare", tmp_path / "a.jsonl"), 1, "a.jsonl line 1")


def test_a_trained_tokenizer_is_not_lost_with_what_fails_behind_it(tmp_path, source):
    train = ("--train-tokenizer", 300, "--tokenizer-out", tmp_path / "tok")
    result = run("prepare", source, *train, "--block-length", 100_000)
    assert result.exit_code == 2
    assert "fewer than one block of 100,000" in result.stderr
    assert f"go on with --tokenizer {tmp_path / 'tok'}\n" in result.stderr
    result = run("prepare", source, "--tokenizer", tmp_path / "tok", "--block-length", 16)
    assert result.exit_code == 0, result.stderr


def test_the_examples_of_the_page_run(source, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), {})
    assert "blocks; 257 tokens in the vocabulary; {'documents': " in capsys.readouterr().out
    monkeypatch.chdir(source.parent)
    write_jsonl(source.parent / "notes.jsonl", LINES)
    for line in re.search(r"```sh\n(.*?)```", page, re.DOTALL).group(1).splitlines():
        result = run(*line.split()[1:], "--validation-fraction", 0)
        assert result.exit_code == 0, result.stderr
