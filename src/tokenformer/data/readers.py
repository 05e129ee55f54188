"""One file or dataset to the documents in it: text (one document), JSONL, CSV, Parquet and Hub datasets (one a row).

Enters: a name and the column to read. Leaves: rows as (number, bytes), with None for a row without text; or, for a
text file, an open stream. Broken UTF-8 passes through untouched: it is no matter here, and the tokenizer's to judge.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import BadFileError, BadRequestError, did_you_mean, one_line

Rows = Iterator[tuple[int, bytes | None]]


@dataclass(frozen=True)
class TextFile:
    """A whole file is one document. `found` in a folder or by a glob, not named: then it may turn out to be binary."""

    name: str
    found: bool = False

    def where(self, row: int) -> str:
        """How a message names the place."""
        return self.name


@dataclass(frozen=True)
class RowSource:
    """Something with rows and columns."""

    name: str

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
        """The rows from line `first` on; blank lines are no rows."""
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
            raise BadFileError(f"{self.name} is not a whole Parquet file: {one_line(error)}") from error


@dataclass(frozen=True)
class Dataset(RowSource):
    """What the datasets library loads: a Hub name, a dataset folder, or a folder it saved itself."""

    config: str | None = None
    split: str = "train"
    saved: bool = False
    streaming: bool = False

    def rows(self, column: str, first: int) -> Rows:
        """The rows from `first` on."""
        dataset = self.load()
        if dataset.column_names is not None:  # a stream may not know them
            self._check_column(column, dataset.column_names)
            dataset = dataset.select_columns([column])
        row = first
        for batch in dataset.skip(first).iter(256):
            self._check_column(column, batch)
            for value in batch[column]:
                yield row, self._text(value, column, row)
                row += 1

    def load(self, **more: Any) -> Any:
        """The dataset itself. Of what else load_dataset takes, `more` may have some."""
        import datasets

        try:
            if not self.saved:
                return datasets.load_dataset(self.name, self.config, split=self.split, streaming=self.streaming, **more)
            loaded = datasets.load_from_disk(self.name)
        except Exception as error:  # the library and those under it raise many kinds, most for a wrong name
            asked = ", ".join(filter(None, (self.config and f"config {self.config!r}", f"split {self.split!r}")))
            where = "cannot be loaded" if Path(self.name).exists() else "is no path here and cannot be loaded"
            raise BadRequestError(
                f"{self.name!r} {where} as a dataset ({asked}): {type(error).__name__}: {one_line(error)}"
            ) from error
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if self.split not in loaded:
            raise BadRequestError(
                f"{self.name!r} has no split {self.split!r}; it has {', '.join(loaded)}: choose one of them "
                "(hub_split, hub_validation_split, or --split)"
            )
        return loaded[self.split]


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """The file, unpacked if it is gzip-ed. What the disk or gzip has against it becomes one line."""
    try:
        with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
            yield cast(BinaryIO, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadFileError(f"{name} is not a whole gzip file: {one_line(error)}") from error
    except OSError as error:
        raise BadFileError(f"{name} cannot be read: {error.strerror or error}") from error
