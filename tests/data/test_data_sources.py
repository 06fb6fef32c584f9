"""Sources: every container gives the same rows; what is wrong is named with file and line."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tutelage.data.sources import fingerprint_rows, read_rows
from tutelage.errors import DataError

ROWS = [{"prompt": "Hi", "completion": 'yes, "you"'}, {"prompt": "two\nlines", "completion": "nö"}]


def _jsonl(path: Path) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def _write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            return _jsonl(path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(_jsonl(folder / "rows.jsonl").read_bytes()))
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            path.write_text('prompt,completion\nHi,"yes, ""you"""\n"two\nlines",nö\n', encoding="utf-8")
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case "arrow_folder":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow_folder"])
def test_every_container_gives_the_same_rows_and_fingerprint(tmp_path: Path, kind: str) -> None:
    table = read_rows(str(_write(tmp_path, kind)))
    assert table.rows == ROWS
    assert table.fingerprint == fingerprint_rows(ROWS)
    assert read_rows(str(_write(tmp_path, kind)), limit=1).rows == ROWS[:1]


def test_fingerprint_follows_content_alone() -> None:
    swapped = [{"completion": row["completion"], "prompt": row["prompt"]} for row in ROWS]
    assert fingerprint_rows(swapped) == fingerprint_rows(ROWS)
    assert fingerprint_rows([*ROWS[1:], *ROWS[:1]]) != fingerprint_rows(ROWS)
    assert fingerprint_rows([{"a": 1}]) == hashlib.sha256(b'{"a": 1}\n').hexdigest()


@pytest.mark.parametrize(
    "value", [{"data": ROWS}, {"prompt": ["Hi", "two\nlines"], "completion": ['yes, "you"', "nö"]}]
)
def test_json_objects(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    assert read_rows(str(path)).rows == ROWS


def test_json_file_that_holds_json_lines(tmp_path: Path) -> None:
    assert read_rows(str(_jsonl(tmp_path / "a.json"))).rows == ROWS


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(_jsonl(tmp_path / "b.jsonl").read_bytes()))
    assert read_rows(str(path)).rows == ROWS


def test_folder_with_one_file_per_split(tmp_path: Path) -> None:
    _jsonl(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").write_text('{"text": "x"}')
    assert read_rows(f"{tmp_path}:train").rows == ROWS
    assert read_rows(f"{tmp_path}:test").rows == [{"text": "x"}]
    with pytest.raises(DataError, match=r"0 files for the split 'trian'.*Did you mean train"):
        read_rows(f"{tmp_path}:trian")
    with pytest.raises(DataError, match=r"holds test.jsonl, train.jsonl"):
        read_rows(str(tmp_path))


def test_arrow_folder_of_several_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(str(tmp_path / "d"))
    assert read_rows(f"{tmp_path / 'd'}:test").rows == ROWS[:1]
    with pytest.raises(DataError, match="holds the splits train, test; no split was named"):
        read_rows(str(tmp_path / "d"))


def test_bad_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": }\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3, column 10 is not JSON"):
        read_rows(str(path))
    path.write_text('{"text": "a"}\n[1]\n')
    with pytest.raises(DataError, match=r"line 2 is list, not an object"):
        read_rows(str(path))


def test_cut_gzip_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(
        gzip.compress(b'{"text": "' + bytes(range(32, 127)).replace(b'"', b"").replace(b"\\", b"") * 50)[:-30]
    )
    with pytest.raises(DataError, match="cannot be read after line"):
        read_rows(str(path))


def test_csv_row_with_too_many_or_too_few_fields_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for broken in ("x,y,z", "x"):
        path.write_text(f"prompt,completion\na,b\n{broken}\n")
        with pytest.raises(DataError, match=r"line 3 has another number of fields than the header \(2\)"):
            read_rows(str(path))


def test_long_csv_field(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "a" * 200_000 + "\n")
    assert len(read_rows(str(path)).rows[0]["text"]) == 200_000


def test_missing_file_names_the_closest_sibling(tmp_path: Path) -> None:
    _jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"trian\.jsonl does not exist. Did you mean .*train\.jsonl\?"):
        read_rows(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        read_rows(str(tmp_path / "nowhere" / "a.jsonl"))


def test_empty_file_and_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(DataError, match="not a kind of data file"):
        read_rows(str(tmp_path / "a.xlsx"))


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = str(_jsonl(tmp_path / "a.jsonl"))
    assert read_rows(path, columns={"completion": "answer"}).rows[0] == {"prompt": "Hi", "answer": 'yes, "you"'}
    swapped = read_rows(path, columns={"completion": "prompt", "prompt": "completion"}).rows[0]
    assert swapped == {"completion": "Hi", "prompt": 'yes, "you"'}
    with pytest.raises(DataError, match=r"'completoin'.*has prompt, completion\. Did you mean completion"):
        read_rows(path, columns={"completoin": "answer"})
    with pytest.raises(DataError, match="two columns named 'prompt'"):
        read_rows(path, columns={"completion": "prompt"})


def test_hub_name_split_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def load(path: str, *, split: str, **rest: str) -> datasets.Dataset:
        calls.append({"repository": path, "split": split, **rest})
        if "name" in rest:
            raise ValueError("BuilderConfig 'harmless-base' not found. Available: ['default']")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_rows("Anthropic/hh-rlhf/harmless-base:test", limit=1).rows == ROWS[:1]
    assert calls[-1] == {"repository": "Anthropic/hh-rlhf", "split": "test", "data_dir": "harmless-base"}
    assert read_rows("some/name").rows == ROWS
    assert calls[-1] == {"repository": "some/name", "split": "train"}
    read_rows("some/name:train[:1%]")
    assert calls[-1] == {"repository": "some/name", "split": "train[:1%]"}


def test_hub_name_offline_says_how_to_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"ConnectionError: Couldn't reach the hub") as caught:
        read_rows("Anthropic/hh-rlhf/harmless-base:train")
    assert "data.train=path/to/file.jsonl" in caught.value.fix
