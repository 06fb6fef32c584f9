"""Whether what a recipe asks for can be started: told before a weight is loaded or a process is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from tutelage.build.data import StageData
from tutelage.build.device import device
from tutelage.build.generation import ROLLOUT, sampling
from tutelage.build.layouts import require_layouts
from tutelage.config import AnyConfig, GeneratingConfig
from tutelage.config.vllm import VLLMConfig
from tutelage.errors import ClusterError, ConfigError, ModelError
from tutelage.evals.answers import first_prompts
from tutelage.models.load import load_config
from tutelage.models.paths import base_of_adapter
from tutelage.models.quantize import obstacle, require_bitsandbytes

PACKAGES = frozenset({"pip", "uv", "conda", "image_uri", "container"})
"""Keys of a runtime environment that may bring packages which are not installed here."""


def require_extras(cfg: AnyConfig) -> None:
    """Raises MissingExtraError for Ray, vLLM or bitsandbytes that is not installed here, where it is needed here."""
    if cfg.cluster.transport == "ray":
        from tutelage.transport.ray import require_installed

        require_installed()
    if _serves(cfg) and runs_here(cfg) and not PACKAGES & cfg.cluster.runtime_env.keys():
        from tutelage.rollout.vllm.checks import require_vllm

        require_vllm()
    if cfg.model.quantize != "none" and runs_here(cfg) and not PACKAGES & cfg.cluster.runtime_env.keys():
        require_bitsandbytes()


def require_ready(cfg: AnyConfig, data: StageData, roles: tuple[str, ...]) -> None:
    """Raises ModelError, ConfigError, ClusterError or RolloutError for what building would refuse."""
    require_embeddings(cfg, data)
    require_quantizable(cfg)
    require_layouts(cfg, roles)
    require_code(cfg)
    require_room(cfg, roles)
    if _serves(cfg):
        require_engine(cfg, data)


def require_embeddings(cfg: AnyConfig, data: StageData) -> None:
    """The tokenizer of the model folder against the embeddings that its configuration names.

    An adapter may bring embeddings of its own and is left to the loading.
    """
    path, tokens = cfg.model.path, len(data.template.tokenizer)
    embeddings = None if base_of_adapter(path) else getattr(load_config(path), "vocab_size", None)
    if embeddings is not None and tokens > embeddings:
        raise ModelError(
            f"the tokenizer of {path} has {tokens} tokens, the model {embeddings} embeddings",
            fix="use the tokenizer that the model was trained with",
        )


def require_quantizable(cfg: AnyConfig) -> None:
    """Looks at the architecture alone: a model without storage is made of the configuration."""
    if cfg.model.quantize == "none" or base_of_adapter(cfg.model.path):
        return
    with torch.device("meta"):
        why = obstacle(AutoModel.from_config(load_config(cfg.model.path)))
    if why is not None:
        raise ModelError(f"{cfg.model.path} cannot be quantised: {why}", fix="set model.quantize to none")


def require_code(cfg: AnyConfig) -> None:
    """What a runtime environment ships from here must be here."""
    env = cfg.cluster.runtime_env
    if cfg.cluster.transport == "local":
        return
    shipped = {"working_dir": env.get("working_dir"), "py_modules": env.get("py_modules")}
    for key, value in shipped.items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str) and "://" not in path and not Path(path).expanduser().exists():
                raise ConfigError(
                    f"cluster.runtime_env.{key} is {path}, which does not exist",
                    fix="give a folder or an archive of this machine, or a URI",
                )


def require_room(cfg: AnyConfig, roles: tuple[str, ...]) -> None:
    """For a Ray instance that is started for the run: what the pools reserve, against all that this machine has."""
    from tutelage.transport.ray import connected

    cluster = cfg.cluster
    if cluster.transport == "local" or cluster.address is not None or connected():
        return
    exists = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    asked = dict.fromkeys(exists, 0.0)
    used = {name: cluster.pools[name] for name in dict.fromkeys(cluster.pool_of(role) for role in roles)}
    for pool in used.values():
        on_gpu = pool.kind == "gpu" or (pool.kind == "auto" and exists["GPU"] > 0)
        share = {"GPU": pool.per_device, "CPU": pool.cores} if on_gpu else {"CPU": pool.per_device}
        for kind, amount in share.items():
            asked[kind] += pool.devices * amount
    if any(asked[kind] > exists[kind] + 1e-9 for kind in exists):
        devices = ", ".join(f"{name} {pool.devices}" for name, pool in used.items())
        raise ClusterError(
            f"the pools (devices: {devices}) ask for {_amounts(asked)} together; a Ray instance on this machine has "
            f"{_amounts(exists)}",
            fix="lower cluster.pools.NAME.devices or per_device, or set cluster.address to a larger cluster",
        )


def _amounts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{kind} {amount:g}" for kind, amount in amounts.items())


def require_engine(cfg: Any, data: StageData) -> None:
    """What vLLM does not serve: the model, the sampling, a context that is too small, a port that is taken."""
    from tutelage.rollout.vllm.checks import require_free_port, require_sampling, require_servable

    settings: VLLMConfig = cfg.rollout.vllm
    require_servable(load_config(cfg.model.path), settings, engine_device(cfg))
    require_sampling(sampling(cfg))
    require_context(cfg, data)
    if settings.port and runs_here(cfg):
        require_free_port(settings.port)


def require_context(cfg: Any, data: StageData) -> None:
    """Every prompt and its response must fit into rollout.vllm.max_model_len."""
    limit = cfg.rollout.vllm.max_model_len
    if limit is None:
        return
    asked = list(data.prepared.train.tokens)
    if data.prepared.eval is not None:
        asked += first_prompts(data.prepared.eval, cfg.evaluation.prompts).tokens
    longest = max(len(tokens) for tokens in asked)
    needed = longest + cfg.rollout.max_new_tokens
    if needed > limit:
        raise ConfigError(
            f"rollout.vllm.max_model_len is {limit}; the longest prompt has {longest} tokens, and with "
            f"rollout.max_new_tokens {cfg.rollout.max_new_tokens} that is {needed}",
            fix=f"raise rollout.vllm.max_model_len to at least {needed}, or lower rollout.max_new_tokens or "
            "data.max_prompt_tokens",
        )


def engine_device(cfg: Any) -> str:
    """Where rollouts are generated, as far as it is known here; cuda where another machine decides."""
    if cfg.cluster.transport == "local":
        return device()
    kind = cfg.cluster.pools[cfg.cluster.pool_of(ROLLOUT)].kind
    if kind != "auto":
        return "cuda" if kind == "gpu" else "cpu"
    return device() if runs_here(cfg) else "cuda"


def runs_here(cfg: AnyConfig) -> bool:
    """Whether all roles run on this machine."""
    return cfg.cluster.transport == "local" or cfg.cluster.address is None


def _serves(cfg: AnyConfig) -> bool:
    return isinstance(cfg, GeneratingConfig) and cfg.rollout.engine == "vllm"
