"""The cluster section: pools and layouts by name, filled up to the devices, refused where they change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutelage.config import dump_config, load_checked, load_resolved
from tutelage.config.cluster import ClusterConfig
from tutelage.errors import ConfigError
from tutelage.layout import Layout

RAY = "cluster.transport=ray"
SERVER = ("rollout.engine=vllm", "rollout.vllm.mode=server", "cluster.place.rollout=b")


def cluster(*overrides: str) -> ClusterConfig:
    return load_checked("hh_ppo", overrides)[0].config.cluster


def test_replicas_fill_the_pool() -> None:
    section = cluster(RAY, "cluster.pools.main.devices=8", "cluster.layout.actor={shard: 2, tensor: 2}")
    assert section.layout_of("actor") == Layout(replicate=2, shard=2, tensor=2)
    assert section.layout_of("reward") == Layout(replicate=8)


def test_the_default_layout_is_every_other_roles() -> None:
    section = cluster(RAY, "cluster.pools.main.devices=2", "cluster.layout={default: {shard: 2}, critic: {tensor: 2}}")
    assert section.layout_of("actor") == Layout(shard=2)
    assert section.layout_of("critic") == Layout(tensor=2)


def test_roles_go_to_the_first_pool_unless_placed() -> None:
    section = cluster(RAY, "cluster.pools={big: {devices: 4}, small: {}}", "cluster.place.reward=small")
    assert (section.pool_of("actor"), section.pool_of("reward")) == ("big", "small")
    assert section.pools["small"].devices == 1


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cluster.pools.main.devices=4", "cluster.pools has no effect"),
        ("cluster.layout.actor.shard=2", "cluster.layout has no effect"),
        ("cluster.address=auto", "cluster.address has no effect"),
    ],
)
def test_a_key_without_effect_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cluster(override)


@pytest.mark.parametrize(
    "override", ["cluster.pools.main.devces=4", "cluster.pools={main: {devces: 4}}", "cluster.layout.actor.tensr=2"]
)
def test_an_unknown_key_of_an_entry_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a setting.*(devces|tensr)"):
        cluster(RAY, override)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("cluster.pools.main.devces=4", "cluster.pools.main.devices"),
        ("cluster.pools={Big: {devces: 4}}", "cluster.pools.Big.devices"),
        ("cluster.layout.actor.tensr=2", "cluster.layout.actor.tensor"),
        ("cluster.pols.main.devices=4", "cluster.pools.main.devices"),
        ("cluster.transprt=ray", "cluster.transport"),
    ],
)
def test_a_misspelt_key_of_an_entry_is_corrected_under_its_name(override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(RAY, override)
    assert str(error.value).endswith(f"Did you mean {meant}?")


def test_a_key_like_no_other_is_not_corrected_to_the_mapping_it_is_in() -> None:
    with pytest.raises(ConfigError) as error:
        cluster(RAY, "cluster.pools.main.xyz=1")
    assert "Did you mean" not in str(error.value)


def test_the_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    loaded, _ = load_checked("hh_ppo", [RAY, "cluster.pools={a: {devices: 4}, b: {}}", "cluster.runtime_env.pip=[x]"])
    (tmp_path / "config.yaml").write_text(dump_config(loaded.config))
    assert load_resolved(tmp_path / "config.yaml") == loaded.config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.place.actr=main"], "cluster.place.actr is not a role. Did you mean actor?"),
        (["cluster.place.reward=mian"], "which is not a pool. Did you mean main? Pools: main"),
        (["cluster.layout.actor.shard=2"], "the layout of actor has 2 ranks (shard 2), its pool main has 1 devices"),
        (["cluster.restarts=1", "checkpoint.every=0"], "a lost group starts again from a checkpoint"),
        (["rollout.engine=vllm", "rollout.vllm.mode=separate"], "rollout shares the actor's pool"),
        (
            ["rollout.engine=vllm", "cluster.pools={a: {}, b: {}}", "cluster.place.rollout=b"],
            "puts rollout elsewhere than actor",
        ),
        (
            [*SERVER, "rollout.vllm.port=8000", "cluster.pools={a: {}, b: {devices: 2}}"],
            "rollout.vllm.port is 8000 (override rollout.vllm.port=8000) and pool b has 2 devices",
        ),
        (
            [*SERVER, "rollout.vllm.url='http://h:1'", "cluster.pools={a: {}, b: {devices: 2}}"],
            "rollout.vllm.url is http://h:1 (override rollout.vllm.url='http://h:1') and pool b has 2 devices",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_key(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(RAY, *overrides)
    assert said in str(error.value)


def test_keys_of_the_runtime_environment() -> None:
    cluster(RAY, "cluster.runtime_env={pip: [x], my_plugin: {}, env_vars: {A: '1'}}")
    with pytest.raises(ConfigError, match=r"runtime_env\.working_dr .* Did you mean working_dir\?"):
        cluster(RAY, "cluster.runtime_env.working_dr=.")
    with pytest.raises(ConfigError, match=r"env_vars\.A is 1 .*write it in quotes"):
        cluster(RAY, "cluster.runtime_env.env_vars.A=1")


def test_vllm_in_a_process_of_its_own_needs_ray() -> None:
    with pytest.raises(ConfigError, match=r"set cluster\.transport=ray"):
        cluster("rollout.engine=vllm", "rollout.vllm.mode=separate")


def test_a_vllm_key_without_vllm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it needs that rollout\.engine is vllm"):
        cluster("rollout.vllm.max_num_seqs=4")
