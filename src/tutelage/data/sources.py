"""Where rows come from: JSON lines, JSON, CSV, Parquet and Arrow files, Arrow folders, and hub names.

Every reader returns plain dictionaries.  Rows are numbered from 1 everywhere a person sees a number.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from tutelage.errors import DataError, closest

Row = dict[str, Any]

KINDS = "jsonl, jsonl.gz, json, csv, parquet, an Arrow folder (datasets.save_to_disk), or a hub name NAME:split"
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)*(:[^/:]+(\[.*\])?)?$")
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Table:
    """Rows as read, the source they came from, and the SHA-256 of their content (`fingerprint_rows`)."""

    rows: list[Row]
    source: str
    fingerprint: str


def read_rows(source: str, *, columns: Mapping[str, str] = _NO_COLUMNS, limit: int | None = None) -> Table:
    """Read a source into rows.

    source   a path; `folder:split` for a folder of split files or an Arrow folder of several splits; or a hub name:
             `NAME`, `NAME:split`, `NAME/config:split`, `NAME/data_dir:split`.  A path that exists wins over a hub name.
    columns  {name in the file: name wanted}.
    limit    the first `limit` rows only.
    Raises DataError: no such source, unreadable content (with file and line), no rows, an unknown column.
    """
    rows = list(islice(_open(source, limit), limit))
    if not rows:
        raise DataError(f"{source} holds no rows", fix="give a file with at least one row")
    rows = rename_columns(rows, columns, source)
    return Table(rows, source, fingerprint_rows(rows))


def fingerprint_rows(rows: Iterable[Row]) -> str:
    """SHA-256 over the rows as sorted-key JSON, one per line: the same for the same content in any container."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def rename_columns(rows: list[Row], columns: Mapping[str, str], source: str) -> list[Row]:
    """Rows with `columns` applied.  Raises DataError for a name that no row has, or one that would be overwritten."""
    if not columns:
        return rows
    present = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        if name not in present:
            raise DataError(
                f"data.columns names {name!r}, which {source} does not have; it has {', '.join(present)}."
                f"{closest(name, present)}",
                fix="data.columns is {name in the file: name Tutelage knows}",
            )
    kept = [columns.get(name, name) for name in present]
    clash = next((name for name in kept if kept.count(name) > 1), None)
    if clash is not None:
        raise DataError(
            f"data.columns would give {source} two columns named {clash!r}",
            fix=f"rename the other {clash!r} too, to a name that is not used",
        )
    return [{columns.get(name, name): value for name, value in row.items()} for row in rows]


def _open(source: str, limit: int | None) -> Iterator[Row]:
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path, None)
    stem, _, split = source.partition(":")
    folder = Path(stem).expanduser()
    if split and folder.is_dir():
        return _read_folder(folder, split)
    if _looks_local(source):
        raise _missing(path)
    return _read_hub(stem, split or None, limit)


def _looks_local(source: str) -> bool:
    """A path by its look: rooted, a known suffix, or below a folder that exists here."""
    if source.startswith((".", "/", "~")) or _suffix(Path(source)) in _READERS:
        return True
    first = Path(source).parts[0] if Path(source).parts else ""
    return not _HUB_NAME.match(source) or ("/" in source and Path(first).is_dir())


def _missing(path: Path) -> DataError:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if folder != path.parent:
        return DataError(f"{path} does not exist: there is no folder {path.parent}", fix=f"data is one of {KINDS}")
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {folder / near[0]}?" if near else ""
    return DataError(f"{path} does not exist.{hint}", fix=f"data is one of {KINDS}")


def _suffix(path: Path) -> str:
    """`.jsonl` for a.jsonl and a.jsonl.gz."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _read_file(path: Path) -> Iterator[Row]:
    reader = _READERS.get(_suffix(path))
    if reader is None:
        raise DataError(f"{path} is not a kind of data file that can be read", fix=f"data is one of {KINDS}")
    return reader(path)


def _text(path: Path) -> TextIO:
    """Text of a file, decompressed by its first two bytes rather than by its name."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    if zipped:
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read: {error}", fix="check that the file is complete and UTF-8 encoded")


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {type(value).__name__}, not an object", fix="a row is a JSON object of columns")
    return value


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with _text(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(_json(line, path, number), f"{path}, line {number}")
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read after line {number}: {error}", fix="fetch the file again") from error


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number}, column {error.colno} is not JSON: {error.msg}: {line.strip()[:80]!r}",
            fix="a .jsonl file holds one JSON object a line",
        ) from error


def _read_json(path: Path) -> Iterator[Row]:
    try:
        with _text(path) as file:
            content = file.read()
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise _unreadable(path, error) from error
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and content.lstrip().startswith("{"):
            yield from _read_jsonl(path)
            return
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno} is not JSON: {error.msg}",
            fix="a .json file holds a list of objects, an object of columns, or {'data': [...]}",
        ) from error
    yield from _json_rows(value, path)


def _json_rows(value: Any, path: Path) -> Iterator[Row]:
    if isinstance(value, dict) and isinstance(value.get("data"), list) and len(value) == 1:
        value = value["data"]
    if isinstance(value, list):
        for number, item in enumerate(value, 1):
            yield _object(item, f"{path}, row {number}")
        return
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        raise DataError(
            f"{path} is neither a list of objects nor an object of columns",
            fix="a .json file holds a list of objects, an object of columns, or {'data': [...]}",
        )
    lengths = {name: len(column) for name, column in value.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(f"{path} has columns of different length ({told})", fix="give every column one value a row")
    for values in zip(*value.values(), strict=True):
        yield dict(zip(value, values, strict=True))


def _read_csv(path: Path) -> Iterator[Row]:
    old_limit = csv.field_size_limit(sys.maxsize)
    try:
        with _text(path) as file:
            reader = csv.DictReader(file, delimiter="\t" if _suffix(path) == ".tsv" else ",", strict=True)
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num} has another number of fields than the header "
                        f"({len(reader.fieldnames or [])})",
                        fix='put text with commas or line breaks between double quotes (")',
                    )
                rows.append(dict(row))
    except (csv.Error, UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise _unreadable(path, error) from error
    finally:
        csv.field_size_limit(old_limit)
    yield from rows


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _read_arrow(path: Path) -> Iterator[Row]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            try:
                batches = list(pyarrow.ipc.open_stream(file))
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(file)
                batches = [table.get_batch(index) for index in range(table.num_record_batches)]
            for batch in batches:
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


def _read_folder(folder: Path, split: str | None) -> Iterator[Row]:
    """An Arrow folder, or a folder with one data file per split."""
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        return _read_arrow_folder(folder, split)
    files = {entry.name: entry for entry in sorted(folder.iterdir()) if _suffix(entry) in _READERS and entry.is_file()}
    stems = {name: name.split(".", 1)[0] for name in files}
    wanted = [name for name in files if split is None or stems[name] == split]
    if len(wanted) == 1:
        return _read_file(files[wanted[0]])
    held = ", ".join(files) or "no data file"
    if split is None:
        raise DataError(f"{folder} is a folder that holds {held}", fix=f"name one file, or {folder}:SPLIT")
    raise DataError(
        f"{folder} has {len(wanted)} files for the split {split!r}; it holds {held}.{closest(split, stems.values())}",
        fix="name one file",
    )


def _read_arrow_folder(folder: Path, split: str | None) -> Iterator[Row]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder} is not a readable Arrow folder: {error}", fix="save it again") from error
    if isinstance(loaded, datasets.DatasetDict):
        names = list(loaded)
        if split is None and len(names) == 1:
            split = names[0]
        if split not in loaded:
            seen = "no split was named" if split is None else f"the split {split!r} is not in it"
            raise DataError(
                f"{folder} holds the splits {', '.join(names)}; {seen}.{closest(split or '', names)}",
                fix=f"write {folder}:{names[0] if names else 'SPLIT'}",
            )
        loaded = loaded[split]
    return iter(loaded)


def _read_hub(name: str, split: str | None, limit: int | None) -> Iterator[Row]:
    """`NAME`, `NAME/config` or `NAME/data_dir` from the hub, or from its local cache when offline."""
    import datasets

    parts = name.split("/")
    repository, rest = "/".join(parts[:2]), "/".join(parts[2:])
    wanted = split or "train"
    attempts: list[dict[str, str]] = [{"name": rest}, {"data_dir": rest}] if rest else [{}]
    error: Exception | None = None
    for attempt in attempts:
        try:
            loaded = datasets.load_dataset(repository, split=wanted, **attempt)
        except ValueError as refused:  # a configuration of that name does not exist: it may be a folder
            error = refused
            continue
        except Exception as failed:
            error = failed
            break
        return iter(loaded if limit is None else loaded.select(range(min(limit, len(loaded)))))
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise DataError(
        f"{name}:{wanted} is neither a file here nor a data set that could be loaded from the hub "
        f"({type(error).__name__}: {reason})",
        fix="without a network, or for your own data, put a local path in its place: data.train=path/to/file.jsonl "
        f"({KINDS})",
    ) from error
