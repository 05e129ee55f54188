"""Bad data and bad requests: one line that names the file and says what to do, or a stated and counted behaviour."""

import gzip
import os
from functools import partial
from pathlib import Path

import pytest

from data_files import prepared, write_documents, write_jsonl
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.text import TextSettings
from tokenformer.data.text.sources import find_sources


def refused(error, message, *args, **settings):
    """Preparing fails with that one line."""
    with pytest.raises(error, match=message) as caught:
        prepared(*args, **settings)
    assert "\n" not in str(caught.value)


def test_empty_files_and_rows_without_text_are_passed_over_and_counted(tmp_path):
    for name in ("empty.txt", "empty.jsonl", "empty.csv", "empty.parquet"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    rows = write_jsonl(tmp_path / "rows.jsonl", ["text " * 9, None, "", None])
    (tmp_path / "short.csv").write_text('id,text\n1,"one two"\n2\n3,\n')
    empty = [tmp_path / f"empty.{ending}" for ending in ("txt", "jsonl", "csv", "parquet", "gz")]
    data = prepared(tmp_path, [*empty, rows, tmp_path / "short.csv"])
    assert data.stats["documents"] == 2
    assert data.stats["empty"] == 5 + 1 + 1
    assert data.stats["null"] == 2 + 1


def test_nothing_but_empty_files_is_an_error(tmp_path):
    write_documents(tmp_path / "c", [b"", b""])
    refused(BadRequestError, "there is no text in the sources: 2 empty", tmp_path, tmp_path / "c")
    rows = write_jsonl(tmp_path / "rows.jsonl", [None, ""])
    refused(BadRequestError, "no text in the sources: 1 empty, 1 without text", tmp_path, rows)


def test_a_corpus_shorter_than_a_block_is_an_error_with_the_numbers(tmp_path):
    source = write_documents(tmp_path / "c", [b"short", b"texts"])
    refused(BadRequestError, "the train text has 12 tokens, fewer than one block of 16", tmp_path, source)
    refused(
        BadRequestError,
        "the validation text has 6 tokens, fewer than one block of 8; .*validation_fraction",
        tmp_path,
        source[1:] * 2,
        block_length=8,
        validation=str(source[0]),
    )


@pytest.mark.parametrize("validation", ["c/0000.txt", "./c/../c/0000.txt", "c/*0.txt", "c"])
def test_what_is_trained_on_is_not_validated_on(tmp_path, monkeypatch, validation):
    source = write_documents(tmp_path / "c", [b"some text of one", b"and of another"])
    monkeypatch.chdir(tmp_path)
    refused(
        BadRequestError,
        r"c/0000.txt is given for training and for validation; leave validation out, and validation_fraction",
        tmp_path,
        source,
        validation=validation,
    )


@pytest.mark.parametrize("kind", ["saved", "parts", "hub"])
def test_nor_the_same_part_of_a_dataset(tmp_path, monkeypatch, kind):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["some text of one", "and of another"]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "parts")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: rows)
    name = "owner/name" if kind == "hub" else str(tmp_path / kind)
    same = {"validation": name, "hub_validation_split": "train"}
    refused(BadRequestError, f"{name} is given for training and for validation", tmp_path, name, **same)
    if kind != "saved":
        assert find_sources(TextSettings(train=name, validation=name), "validation")[0].dataset.split == "validation"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, name):
    import datasets

    table = datasets.Dataset.from_dict({"content": ["x"], "id": [1]})
    write = {"a.jsonl": table.to_json, "a.csv": partial(table.to_csv, index=False), "a.parquet": table.to_parquet}[name]
    write(tmp_path / name)
    refused(
        BadRequestError,
        rf"{name}.* has no column 'contents'; did you mean 'content'\? \(columns: content, id\)",
        tmp_path,
        tmp_path / name,
        column="contents",
    )


def test_columns_that_hold_no_text(tmp_path):
    import datasets

    rows = write_jsonl(tmp_path / "a.jsonl", ["fine", 7])
    refused(BadFileError, "a.jsonl line 2: column 'text' holds int, not text", tmp_path, rows)
    datasets.Dataset.from_dict({"text": [[1, 2]]}).to_parquet(tmp_path / "a.parquet")
    refused(BadFileError, "a.parquet row 1: column 'text' holds list", tmp_path, tmp_path / "a.parquet")


def test_malformed_rows_are_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n{"text": "cut\n')
    refused(BadFileError, "a.jsonl line 3 is not a JSON object: ", tmp_path, tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text('[{"text": "one list"}]')
    refused(BadFileError, "b.json line 1 is a JSON list, not an object", tmp_path, tmp_path / "b.json")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    refused(BadFileError, "deep.jsonl line 1 is not a JSON object", tmp_path, tmp_path / "deep.jsonl")
    (tmp_path / "c.csv").write_text('id,text\n1,"fine"\n2,"never closed\n')
    refused(BadFileError, "c.csv line 3 is not CSV: unexpected end of data", tmp_path, tmp_path / "c.csv")


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    refused(BadFileError, "a.parquet is a damaged or incomplete Parquet file", tmp_path, tmp_path / "a.parquet")
    rows = "".join(f'{{"text": "{os.urandom(9).hex()}"}}\n' for _ in range(500))
    whole = gzip.compress(rows.encode())
    for name, data in (("cut.txt.gz", whole[:-9]), ("not.gz", b"plain text"), ("cut.jsonl.gz", whole[:-2000])):
        (tmp_path / name).write_bytes(data)
        refused(BadFileError, f"{name} is a damaged or incomplete gzip file", tmp_path, tmp_path / name)
    (tmp_path / "flipped.gz").write_bytes(whole[:500] + bytes([whole[500] ^ 255]) + whole[501:])
    refused(BadFileError, "flipped.gz is a damaged or incomplete gzip file", tmp_path, tmp_path / "flipped.gz")


def test_binary_files_are_refused_if_named_and_passed_over_if_found(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.bin").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "c" / "b.txt").write_text("text " * 9)
    refused(BadFileError, "a.bin is a binary file, not text", tmp_path, tmp_path / "c" / "a.bin")
    for source in (tmp_path / "c", tmp_path / "c" / "*"):
        assert prepared(tmp_path, source).stats["binary"] == 1
    (tmp_path / "c" / "b.txt").unlink()
    refused(BadRequestError, "there is no text in the sources: 1 binary", tmp_path, tmp_path / "c")


def test_a_file_that_the_disk_cannot_give(tmp_path, monkeypatch):
    path = write_documents(tmp_path, [b"text"])[0]

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tokenformer.data.sources.open", fail, raising=False)
    refused(BadFileError, "0000.txt cannot be read: Input/output error", tmp_path, path)


def test_sources_that_are_not_there(tmp_path):
    refused(BadRequestError, "there is no file or folder .*missing.txt", tmp_path, tmp_path / "missing.txt")
    refused(BadRequestError, "no file matches .*missing", tmp_path, tmp_path / "missing*.txt")
    (tmp_path / "empty").mkdir()
    refused(BadRequestError, "the folder .*empty has no files in it", tmp_path, tmp_path / "empty")
    refused(BadRequestError, "no source was given for train", tmp_path, [])
    refused(BadRequestError, "there is no file or folder imdb; .* hub:NAME", tmp_path, "imdb")
    refused(
        BadRequestError,
        r"'owner/no-such-set' is not a path here and cannot be loaded as a dataset \(config 'c', split 'train'\): ",
        tmp_path,
        "owner/no-such-set",
        hub_config="c",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_length": 1}, "block_length is 1; a whole number of at least 2 is needed"),
        ({"block_length": 2.5}, "block_length is 2.5; a whole number of at least 2 is needed"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0; a number of at least 0 and below 1 is needed"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1; a number of at least 0"),
        ({"split": [0.9, 0.2]}, "two or three positive shares that add up to 1"),
        ({"split": [1.0]}, "two or three positive shares"),
        ({"split": []}, "two or three positive shares"),
        ({"split": [0.5, 0.5, 0.0]}, "two or three positive shares"),
        ({"split": [0.9, 0.1], "validation": "stdlib"}, "both split and validation were given"),
        ({"errors": "ignore"}, "errors is 'ignore'; choose one of replace, strict"),
        ({"errors": "stric"}, "did you mean 'strict'"),
        ({"shuffle_buffer": -1}, "shuffle_buffer is -1; a whole number of at least 0 is needed"),
        ({"workers": 0}, "workers is 0; a whole number of at least 1 and at most 256 is needed"),
        ({"seed": 2**63}, "seed is 9223372036854775808; a whole number .* below 9223372036854775808 is needed"),
        ({"split_seed": 2**63}, "split_seed is 9223372036854775808;"),
    ],
)
def test_settings_that_cannot_be_met(tmp_path, settings, message):
    refused(BadRequestError, message, tmp_path, write_documents(tmp_path / "c", [b"text" * 20]), **settings)


def test_the_settings_are_a_section_of_a_recipe():
    given = {"train": ["a.txt", "b/"], "validation": "c.txt", "block_length": 128, "split": None, "workers": 2}
    settings = TextSettings.read(given, "data")
    assert (settings.train, settings.validation, settings.block_length) == (["a.txt", "b/"], "c.txt", 128)
    assert TextSettings.read(settings.model_dump(), "data") == settings
    with pytest.raises(BadRequestError, match=r"^recipe\.yaml: data\.split is 'half'; a list of numbers is needed$"):
        TextSettings.read({"split": "half"}, "recipe.yaml: data")


def test_settings_take_what_python_has_for_yamls_lists_and_texts():
    settings = TextSettings(train=Path("a.txt"), validation=(Path("b.txt"), "c.txt"))
    assert (settings.train, settings.validation) == ("a.txt", ["b.txt", "c.txt"])
