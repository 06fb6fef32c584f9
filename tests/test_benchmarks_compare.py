"""The comparison with peers: its table by hand, its workers, its inputs, a tiny run of every row that can run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import compare
import growth
import profile_steps
import workload
from peers import inputs, table, worker, works


def row(**changes: Any) -> dict[str, Any]:
    """Three rounds: 2, 4 and 3 s of Tutelage, 10, 8 and 12 s of the peer."""
    seconds = [(2.0, 10.0), (4.0, 8.0), (3.0, 12.0)]
    rounds = [
        {"tutelage": {"seconds": a, "processor": 2 * a}, "peer": {"seconds": b, "processor": b}} for a, b in seconds
    ]
    memory = {"imports": 100_000_000, "device_peak": 0}
    return {
        "name": "dpo",
        "work": {"peer": "TRL", "goal": 3.0, "same_loss": True},
        "ready": {
            "tutelage": {"first": {"losses": [0.6931, 0.5]}, "settings": {}, "versions": {}, "once": {}},
            "peer": {"first": {"losses": [0.6935, 0.4]}, "settings": {}, "versions": {}, "once": {}},
        },
        "rounds": rounds,
        "memory": {
            "tutelage": {**memory, "peak": 350_000_000, "runs": 300_000_000},
            "peer": {**memory, "peak": 900_000_000, "runs": 700_000_000},
        },
        **changes,
    }


def test_a_row_by_hand() -> None:
    # medians 3 and 10; ratios of rounds 5, 2 and 4; 250 and 800 MB above the imports, 200 and 600 of them in the runs;
    # losses 0.6e-3 of the value apart
    assert table.comparison(row(), "elapsed") == [
        *("dpo", "TRL", "3", "10", "3.33", "2.00 - 5.00", ">= 3", "met", "250", "800", "200", "600", "yes"),
        "0.6931, 0.6935",
    ]
    assert table.comparison(row(), "processor")[2:5] == ["6", "10", "1.67"]


def test_a_goal_that_is_missed_a_loss_that_differs_and_more_memory_are_said() -> None:
    found = row(work={"peer": "TRL", "goal": 4.0, "same_loss": True})
    found["ready"]["peer"]["first"]["losses"][0] = 0.7
    found["memory"]["tutelage"]["peak"] = 1_000_000_000
    cells = table.comparison(found, "elapsed")
    assert cells[7] == "missed by 0.67"
    assert cells[8:13] == ["900", "800", "200", "600", "**no**, yes"]
    assert cells[13] == "0.6931, 0.7 **differ**"


def test_the_allocators_peak_counts_where_there_is_one() -> None:
    found = row()
    found["memory"]["tutelage"]["device_peak"] = 5_000_000
    assert table.own_bytes(found, "tutelage") == 5_000_000
    assert table.own_bytes(found, "peer") == 800_000_000
    assert table.runs_bytes(found, "tutelage") is None


def test_memory_of_the_runs_is_left_out_where_loading_could_not_be_told_apart() -> None:
    found = row()
    found["memory"]["peer"]["runs"] = None
    assert table.comparison(found, "elapsed")[8:13] == ["250", "800", "200", "", "yes"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no peak of a process")
def test_the_peak_of_the_runs_does_not_hold_what_loading_took(tmp_path: Path) -> None:
    side = tmp_path / "side.py"
    side.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(compare.__file__).parent)!r})\n"
        "from peers.wire import Job, serve\n"
        "def load(spec):\n"
        "    bytearray(200_000_000)\n"
        "    return Job(run=lambda: {'held': len(bytearray(50_000_000))}, settings={})\n"
        "serve(lambda spec: None, load)\n",
        encoding="utf8",
    )
    (tmp_path / "spec.json").write_text("{}", encoding="utf8")
    process = worker.Worker("side", [sys.executable, str(side), str(tmp_path / "spec.json")], tmp_path / "log", 60, {})
    process.reply()
    memory = process.ask("end")
    process.close()
    assert 190e6 <= memory["peak"] - memory["imports"] <= 230e6
    assert 40e6 <= memory["runs"] - memory["imports"] <= 80e6


def test_rows_are_chosen_by_name_or_by_the_start_of_it() -> None:
    assert compare.chosen(["grpo", "generation"]) == ["generation_transformers", "generation_vllm", "grpo"]
    assert compare.chosen(None)[-1] == "shares"
    with pytest.raises(SystemExit, match="gpro is no row"):
        compare.chosen(["gpro"])


def test_exponents_by_hand() -> None:
    rows = [{"value": v, "seconds": [s], "own": m} for v, s, m in ((2, 1.0, 8), (4, 2.0, 8), (16, 32.0, 16))]
    assert growth.exponents(rows, "seconds") == [None, 1.0, 2.0]
    assert growth.exponents(rows, "own") == [None, 0.0, 0.5]


def test_growth_is_a_table_and_a_figure() -> None:
    points = [("length", 64, 1.0, 8), ("length", 128, 2.0, 8), ("batch", 8, 1.0, 4), ("batch", 16, 4.0, 8)]
    shape = {"prompts": 2, "samples": 2, "tokens": 4, "tokens_in_all": 100}
    rows = [{"series": s, "value": v, "seconds": [t], "own": 1e9 * m, **shape} for s, v, t, m in points]
    lines = growth.table(rows)
    assert lines[2] == "| response tokens | 64 | 2 x 2 x 4 | 100 | 1 | 10 |  | 8000 |  |"
    assert lines[3] == "| response tokens | 128 | 2 x 2 x 4 | 100 | 2 | 20 | 1.00 | 8000 | 0.00 |"
    assert lines[5] == "| prompts | 16 | 2 x 2 x 4 | 100 | 4 | 40 | 2.00 | 8000 | 1.00 |"
    assert growth.figure(rows)[:4] == b"\x89PNG"


def test_a_worker_that_falls_silent_or_fails_ends_the_row_with_its_log_named(tmp_path: Path) -> None:
    silent = worker.Worker("side", [sys.executable, "-c", "input()"], tmp_path / "log", 0.2, {})
    with pytest.raises(worker.WorkerError, match=r"said nothing for 0 s; see .*log"):
        silent.reply()
    silent.close()
    assert silent.process.returncode is not None
    failing = worker.Worker("side", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 30, {})
    with pytest.raises(worker.WorkerError, match="ended"):
        failing.reply()
    failing.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> inputs.Source:
    scratch = tmp_path_factory.mktemp("compare")
    model = workload.build_tiny_folder(scratch / "tiny", hidden=64, layers=1)
    return inputs.Source(model, None, None, None, scratch, "float32", 1, 0, inputs.Sizes.quick())


def test_a_peer_gets_the_rows_of_the_recipe_in_its_order(source: inputs.Source) -> None:
    spec = inputs.sft(source)
    assert len(spec["data"]) == spec["rows"] == 4
    for demonstration in spec["data"]:
        asked = sum(label == -100 for label in demonstration["labels"])
        assert 0 < asked < len(demonstration["labels"]) == len(demonstration["input_ids"])
        assert demonstration["labels"][asked:] == demonstration["input_ids"][asked:]
    again = inputs.sft(source)["data"]
    assert again == spec["data"]
    tokenizer = inputs.tokenizer_of(source.model)
    written = [json.loads(line) for line in (source.scratch / "pairs.jsonl").read_text().splitlines()]
    answers = {entry["chosen"] for entry in written}
    for demonstration in spec["data"]:
        response = [token for token in demonstration["labels"] if token != -100]
        assert tokenizer.decode(response, skip_special_tokens=True).strip() in answers


def test_padding_is_told_from_the_end_of_a_text(source: inputs.Source) -> None:
    tokenizer = inputs.tokenizer_of(source.model)
    assert inputs.pad_id(tokenizer) != tokenizer.eos_token_id


def test_lengths_hold_the_shortest_and_the_longest(source: inputs.Source) -> None:
    spec = inputs.generation(source)
    low, high = source.sizes.lengths
    assert min(spec["lengths"]) == low
    assert max(spec["lengths"]) == high
    assert len(spec["lengths"]) == len(spec["data"]) == source.sizes.prompts


def test_the_profile_shares_out_every_microsecond_of_a_call() -> None:
    class Range:
        def __init__(self, name: str, us: float, children: tuple[Range, ...] = ()) -> None:
            self.name, self.cpu_children, self.time_range = name, children, self
            self.elapsed_us = lambda: us

    step = Range(
        "call: actor.step",
        100.0,
        (
            Range("aten::linear", 30.0),
            Range("autograd::engine::evaluate_function: MmBackward0", 40.0),
            Range("Optimizer.step#AdamW.step", 10.0),
        ),
    )
    generate = Range("call: actor.generate", 50.0, (Range("prefill", 10.0), Range("decode", 20.0)))
    found = profile_steps.shares([step, generate])
    assert found["actor.step"] == {"operators": 0.3, "backward": 0.4, "optimiser": 0.1, "Python and other": 0.2}
    assert found["actor.generate"] == {"prefill": 0.2, "decode": 0.4, "Python and other": 0.4}
    rows = profile_steps.breakdown({("actor", "step"): 5.0, ("actor", "generate"): 3.0}, found, whole=10.0)
    assert rows[0] == ["actor.step", "backward", "2", "20.0%"]
    assert sum(float(cells[2]) for cells in rows) == pytest.approx(10.0)
    assert rows[-1][0] == "between the calls"


PEERS = [
    pytest.param(work, id=work.name, marks=[pytest.mark.vllm] if work.peer == "vLLM" else []) for work in works.WORKS
]


@pytest.mark.slow
@pytest.mark.parametrize("work", PEERS)
def test_a_tiny_run_of_the_row(work: works.Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if work.missing():
        pytest.skip(work.missing())
    asked = ["--quick", "--threads", "1", "--only", work.name, "--out", str(tmp_path)]
    compare.main(asked)
    first = capsys.readouterr().out
    line = next(line for line in first.splitlines() if line.startswith(f"| {work.name} |"))
    assert "**differ**" not in line
    found = json.loads((tmp_path / f"{work.name}.json").read_text())
    assert len(found["rounds"]) == 1
    if work.same_loss:
        ours, theirs = table.first_losses(found) or (0.0, 1.0)
        assert ours == pytest.approx(theirs, rel=1e-3)
    compare.main(asked)
    again = capsys.readouterr()
    assert again.out == first
    assert "finished before" in again.err


@pytest.mark.slow
def test_a_tiny_growth_and_a_tiny_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "2", "4", "--group", "1", "2", "--batch", "2", "--threads", "1", "--tokens", "2"]
    growth.main(["--quick", *sizes, "--figure", str(tmp_path / "growth.png")])
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.count("| response tokens |") == 2
    profile_steps.main(["--quick", "--threads", "1", "--only", "grpo"])
    said = capsys.readouterr().out
    for part in ("prefill", "decode", "backward", "optimiser"):
        assert part in said
