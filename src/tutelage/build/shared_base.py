"""Whether the models of a run can stand on one frozen base, and their making where they do (`model.shared_base`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tutelage.build.critic import critic_obstacle, require_start
from tutelage.build.data import load_template
from tutelage.build.kit import Kit
from tutelage.engines.held import storages
from tutelage.errors import ConfigError, ModelError
from tutelage.models.heads import ScalarModel
from tutelage.models.load import load_config, load_tokenizer
from tutelage.models.shared_base import SharedModels, folder_obstacle, load_shared_base
from tutelage.rewards.model import same_tokenizer

ROLES = ("actor", "reference", "critic")
"""What shares the base in any case, besides the reward models."""


def reward_folders(cfg: Any) -> list[str]:
    """The reward models that may be adapters on the base."""
    if not hasattr(cfg, "reward") or cfg.reward.shared_base is False:
        return []
    return list(dict.fromkeys([*([cfg.reward.model] if cfg.reward.model else []), *cfg.reward.ensemble]))


# ---- before anything is loaded


def require_shared_base(cfg: Any, roles: tuple[str, ...]) -> None:
    """roles: those that the stage may use.

    Raises ConfigError for a critic that starts elsewhere, for roles in different processes, for weights that are cut
    over ranks, and for a reward model that is told to be on the base and cannot.
    """
    if not cfg.model.shared_base or not hasattr(cfg, "reward"):
        return
    start = getattr(cfg, "critic", None)
    if start is not None and start.init not in ("auto", "reward", "policy"):
        raise ConfigError(
            f"critic.init is {start.init} and model.shared_base is true: a critic on the shared base starts from it, "
            "or from the reward model's adapter",
            fix="set critic.init to auto, reward or policy, or model.shared_base to false",
        )
    folders = reward_folders(cfg)
    sharing = [role for role in roles if role in ROLES or (role == "reward" and folders)]
    if cfg.cluster.transport == "ray":
        _require_one_place(cfg, sharing)
    if cfg.reward.shared_base:
        for folder in folders:
            if (obstacle := _obstacle(folder, cfg.model.path)) is not None:
                raise _refused(folder, obstacle)


def _require_one_place(cfg: Any, sharing: list[str]) -> None:
    cluster = cfg.cluster
    own = "" if cfg.reward.shared_base else ", reward.shared_base to false where the reward model alone is elsewhere"
    for role in sharing:
        if cluster.pool_of(role) != cluster.pool_of("actor"):
            raise ConfigError(
                f"model.shared_base is true, and {role} is in pool {cluster.pool_of(role)}, the actor in "
                f"{cluster.pool_of('actor')}: weights are shared inside a process",
                fix=f"put {', '.join(sharing)} into one pool (cluster.place){own}, or model.shared_base to false",
            )
        layout = cluster.layout_of(role)
        if layout != cluster.layout_of("actor"):
            raise ConfigError(
                f"model.shared_base is true, and the layout of {role} is {layout}, the actor's "
                f"{cluster.layout_of('actor')}: ranks that share weights are arranged alike",
                fix="give them one layout (cluster.layout.default), or set model.shared_base to false",
            )
        if layout.size != layout.replicate or cluster.settings_of(role).offload:
            what = "offload" if layout.size == layout.replicate else str(layout)
            raise ConfigError(
                f"model.shared_base is true, and the layout of {role} is {what}: FSDP and the other cuts own the "
                "weights they cut, so one weight cannot be in two models",
                fix="use replicas alone (cluster.layout with replicate), or set model.shared_base to false",
            )


def _obstacle(folder: str, policy: str) -> str | None:
    """Why a reward model cannot be an adapter on the policy's base, as far as it shows before a weight is read."""
    obstacle = folder_obstacle(folder, load_config(policy))
    if obstacle is not None:
        return obstacle
    own, theirs = load_tokenizer(policy), load_tokenizer(folder)
    return None if same_tokenizer(own, theirs) else "it has another tokenizer than the policy"


def _refused(folder: str, obstacle: str) -> ConfigError:
    return ConfigError(
        f"reward.shared_base is true, but {folder} cannot be an adapter on the policy's base: {obstacle}",
        fix="train the reward model on model.path with model.lora_rank above 0, or set reward.shared_base to false: it "
        "is then a model of its own",
    )


# ---- where the roles run


def shared_models(kit: Kit) -> SharedModels:
    """The models of this process; what stands on the base, and what cannot, is noted.

    Raises as `models.shared_base.load_shared_base`, and ModelError for a reward model that is told to be on the base
    and was trained on another one.
    """
    cfg = kit.cfg
    found = {folder: _obstacle(folder, cfg.model.path) for folder in reward_folders(cfg) if "reward" in kit.names}
    fitting = {folder: load_template(folder, None).tokenizer for folder, why in found.items() if why is None}
    made = load_shared_base(
        cfg.model,
        kit.template.tokenizer,
        rewards=fitting,
        critic=partial(critic_folder, kit) if "critic" in kit.names else None,
        seed=cfg.seed,
        device=kit.device,
    )
    obstacles = {folder: why for folder, why in found.items() if why is not None} | dict(made.obstacles)
    for folder, why in obstacles.items():
        if cfg.reward.shared_base:
            refused = _refused(folder, why)
            raise ModelError(refused.what, fix=refused.fix)
        kit.notes.append(f"reward model {folder} is a model of its own: {why}")
    for folder, caution in made.cautions.items():
        kit.notes.append(f"reward model {folder}: {caution}")
    on_it = [*(role for role in ROLES if role in kit.names), *(f"reward model {folder}" for folder in made.rewards)]
    size = sum(s.nbytes() for weight in made.base().values() for s in storages(weight)) / 1e6
    kit.notes.append(f"one frozen base of {size:.1f} MB for {', '.join(on_it)}")
    return made


def critic_folder(kit: Kit, rewards: Mapping[str, ScalarModel]) -> str | None:
    """The reward model whose adapter and head the critic copies; None: a new adapter and a new head."""
    wanted, folder = kit.cfg.critic.init, kit.cfg.reward.model
    reward = None if folder is None else rewards.get(folder)
    obstacle = critic_obstacle(kit, reward)
    if folder is not None and reward is None:
        obstacle = "the reward model is not an adapter on the policy's base"
    require_start(wanted, obstacle)
    starts = wanted != "policy" and obstacle is None
    why = f" ({obstacle})" if wanted == "auto" and obstacle is not None else ""
    kit.notes.append(
        "critic starts from the reward model's adapter and head, copied"
        if starts
        else f"critic starts from the base with a new adapter and a new head{why}"
    )
    return folder if starts else None
