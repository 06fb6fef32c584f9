"""A run goes on with another cluster section, and with nothing else changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tutelage.build.paths import with_full_paths
from tutelage.build.run import keep_cluster, resume_run
from tutelage.config import dump_config, load_checked, load_resolved
from tutelage.config.resuming import load_to_resume
from tutelage.errors import ConfigError
from tutelage.reports.metrics_log import MetricsLog, read_events

RECIPE = """\
algorithm: ppo
model: {path: model}
data: {train: ppo.jsonl}
reward: {rules: [{function: length_range(low=2)}]}
checkpoint: {every: 2}
cluster:
  transport: ray
  pools: {main: {devices: 2, kind: cpu, strategy: STRICT_SPREAD}}
  layout: {default: {shard: 2}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config.yaml of a run."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.yaml"
    path.write_text(dump_config(load_checked(str(tmp_path / "recipe.yaml"))[0].config))
    return path


def test_a_run_goes_on_as_it_began(config: Path) -> None:
    assert load_to_resume(config) == (load_resolved(config), [])


def test_keys_of_the_cluster_can_be_set_and_what_changed_is_said(config: Path) -> None:
    cfg, changes = load_to_resume(config, ["cluster.pools.main.strategy=PACK", "cluster.address=auto"])
    before = load_resolved(config)
    assert cfg.cluster.pools["main"].strategy == "PACK"
    assert cfg.model_copy(update={"cluster": before.cluster}) == before
    assert changes == [
        "cluster.address is auto, it was None",
        "cluster.pools.main.strategy is PACK, it was STRICT_SPREAD",
    ]


def test_what_is_set_to_what_it_was_is_no_change(config: Path) -> None:
    assert load_to_resume(config, ["cluster.pools.main.devices=2"])[1] == []


def test_another_layout_fits_the_same_checkpoint_and_what_it_adds_is_said(config: Path) -> None:
    _, changes = load_to_resume(config, ["cluster.pools.main.devices=4", "cluster.layout.actor={shard: 4}"])
    assert "cluster.pools.main.devices is 4, it was 2" in changes
    assert "cluster.layout.actor.shard is 4, it was not set" in changes


@pytest.mark.parametrize("other", ["optim.lr=1e-3", "max_steps=9", "clusters.address=auto", "cluster_address=auto"])
def test_anything_else_is_refused(config: Path, other: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{other} cannot be changed in a run that goes on") as error:
        load_to_resume(config, ["cluster.restarts=1", other])
    assert "only keys of cluster can be set" in error.value.fix


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.pools.main.devices=3"], "the layout of actor has 2 ranks"),
        (["cluster.pool.main.devices=1"], "cluster.pool.main.devices is not a setting"),
        (["cluster.transport=local", "cluster.restarts=1"], "cluster.restarts has no effect in this run"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(config: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_to_resume(config, overrides)


def test_keys_without_effect_that_the_run_had_do_not_stand_in_the_way(config: Path) -> None:
    cfg, changes = load_to_resume(config, ["cluster.transport=local"])
    assert cfg.cluster.transport == "local"
    assert changes == ["cluster.transport is local, it was ray"]


def test_resume_refuses_before_it_looks_for_a_checkpoint(config: Path) -> None:
    with pytest.raises(ConfigError, match="seed=1 cannot be changed"):
        resume_run(config.parent, "plain", ["seed=1"])


def test_the_run_folder_keeps_the_cluster_it_goes_on_with(config: Path) -> None:
    cfg, changes = load_to_resume(config, ["cluster.pools.main.strategy=PACK"])
    told: list[tuple[str, str]] = []
    controller = SimpleNamespace(
        folder=config.parent,
        done=2,
        log=MetricsLog(config.parent),
        display=SimpleNamespace(event=lambda kind, message: told.append((kind, message))),
    )
    keep_cluster(cfg, changes, controller)
    assert load_to_resume(config) == (cfg, [])
    assert told == [("cluster", changes[0])]
    assert [(e["step"], e["kind"], e["message"]) for e in read_events(config.parent)] == [(2, *told[0])]


def test_ranks_with_another_working_folder_get_full_paths(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    cfg = load_resolved(config)
    full = with_full_paths(cfg)
    assert (full.model.path, full.output_dir) == (str(tmp_path / "model"), str(tmp_path / "runs"))
    hub = cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": "gpt2"})})
    assert with_full_paths(hub).model.path == "gpt2"
    alone = load_to_resume(config, ["cluster.transport=local"])[0]
    assert with_full_paths(alone) is alone
