"""A real run tells what its roles took and hold; a check does not."""

from __future__ import annotations

from tutelage.build import check_recipe
from tutelage.config import load_checked
from tutelage.reports.html import write_report
from tutelage.runfolder import read_json


def test_a_ppo_run_with_an_adapter_says_what_its_roles_take_and_share(run, ppo_overrides, capsys) -> None:
    capsys.readouterr()
    result = run("ppo", *ppo_overrides, "max_steps=1", "model.lora_rank=4")
    printed = capsys.readouterr().out
    assert printed.count("time and peak memory") == 1
    assert "held by the roles, MB" in printed
    found = read_json(result.folder / "summary.json")["resources"]
    calls = {(line["role"], line["call"]) for line in found["calls"]}
    assert calls >= {
        ("actor", "generate"),
        ("actor", "logprobs"),
        ("reference", "logprobs"),
        ("critic", "values"),
        ("reward", "score"),
        ("actor", "step"),
        ("critic", "step"),
        ("actor", "publish"),
    }
    assert all(line["peak_bytes"] > 0 and line["calls"] > 0 for line in found["calls"])
    assert sum(line["seconds"] for line in found["calls"]) < found["seconds"]
    held = found["held"]
    assert held["actor"]["weights"] > 0
    assert held["actor"]["moments"] > 0
    assert held["reference"]["weights"] == 0
    assert held["reference"]["owners"] == ["actor"]
    assert held["critic"]["moments"] > 0
    assert held["reward"]["moments"] == 0 < held["reward"]["weights"]
    (process,) = found["processes"].values()
    assert process["peak"] >= max(line["peak_bytes"] for line in found["calls"]) > process["before"] / 2 > 0
    assert "Time and peak memory" in write_report(result.folder).read_text()


def test_a_check_measures_nothing(files, tiny_llama_folder, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: sft\nname: checked\n")
    loaded, _ = load_checked(
        str(recipe),
        [f"output_dir={tmp_path}", f"model.path={tiny_llama_folder}", f"data.train={files['demonstrations']}"],
    )
    lines = check_recipe(loaded)
    assert any("steps" in line for line in lines)
    assert not any("peak" in line or "time and" in line for line in lines)
