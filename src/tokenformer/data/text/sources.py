"""Sources of text: names to files and datasets, and each of these to the documents in it.

Enters: the settings, with names of files, folders, globs and datasets, or `stdlib`. Leaves: sources in a fixed order. A
text file is one document; JSONL, CSV, Parquet and datasets have one a row. Rows are (number, bytes), with None for a
row without text. Broken UTF-8 passes through untouched: the tokenizer decides about it.
"""

import csv
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import BadFileError, BadRequestError, did_you_mean, one_line
from ..sources import (
    HUB_PREFIX,
    HubDataset,
    as_list,
    check_apart,
    check_readable,
    files_in,
    kind_of_source,
    matching_files,
    no_such_source,
    opened,
)
from .settings import TextSettings

Rows = Iterator[tuple[int, bytes | None]]


@dataclass(frozen=True)
class TextFile:
    """A whole file is one document. `found` in a folder or by a glob, not named: then it may turn out to be binary."""

    name: str
    found: bool = False

    @property
    def place(self) -> str:
        """What is read: the same for the same text, however the name is spelt."""
        return str(Path(self.name).resolve())

    def where(self, row: int) -> str:
        """How a message names the place."""
        return self.name


@dataclass(frozen=True)
class RowSource:
    """Something with rows and columns."""

    name: str

    @property
    def place(self) -> str:
        """What is read: the same for the same text, however the name is spelt."""
        return str(Path(self.name).resolve())

    def where(self, row: int) -> str:
        """How a message names the place."""
        return f"{self.name} row {row + 1}"

    def rows(self, column: str, first: int) -> Rows:
        """The rows from `first` on."""
        raise NotImplementedError

    def _check_column(self, column: str, columns: Iterable[str], row: int | None = None) -> None:
        columns = list(columns)
        if column not in columns:
            place = self.name if row is None else self.where(row)
            there = ", ".join(columns) or "none"
            hint = f"; {did_you_mean(column, columns)}" if columns else ""
            raise BadRequestError(f"{place} has no column {column!r}{hint} (columns: {there})")

    def _text(self, value: object, column: str, row: int) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise BadFileError(f"{self.where(row)}: column {column!r} holds {type(value).__name__}, not text")
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            return value.encode("utf-8", "surrogatepass")


class JsonLines(RowSource):
    """One JSON object a line."""

    def where(self, row: int) -> str:
        """How a message names the place."""
        return f"{self.name} line {row + 1}"

    def rows(self, column: str, first: int) -> Rows:
        """The rows from line `first` on; a blank line is not a row."""
        with opened(self.name) as file:
            for number, line in enumerate(file):
                if number < first or not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
                except (ValueError, RecursionError) as error:
                    raise BadFileError(f"{self.where(number)} is not a JSON object: {error}") from error
                if not isinstance(row, dict):
                    raise BadFileError(f"{self.where(number)} is a JSON {type(row).__name__}, not an object")
                self._check_column(column, row, number)
                yield number, self._text(row[column], column, number)


class CommaSeparated(RowSource):
    """CSV with the names of the columns in the first line."""

    def rows(self, column: str, first: int) -> Rows:
        """The rows from `first` on; a row that ends before the column has no text."""
        csv.field_size_limit(2**31 - 1)  # the module's own limit, for the whole process, is 128 KiB
        with opened(self.name) as file:
            lines = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=""), strict=True)
            try:
                if lines.fieldnames is None:
                    return
                self._check_column(column, lines.fieldnames)
                for number, row in enumerate(lines):
                    if number >= first:
                        yield number, self._text(row[column], column, number)
            except csv.Error as error:
                raise BadFileError(f"{self.name} line {lines.reader.line_num} is not CSV: {error}") from error


class Parquet(RowSource):
    """A Parquet file."""

    def rows(self, column: str, first: int) -> Rows:
        """The rows from `first` on; row groups before it are not read."""
        import pyarrow
        import pyarrow.parquet

        try:
            if os.path.getsize(self.name) == 0:
                return
            with pyarrow.parquet.ParquetFile(self.name) as file:
                self._check_column(column, file.schema_arrow.names)
                row = 0
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    if row + size <= first:
                        row += size
                        continue
                    for batch in file.iter_batches(1024, row_groups=[group], columns=[column]):
                        for value in batch.column(0).to_pylist():
                            if row >= first:
                                yield row, self._text(value, column, row)
                            row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise BadFileError(f"{self.name} is a damaged or incomplete Parquet file: {one_line(error)}") from error


@dataclass(frozen=True)
class DatasetRows(RowSource):
    """A dataset of the `datasets` library."""

    dataset: HubDataset

    @property
    def place(self) -> str:
        """What is read."""
        return self.dataset.place

    def rows(self, column: str, first: int) -> Rows:
        """The rows from `first` on."""
        dataset = self.dataset.load()
        if dataset.column_names is not None:  # a stream may not know them
            self._check_column(column, dataset.column_names)
            dataset = dataset.select_columns([column])
        row = first
        for batch in dataset.skip(first).iter(256):
            self._check_column(column, batch)
            for value in batch[column]:
                yield row, self._text(value, column, row)
                row += 1


Source = TextFile | RowSource

READERS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines, ".csv": CommaSeparated, ".parquet": Parquet}
# Of the standard library: tests and data for them, and what is not Python's own.
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def find_sources(settings: TextSettings, part: str = "train") -> list[Source]:
    """Everything that the sources of `part`, train or validation, stand for."""
    names = as_list(settings.train if part == "train" else settings.validation)
    if not names:
        raise BadRequestError(f"no source was given for {part}; name files, folders, a Hub dataset, or stdlib")
    split = settings.hub_split if part == "train" else settings.hub_validation_split
    found = [source for name in names for source in _find(name, settings, split)]
    if part == "validation":
        trained = {source.place for source in find_sources(settings)}
        for source in found:
            check_apart(source.name, {source.place}, trained)
    return found


def _find(name: str, settings: TextSettings, split: str) -> Iterator[Source]:
    path, kind = Path(name).expanduser(), kind_of_source(name, {"stdlib"})
    if kind == "built in":
        yield from _library()
    elif kind == "hub":
        yield _dataset(name.removeprefix(HUB_PREFIX), settings, split)
    elif kind == "saved dataset":
        yield _dataset(str(path), settings, split, saved=True)
    elif kind == "folder":
        files = files_in(path)
        if not files:
            raise BadRequestError(f"the folder {name} has no files in it")
        yield from (_reader(file, found=True) for file in files)
    elif kind == "file":
        check_readable(path)
        yield _reader(path)
    elif kind == "pattern":
        yield from (_reader(file, found=True) for file in matching_files(name))
    else:
        raise no_such_source(name)


def _dataset(name: str, settings: TextSettings, split: str, saved: bool = False) -> Source:
    return DatasetRows(name, HubDataset(name, settings.hub_config, split, saved, settings.streaming))


def _reader(path: Path, found: bool = False) -> Source:
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    reader = READERS.get(plain.suffix.lower())
    return reader(str(path)) if reader else TextFile(str(path), found)


def _library() -> Iterator[Source]:
    """The source of the running Python's standard library, which every machine that can run us has."""
    folder = sysconfig.get_path("stdlib")
    files = [file for file in files_in(Path(folder), NOT_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise BadRequestError(f"this Python has no source of its standard library in {folder}; name another source")
    yield from (TextFile(str(file), found=True) for file in files)
