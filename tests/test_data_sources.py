"""Sources: every format and every way to name it gives the same documents in a fixed order."""

import gzip
import json
import sysconfig
from pathlib import Path

import datasets
import pytest

from data_files import LINES, byte_stream, ids_of, prepared, write_documents, write_jsonl
from tokenformer.data.text import TextSettings
from tokenformer.data.text.sources import find_sources

TEXTS = ["first, with a comma", 'second "quoted"\nand a line break', "третий", "fourth"]
EXPECTED = byte_stream([text.encode() for text in TEXTS])


def write(path: Path) -> Path:
    """The texts in the format that the name asks for."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    table = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    if plain.suffix == ".csv":
        table.to_csv(plain, index=False)
    elif plain.suffix == ".parquet":
        table.to_parquet(plain, batch_size=2)
    else:
        write_jsonl(plain, TEXTS)
    if path != plain:
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.parquet"]
)
def test_formats_with_rows(tmp_path, name):
    data = prepared(tmp_path, write(tmp_path / name), block_length=2)
    ids = ids_of(data.train)
    assert ids.tolist() == EXPECTED[: len(ids)].tolist()
    assert data.stats["documents"] == 4


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.md", "LICENSE", "a.txt.gz", "a.gz"])
def test_text_files_are_one_document(tmp_path, name):
    text = "".join(LINES).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    data = prepared(tmp_path, tmp_path / name, block_length=2)
    assert data.stats["documents"] == 1
    assert data.stats["tokens"] == len(text) + 1
    assert bytes(ids_of(data.train).tolist()) == text[: len(ids_of(data.train))]


def test_another_column(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS, column="content")
    data = prepared(tmp_path, source, column="content", block_length=2)
    assert ids_of(data.train).tolist() == EXPECTED[: len(EXPECTED) // 2 * 2].tolist()


def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("text,id\nabc,1\n", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n', encoding="utf-8-sig")
    for name in ("a.csv", "a.jsonl"):
        data = prepared(tmp_path, tmp_path / name, block_length=4)
        assert data.train[0]["input_ids"].tolist() == [*b"abc", 256]


def test_folders_are_read_in_order_without_hidden_and_binary_files(tmp_path):
    folder = tmp_path / "corpus"
    write_documents(folder / "b", [b"three"])
    write_documents(folder / "a", [b"one", b"two"])
    (folder / "z.jsonl").write_text(json.dumps({"text": "four"}))
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "c.png").write_bytes(b"\x89PNG\0\0")
    data = prepared(tmp_path, folder, block_length=19)
    assert data.train[0]["input_ids"].tolist() == byte_stream([b"one", b"two", b"three", b"four"]).tolist()
    assert data.stats["binary"] == 1


def test_globs_and_lists(tmp_path):
    write_documents(tmp_path / "c" / "d", [b"one", b"two"])
    (tmp_path / "c" / "d" / "x.md").write_bytes(b"three")
    expected = byte_stream([b"one", b"two", b"three"])[:14].tolist()
    for source in ([tmp_path / "c/**/*.txt", tmp_path / "c/d/x.md"], [tmp_path / "c/*/000?.txt", tmp_path / "**/*.md"]):
        assert prepared(tmp_path, source, block_length=14).train[0]["input_ids"].tolist() == expected


def test_the_home_folder_can_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_documents(tmp_path / "c", [b"one"])
    assert [source.name for source in find_sources(TextSettings(train="~/c/*.txt"))] == [
        str(tmp_path / "c" / "0000.txt")
    ]


def test_the_standard_library_is_the_default(tmp_path):
    names = [Path(source.name) for source in find_sources(TextSettings())]
    folder = Path(sysconfig.get_path("stdlib"))
    assert folder / "json" / "decoder.py" in names
    assert all(name.suffix == ".py" for name in names)
    assert not any({"test", "site-packages"} & set(name.relative_to(folder).parts) for name in names)


@pytest.fixture
def table():
    return datasets.Dataset.from_dict({"text": TEXTS})


def test_a_dataset_folder_goes_through_load_dataset(tmp_path, table, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    table.to_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    table.select([3]).to_parquet(tmp_path / "set" / "data" / "validation-00000-of-00001.parquet")
    name = f"hub:{tmp_path / 'set'}"
    for streaming in (False, True):
        data = prepared(
            tmp_path, name, validation=name, block_length=2, streaming=streaming, shuffle_buffer=0, hub_config="default"
        )
        ids = [i for item in data.train for i in item["input_ids"].tolist()]
        assert ids == EXPECTED[: len(ids)].tolist()
        assert ids_of(data.validation).tolist() == byte_stream([b"fourth"])[:6].tolist()
    split = prepared(tmp_path, name, block_length=2, hub_split="validation")
    assert split.stats["documents"] == 1


def test_a_dataset_that_was_saved_to_disk(tmp_path, table):
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "other": table.select([0])}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        ids = ids_of(prepared(tmp_path, tmp_path / name, block_length=2).train)
        assert ids.tolist() == EXPECTED[: len(ids)].tolist()
    assert prepared(tmp_path, tmp_path / "two", block_length=2, hub_split="other").stats["documents"] == 1


def test_hub_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    settings = TextSettings(hub_config="c", hub_split="s", hub_validation_split="v")
    settings.train = ["owner/name", "hub:imdb", "owner/name-v1.5"]
    settings.validation = "owner/name"
    assert [(s.name, s.dataset.config, s.dataset.split) for s in find_sources(settings)] == [
        ("owner/name", "c", "s"),
        ("imdb", "c", "s"),
        ("owner/name-v1.5", "c", "s"),
    ]
    assert [s.dataset.split for s in find_sources(settings, "validation")] == ["v"]


def test_a_hub_name_is_loaded_by_that_name(tmp_path, table, monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = prepared(tmp_path, "owner/name", hub_config="c", hub_split="s", block_length=2)
    assert data.stats["documents"] == 4
    assert asked[0] == (("owner/name", "c"), {"split": "s", "streaming": False})
