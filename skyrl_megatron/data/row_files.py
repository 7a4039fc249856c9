"""Rows of data files, read on demand: JSON and JSONL files with a JSON parser, parquet files as Arrow tables."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.errors import BridgeError
from bridges.files import refuse_special
from skyrl_megatron.data.row_cache import FileState, RowCache, state_of
from skyrl_megatron.errors import DataError, HubError
from skyrl_megatron.hub import Repo, data_folder, data_source

if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
BATCH_ROWS = 1000
KEPT_FROM = 16 << 20
"""Bytes of a JSON file from which on the places of its rows are kept, so that later runs need not read all of it."""
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BLOCK = 1 << 20

type DatasetRow = dict[str, Any]


class Rows(ABC):
    """Rows by number, read on demand; memory does not grow with the files."""

    column_names: Sequence[str]
    """Columns of at least one row."""
    files: Sequence[Path]
    """Files with the rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> DatasetRow: ...

    def __iter__(self) -> Iterator[DatasetRow]:
        return self.each()

    def each(self, columns: Sequence[str] | None = None) -> Iterator[DatasetRow]:
        """Yield all rows in order, with at least ``columns`` (None: all)."""
        for batch in self.batches(columns):
            yield from batch

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[list[DatasetRow]]:
        """Yield all rows in order, a thousand at a time, with at least ``columns`` (None: all)."""
        for first in range(0, len(self), BATCH_ROWS):
            yield self.part(first, min(first + BATCH_ROWS, len(self)), columns)

    def part(self, first: int, stop: int, columns: Sequence[str] | None = None) -> list[DatasetRow]:
        """Return the rows from ``first`` to ``stop``, with at least ``columns`` (None: all)."""
        return [self[number] for number in range(first, stop)]

    def place(self, number: int) -> str:
        """Return file and row number of a row, for messages."""
        return f"{self.files[0]}, row {number}"

    def as_written(self, number: int, row: DatasetRow, columns: Sequence[str]) -> tuple[DatasetRow, int]:
        """Return the row ``number`` without the null fields that Arrow adds to objects in ``columns``, and their
        number below the objects of a list: a column has one type, so each object gets the fields of all others.

        A null that a row of an Arrow table really had looks like these. Nulls of JSON files and of JSON text,
        and null elements of lists, are kept.
        """
        return row, 0

    @property
    @abstractmethod
    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, size and content hash of each file. Takes about a second per GB, once."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """Raise DataError, with the file, unless what was read of a file is what :attr:`fingerprint` says. A new file
        with the same name changes nothing: the old one is still open."""


class JsonRows(Rows):
    """Rows of a file with one JSON object per line, or with one JSON array of objects.

    Values are exactly those of the file: text stays text, integers are exact, and rows may have different columns. The
    constructor reads every row once to find errors, and keeps the position of each row in memory, 16 bytes per row.
    Raises DataError with file and row if a row is not UTF-8, not JSON or not an object, or has a number outside the
    range of float64, a duplicate column, or an incomplete surrogate pair. ``cache`` keeps the positions and columns of
    a large file, which later runs then only hash. A pickled object can be loaded while this one has the file open.
    """

    def __init__(self, path: Path, cache: RowCache | None = None) -> None:
        self.files = [path]
        self._file = path.open("rb")
        self._state = state_of(self._file.fileno())
        if cache is None or self._state[1] < KEPT_FROM:
            self.spans, self.column_names = self._read_all()
            return
        with cache.kept("lines", [Path(__file__)], file=self.fingerprint[0]["sha256"]) as entry:
            file = None if entry is None else entry.read("lines")
            self.spans, self.column_names = (file["spans"], file.about) if file else self._read_all()
            if entry and file is None:
                entry.write("lines", {"spans": self.spans}, self.column_names)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_file": self._opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = state["_file"].open("rb")

    @property
    def _opened(self) -> Path:
        """The open file, also if another one has its name now."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    @cached_property
    def fingerprint(self) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        return [file_fingerprint(self._opened) | {"name": self.files[0].name}]

    def require_unchanged(self) -> None:
        """See :class:`Rows`."""
        if state_of(self._file.fileno()) != self._state:
            raise _changed(self.files[0])

    def _read_all(self) -> tuple[np.ndarray, list[str]]:
        path = self.files[0]
        begins = _after_space(self._file.read(4096))
        spans = self._elements if begins.startswith(b"[") else self._lines
        columns: dict[str, None] = {}
        lines = np.empty((1024, 2), np.int64)
        size = 0
        for start, data in spans():
            columns |= dict.fromkeys(_parsed(data, path, size, _CHECKED))
            if size == len(lines):
                lines = np.resize(lines, (2 * size, 2))
            lines[size] = start, len(data)
            size += 1
        return lines[:size].copy(), list(columns)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: int) -> DatasetRow:
        start, length = self.spans[range(len(self))[number]].tolist()
        return self._read(number, os.pread(self._file.fileno(), length, start))

    def part(self, first: int, stop: int, columns: Sequence[str] | None = None) -> list[DatasetRow]:
        """Return the rows from ``first`` to ``stop``, with one file read."""
        spans = self.spans[first:stop].tolist()
        base, data = spans[0][0], b""
        while len(data) < sum(spans[-1]) - base:  # Linux reads 2 GiB at most at once
            read = os.pread(self._file.fileno(), sum(spans[-1]) - base - len(data), base + len(data))
            if not read:
                break  # the file has changed, which parsing says
            data += read
        return [
            self._read(first + offset, data[start - base : start - base + length])
            for offset, (start, length) in enumerate(spans)
        ]

    def _read(self, number: int, data: bytes) -> DatasetRow:
        try:
            return _parsed(data, self.files[0], number)
        except DataError as error:  # the constructor has read every row
            raise DataError(f"{error}; the file has changed since the run opened it") from error

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        start = 0
        for line in self._file:
            skipped = len(_BOM) if start == 0 and line.startswith(_BOM) else 0
            if line[skipped:].strip(_SPACE):
                yield start + skipped, line[skipped:]
            start += len(line)

    def _elements(self) -> Iterator[tuple[int, bytes]]:
        """Yield the elements of an array. Invalid UTF-8 is escaped here and refused when its row is parsed."""
        self._file.seek(0)
        start, row, width = self._file.read(4096).index(b"[") + 1, 0, _BLOCK
        while True:
            block = os.pread(self._file.fileno(), width, start)
            text, at, problem = block.decode("utf-8", "surrogateescape"), 0, "the file ends within the array"
            while (closed := _CLOSED.match(text, at)) is None:
                gap = (_SPACES if row == 0 else _COMMA).match(text, at)
                if gap is None:
                    problem = "there is no comma before it" if text[at:].strip() else problem
                    break
                try:
                    _, end = _DECODER.raw_decode(text, gap.end())
                except (ValueError, RecursionError) as error:
                    problem = f"cannot be read as json: {_reason(error)}" if text[gap.end() :] else problem
                    break
                start += len(text[at : gap.end()].encode("utf-8", "surrogateescape"))
                data = text[gap.end() : end].encode("utf-8", "surrogateescape")
                yield start, data
                start, at, row = start + len(data), end, row + 1
            if closed and not text[closed.end() :].strip():
                return
            if closed:
                raise DataError(f"{self.files[0]}: text follows the array; write one row per line, or one array")
            if len(block) < width:
                raise DataError(f"{self.files[0]}, row {row}: {problem}")
            width = 2 * width if at == 0 else _BLOCK


class ArrowRows(Rows):
    """Rows of an Arrow data set. Every row has all columns, with their Arrow types. ``states``: of the files, from
    before they were converted to the table, which does not change with them."""

    def __init__(self, table: Dataset, files: Sequence[Path], states: Sequence[FileState], name: str) -> None:
        self.files, self._states, self._table, self._name = files, states, table, name
        self._is_of_files = False
        """Whether the files were those of the table when they were hashed."""
        self.column_names = table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> DatasetRow:
        with self._text_of([number]):
            return dict(self._table[number])

    def part(self, first: int, stop: int, columns: Sequence[str] | None = None) -> list[DatasetRow]:
        """Return the rows from ``first`` to ``stop``, with those of ``columns`` that exist (None: all)."""
        names = [name for name in self.column_names if columns is None or name in columns]
        table = self._table if columns is None else self._table.select_columns(names)
        with self._text_of(range(first, stop)):
            read = table[first:stop] if names else {}  # a table without columns has no rows
        return [{name: read[name][offset] for name in names} for offset in range(stop - first)]

    def place(self, number: int) -> str:
        """Return data set and row number of a row, for messages."""
        return f"{self._name}, row {number}"

    def as_written(self, number: int, row: DatasetRow, columns: Sequence[str]) -> tuple[DatasetRow, int]:
        """See :class:`Rows`."""
        features, removed = self._table.features, [0]
        changed = {
            name: _without_nulls(row[name], features[name], removed, 0)
            for name in columns
            if row.get(name) is not None and name in features
        }
        return (row | changed if changed else row), removed[0]

    @cached_property
    def fingerprint(self) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        return [file_fingerprint(file) for file in self.files]

    def require_unchanged(self) -> None:
        """See :class:`Rows`."""
        if not self._is_of_files:
            for file, state in zip(self.files, self._states, strict=True):
                if self.fingerprint and state_of(file) != state:
                    raise _changed(file)
            self._is_of_files = True

    @contextmanager
    def _text_of(self, numbers: Sequence[int]) -> Iterator[None]:
        """Raise DataError with the row whose text is not UTF-8, among the rows ``numbers``."""
        try:
            yield
        except UnicodeDecodeError as error:
            for number in numbers if len(numbers) > 1 else ():
                self[number]
            raise DataError(f"{self.place(numbers[0])}: text that is not UTF-8: {error}; write it as UTF-8") from error


class PartOfRows(Rows):
    """A contiguous range of other rows."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self._rows, self._range = rows, range(start, stop)
        self.column_names, self.files = rows.column_names, rows.files

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, number: int) -> DatasetRow:
        return self._rows[self._range[number]]

    def part(self, first: int, stop: int, columns: Sequence[str] | None = None) -> list[DatasetRow]:
        """See :class:`Rows`."""
        return self._rows.part(self._range[first], self._range[stop - 1] + 1, columns)

    def place(self, number: int) -> str:
        """Return file and row number of a row, for messages."""
        return self._rows.place(self._range[number])

    def as_written(self, number: int, row: DatasetRow, columns: Sequence[str]) -> tuple[DatasetRow, int]:
        """See :class:`Rows`."""
        return self._rows.as_written(self._range[number], row, columns)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        return self._rows.fingerprint

    def require_unchanged(self) -> None:
        """See :class:`Rows`."""
        self._rows.require_unchanged()


class JoinedRows(Rows):
    """The concatenated rows of several sources. A row has the columns of its source."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        self.sources = sources
        self.ends: list[int] = np.cumsum([len(source) for source in sources]).tolist()
        """Number of the row after the last one of each source."""
        self.column_names = list(dict.fromkeys(name for source in sources for name in source.column_names))
        self.files = [file for source in sources for file in source.files]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> DatasetRow:
        source, row = self._source(range(len(self))[number])
        return source[row]

    def part(self, first: int, stop: int, columns: Sequence[str] | None = None) -> list[DatasetRow]:
        """See :class:`Rows`."""
        read: list[DatasetRow] = []
        while first < stop:
            source, row = self._source(first)
            end = min(row + stop - first, len(source))
            read += source.part(row, end, columns)
            first += end - row
        return read

    def place(self, number: int) -> str:
        """Return source and row number of a row, for messages."""
        source, row = self._source(number)
        return source.place(row)

    def as_written(self, number: int, row: DatasetRow, columns: Sequence[str]) -> tuple[DatasetRow, int]:
        """See :class:`Rows`."""
        source, of_source = self._source(number)
        return source.as_written(of_source, row, columns)

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """See :class:`Rows`."""
        return [file for source in self.sources for file in source.fingerprint]

    def require_unchanged(self) -> None:
        """See :class:`Rows`."""
        for source in self.sources:
            source.require_unchanged()

    def _source(self, number: int) -> tuple[Rows, int]:
        place = bisect_right(self.ends, number)
        return self.sources[place], number - (self.ends[place - 1] if place else 0)


def _without_nulls(value: Any, feature: Any, removed: list[int], depth: int) -> Any:
    """Return a value of an Arrow type without null fields of objects; count those deeper than 1 in ``removed``."""
    if value is None:
        return None
    if isinstance(feature, dict):
        kept = {}
        for name, field in value.items():
            if field is not None:
                kept[name] = _without_nulls(field, feature[name], removed, depth + 1)
            elif depth > 1:
                removed[0] += 1
        return kept
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else None)
    if inner is not None and isinstance(value, list):
        return [_without_nulls(element, inner, removed, depth + 1) for element in value]
    return value


def load_source(
    name: str,
    num_workers: int = 1,
    hub_commits: Mapping[str, str] | None = None,
    say: Callable[[str], None] = logger.info,
    cache: RowCache | None = None,
) -> Rows:
    """Open a file, or a data set in a folder or on the hub. Raises DataError if it is missing, empty or unreadable.
    ``cache``: keeps where the rows of large JSON files are."""
    path = Path(name).expanduser()
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        return _load_folder(name, hub_commits or {}, say)
    if not path.is_file():
        raise DataError(f"{path}: no such file; create it with skyrl-megatron prepare, or set another path")
    return _filled(_json_rows(path, cache) if reader == "json" else _parquet_rows(path, num_workers), str(path))


def _filled(rows: Rows, name: str) -> Rows:
    if not len(rows):
        raise DataError(f"{name} has no rows: write it again, or name another")
    return rows


def _json_rows(path: Path, cache: RowCache | None = None) -> Rows:
    _refuse_special(path)
    try:
        return JsonRows(path, cache)
    except OSError as error:
        raise DataError(f"{path} cannot be read as json: {error.strerror}; check path and permissions") from error


def _parquet_rows(path: Path, num_workers: int) -> Rows:
    from datasets import load_dataset

    try:
        states = [state_of(path)]
        dataset: Any = load_dataset(
            "parquet", data_files=str(path), split="train", num_proc=num_workers if num_workers > 1 else None
        )
    except Exception as error:
        if _has_no_rows(path):
            raise DataError(f"{path} has no rows: write it again, or name another") from error
        fix = "write a map as JSON text, or the rows as JSONL" if "Arrow type map<" in str(error) else "write it again"
        raise DataError(f"{path} cannot be read as parquet: {_reason(error.__cause__ or error)}; {fix}") from error
    return ArrowRows(dataset, [path], states, str(path))


def _has_no_rows(path: Path) -> bool:
    """Return whether a file is valid parquet without rows, which ``datasets`` cannot read."""
    from pyarrow import ArrowException, parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == 0)
    except (ArrowException, OSError, ValueError):  # ValueError: a column name is not UTF-8
        return False


def _load_folder(name: str, hub_commits: Mapping[str, str], say: Callable[[str], None]) -> Rows:
    from datasets import load_dataset, load_dataset_builder

    source = data_source(name)
    if source is None:
        raise DataError(
            f"{name} is neither a local file ({', '.join(READERS)}) or folder nor a data set of the Hugging Face hub "
            "(org/name[@revision][:subset][:split])"
        )
    try:
        folder = source.where
        if isinstance(folder, Repo):
            folder = data_folder(folder, source.subset, hub_commits, say=say)
        builder = load_dataset_builder(str(folder), source.subset)
        splits = {str(split): [Path(file) for file in files] for split, files in builder.config.data_files.items()}
        if all(READERS.get(file.suffix.lower()) == "json" for files in splits.values() for file in files):
            return _filled(_of_split(splits, source.split), name)
        for file in (file for files in splits.values() for file in files):
            _refuse_special(file)
        files = [file for files in splits.values() for file in files]
        states = [state_of(file) for file in files]
        table: Any = load_dataset(str(folder), source.subset, split=source.split)
        return ArrowRows(table, files, states, name)
    except HubError as error:
        raise DataError(f"{name}: {error}") from error
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name} cannot be read: {error.__cause__ or error}; check the name, or download it and give its path"
        ) from error


def _refuse_special(path: Path) -> None:
    """Raise DataError for a pipe, a socket or a device, on which a reader would block."""
    try:
        refuse_special(path)
    except BridgeError as error:
        raise DataError(str(error)) from error


def _of_split(files: Mapping[str, Sequence[Path]], asked: str) -> Rows:
    """Open the JSON files of a split, a slice or a sum: ``train``, ``train[:1000]``, ``train+test``."""
    from datasets import ReadInstruction

    asked = "+".join(files) if asked == "all" else asked
    wanted = {split for split in files if re.search(rf"(^|\+){re.escape(split)}($|[\[+])", asked)}
    rows = {split: JoinedRows([_json_rows(file) for file in files[split]]) for split in wanted}
    sizes = {split: len(rows[split]) if split in rows else 0 for split in files}
    parts = ReadInstruction.from_spec(asked).to_absolute(sizes)
    return JoinedRows([PartOfRows(rows[part.splitname], part.from_, part.to) for part in parts])


def _after_space(head: bytes) -> bytes:
    return head.removeprefix(_BOM).lstrip(_SPACE)


def _parsed(data: bytes, path: Path, number: int, decoder: json.JSONDecoder | None = None) -> DatasetRow:
    """Parse ``data`` as a JSON object. With ``_CHECKED`` as decoder, run all checks of the first reading."""
    cause: Exception | None = None
    try:
        row = (decoder or _DECODER).decode(data.decode("utf-8"))
        if decoder and (b"\\ud" in data or b"\\uD" in data):
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        if isinstance(row, dict):
            return row
        problem = f"it is {row!r:.80}, but must be an object with a prompt"
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        problem, cause = f"byte {error.start} (0x{byte:02x}) is not UTF-8; write the file as UTF-8", error
    except UnicodeEncodeError as error:
        problem, cause = "it has half of a surrogate pair; write the whole pair", error
    except (ValueError, RecursionError) as error:
        problem, cause = f"cannot be read as json: {_reason(error)}", error
    raise DataError(f"{path}, row {number}: {problem}") from cause


def _reason(error: BaseException) -> str:
    return (
        "it is nested too deeply" if isinstance(error, RecursionError) else str(error).strip() or type(error).__name__
    )


def _distinct(pairs: list[tuple[str, Any]]) -> DatasetRow:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object: remove one"
        )
    return found


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text:.40} exceeds the range of a float")
    return value


_DECODER = json.JSONDecoder()
_CHECKED = json.JSONDecoder(object_pairs_hook=_distinct, parse_float=_finite)
_SPACES, _COMMA, _CLOSED = (re.compile(rf"[ \t\r\n]*{mark}") for mark in ("", r",[ \t\r\n]*", r"\]"))


def file_fingerprint(file: Path) -> dict[str, Any]:
    """Return name, size and content hash of a file."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"name": file.name, "bytes": os.fstat(opened.fileno()).st_size, "sha256": found}


def _changed(file: Path) -> DataError:
    fix = "start again; to change data while a run reads them, write a new file and rename it"
    return DataError(f"{file} has changed since the run opened it: {fix}")
