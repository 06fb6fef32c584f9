"""Whether the cluster section can work: names, sizes, and what an arrangement of ranks does not go together with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tutelage.config.generating import GeneratingConfig
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.sft import SFTConfig
from tutelage.config.where import at
from tutelage.errors import closest
from tutelage.layout import Layout

if TYPE_CHECKING:
    from tutelage.config.stages import AnyConfig

ROLES = ("actor", "critic", "reference", "reward", "teacher", "rollout")
DEFAULT = "default"
RUNTIME_ENV = (
    "working_dir",
    "py_modules",
    "py_executable",
    "excludes",
    "pip",
    "uv",
    "conda",
    "env_vars",
    "container",
    "image_uri",
    "worker_process_setup_hook",
    "nsight",
    "rocprof-sys",
    "mpi",
    "java_jars",
    "config",
)
"""Keys of a runtime environment that Ray itself reads, or read (Ray 2.40 to 2.60)."""


def cluster_problems(config: AnyConfig, where: Mapping[str, object]) -> list[str]:
    """One sentence for each problem, with the key, its value and the fix; none where everything runs in one process."""
    cluster = config.cluster
    problems = _rollout_problems(config, where)
    if cluster.transport != "ray":
        return problems
    for role, pool in cluster.place.items():
        if role not in ROLES:
            problems.append(f"cluster.place.{role} is not a role.{closest(role, ROLES)} Roles: {', '.join(ROLES)}")
        if pool not in cluster.pools:
            problems.append(
                f"cluster.place.{role} is {pool!r}{at(f'cluster.place.{role}', where)}, which is not a pool."
                f"{closest(pool, cluster.pools)} Pools: {', '.join(cluster.pools)}"
            )
    for role in cluster.layout:
        if role not in (*ROLES, DEFAULT):
            known = (*ROLES, DEFAULT)
            problems.append(f"cluster.layout.{role} is not a role.{closest(role, known)} Known: {', '.join(known)}")
    problems += _runtime_env_problems(config, where)
    if problems:
        return problems
    for role in ROLES:
        pool = cluster.pool_of(role)
        layout, devices = cluster.layout_of(role), cluster.pools[pool].devices
        if layout.size != devices and _asked(config, role):
            problems.append(
                f"the layout of {role} has {layout.size} ranks ({layout}), its pool {pool} has {devices} devices: make "
                "them equal, or leave cluster.layout replicate out, which fills the pool"
            )
    if cluster.restarts and not config.checkpoint.every:
        problems.append(
            f"cluster.restarts is {cluster.restarts}{at('cluster.restarts', where)} and checkpoint.every is 0: a lost "
            "group starts again from a checkpoint; set checkpoint.every"
        )
    if isinstance(config, RewardModelConfig):
        problems += _reward_model_problems(config, cluster.layout_of("reward"), where)
    if isinstance(config, SFTConfig):
        problems += _noise_problems(config, cluster.layout_of("actor"), where)
    return problems


def _noise_problems(config: SFTConfig, layout: Layout, where: Mapping[str, object]) -> list[str]:
    if config.sft.neftune_alpha is None or layout.size == layout.data:
        return []
    return [
        f"sft.neftune_alpha is {config.sft.neftune_alpha:g}{at('sft.neftune_alpha', where)} and the layout of actor "
        f"cuts its rows or its embeddings ({layout}): noise is made on replicas and FSDP shards; leave one of them out"
    ]


def _runtime_env_problems(config: AnyConfig, where: Mapping[str, object]) -> list[str]:
    """Ray takes any key, for plugins: refused is what looks like a misspelt one."""
    given, problems = config.cluster.runtime_env, []
    for key in given:
        hint = "" if key in RUNTIME_ENV else closest(key, RUNTIME_ENV)
        if hint:
            name = f"cluster.runtime_env.{key}"
            problems.append(f"{name}{at(name, where)} is nothing that Ray reads.{hint}")
    variables = given.get("env_vars", {})
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if not isinstance(value, str):
            key = f"cluster.runtime_env.env_vars.{name}"
            problems.append(f"{key} is {value!r}{at(key, where)}: Ray takes text alone, write it in quotes")
    return problems


def _rollout_problems(config: AnyConfig, where: Mapping[str, object]) -> list[str]:
    if not isinstance(config, GeneratingConfig) or config.rollout.engine != "vllm":
        return []
    mode, cluster = config.rollout.vllm.mode, config.cluster
    said = f"rollout.vllm.mode is {mode}{at('rollout.vllm.mode', where)}"
    if config.rollout.vllm.lora == "adapter" and (mode != "colocated" or not config.model.lora_rank):
        return [
            f"rollout.vllm.lora is adapter{at('rollout.vllm.lora', where)}: it needs mode colocated and "
            f"model.lora_rank above 0 (mode is {mode}, model.lora_rank {config.model.lora_rank})"
        ]
    if config.rollout.vllm.lora == "adapter" and config.model.quantize != "none":
        return [
            f"rollout.vllm.lora is adapter{at('rollout.vllm.lora', where)} and model.quantize is "
            f"{config.model.quantize}{at('model.quantize', where)}: vLLM would put the adapter on the base as it was "
            "before; use rollout.vllm.lora=merged"
        ]
    if mode == "colocated":
        if cluster.transport == "ray" and cluster.pool_of("rollout") != cluster.pool_of("actor"):
            return [f"{said}, and cluster.place puts rollout elsewhere than actor; use mode separate, or one pool"]
        return []
    if cluster.transport != "ray":
        return [f"{said}, which needs a process of its own: set cluster.transport=ray and give rollout a pool"]
    if cluster.pool_of("rollout") == cluster.pool_of("actor"):
        return [f"{said}, and rollout shares the actor's pool: add a pool and set cluster.place.rollout to it"]
    return _server_problems(config, where)


def _server_problems(config: GeneratingConfig, where: Mapping[str, object]) -> list[str]:
    """Every device of the rollout pool has an engine of its own."""
    vllm, name = config.rollout.vllm, config.cluster.pool_of("rollout")
    pool = config.cluster.pools.get(name)
    if pool is None or pool.devices == 1:
        return []
    given = {"url": vllm.url, "port": vllm.port if pool.strategy != "STRICT_SPREAD" else 0}
    return [
        f"rollout.vllm.{key} is {value}{at(f'rollout.vllm.{key}', where)} and pool {name} has {pool.devices} devices, "
        f"each with a server of its own: leave {key} out, or set cluster.pools.{name}.devices to 1"
        for key, value in given.items()
        if value
    ]


def _asked(config: AnyConfig, role: str) -> bool:
    return role in config.cluster.layout or DEFAULT in config.cluster.layout


def _reward_model_problems(config: RewardModelConfig, layout: Layout, where: Mapping[str, object]) -> list[str]:
    problems = []
    settings = config.reward_model
    if settings.folds > 1:
        problems.append(
            f"reward_model.folds is {settings.folds}{at('reward_model.folds', where)} and cluster.transport is ray: "
            "cross-validation runs in one process; use cluster.transport=local"
        )
    if settings.train_layers == 0 and layout.size > layout.replicate:
        problems.append(
            f"reward_model.train_layers is 0{at('reward_model.train_layers', where)} and the layout of reward cuts "
            f"the model ({layout}): hidden states of a frozen trunk are remembered on replicas only"
        )
    return problems
