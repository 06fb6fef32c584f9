from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tutelage.errors import CheckpointError, DataError
from tutelage.reports.metrics_log import MetricsLog, read_events, read_metrics, write_bytes


def test_a_record_is_one_json_line_with_step_and_time(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.log(3, {"kl/sequence": 0.25, "rollout/tokens": 40})
    raw = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert raw.endswith("\n")
    assert raw.count("\n") == 1
    record = json.loads(raw)
    assert list(record) == ["step", "time", "kl/sequence", "rollout/tokens"]
    assert record["step"] == 3
    assert record["kl/sequence"] == 0.25


def test_a_record_is_on_disk_before_close(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"a": 1.0})
    assert read_metrics(tmp_path)[0]["a"] == 1.0
    log.close()


def test_values_that_are_not_finite_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"])
    assert record["b"] == math.inf
    assert record["c"] == -math.inf


def test_a_message_that_reads_nan_stays_text(tmp_path: Path) -> None:
    MetricsLog(tmp_path).event(1, "note", "NaN")
    assert read_events(tmp_path)[0]["message"] == "NaN"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n{"step": 3, "a"')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_a_torn_last_line_is_removed_on_opening_and_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2, "a": \xc3')
    log = MetricsLog(tmp_path)
    log.log(2, {"a": 5.0})
    assert [(r["step"], r["a"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 5.0)]
    (event,) = read_events(tmp_path)
    assert event["step"] == 1
    assert "metrics.jsonl" in event["message"]


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}')
    MetricsLog(tmp_path).log(2, {"a": 2.0})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    assert read_events(tmp_path) == []


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2"):
        read_metrics(tmp_path)


def test_a_broken_last_line_that_ends_in_a_newline_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)


def test_kill_9_between_writes_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from tutelage.reports.metrics_log import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for s in range(1, 6): log.log(s, {'a': float(s)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_truncate_after_drops_later_steps_of_both_files_and_goes_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.log(step, {"a": float(step), "b": math.nan})
        log.event(step, "note", f"step {step}")
    assert log.truncate_after(3) == 2
    log.log(4, {"a": 40.0})
    records = read_metrics(tmp_path)
    assert [(r["step"], r["a"]) for r in records] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert math.isnan(records[0]["b"])
    assert [e["step"] for e in read_events(tmp_path)] == [1, 2, 3]


def test_truncate_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"a": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert log.truncate_after(1) == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_checkpoint_error_with_path_and_fix(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No space left on device") as caught:
        log.log(1, {"a": 1.0})
    assert "free space" in caught.value.fix
    assert isinstance(caught.value, OSError)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to grow any file of this process past `size`: a write first comes short, then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"a": 1.0})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with file_size_limit(len(whole) + 10), pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        log.log(2, {"a": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    log.log(2, {"a": 2.0})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_write_bytes_keeps_the_old_content_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_bytes(path, b"old")
    with file_size_limit(4), pytest.raises(CheckpointError, match=r"page\.html"):
        write_bytes(path, b"much longer than four")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        MetricsLog(tmp_path / "file" / "run")


def test_the_error_names_the_reason_of_the_system(tmp_path: Path) -> None:
    from tutelage.reports.metrics_log import write_error

    error = write_error(tmp_path / "x", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert "Read-only file system" in str(error)
    assert "output_dir" in error.fix
