"""What build knows of preference optimisation: its policy, its kinds of reference, its evaluation, in this run."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, cast

import torch

from tutelage import runfolder
from tutelage.algorithms.preference import preference_loss
from tutelage.build import roles
from tutelage.build.data import StageData
from tutelage.build.kit import Kit
from tutelage.checkpoints import Checkpoints
from tutelage.config.dpo import DPOConfig, has_reference
from tutelage.data.chat import ChatTemplate
from tutelage.data.reference_cache import ReferenceTable, require_same_key, rows_fingerprint
from tutelage.engines.engine import ModelEngine
from tutelage.engines.following import FollowingWeights
from tutelage.errors import ConfigError, RolloutError
from tutelage.evals.evaluation import Evaluator, HeldOutLoss
from tutelage.evals.held_out_pairs import DataDistance, MovingHeldOutPairs, sample_of
from tutelage.math.keyed import keyed_permutation, sample_key
from tutelage.models.paths import local_path
from tutelage.roles.actor import Actor
from tutelage.roles.cached_reference import CachedReference
from tutelage.roles.reference import Reference
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Pairs, Ragged, Sequences

PAIRS_A_CALL = 64
"""Pairs whose reference logprobs are asked for at once, so that progress is seen."""
PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


# ---- roles


def policy(kit: Kit, new_tokens: int = 0) -> Actor:
    """The policy that learns; new_tokens above 0: it also generates in process, up to so many tokens."""
    engine = kit.policy_engine
    return Actor(engine, sampler(kit, engine, new_tokens) if new_tokens else None, 1.0, kit.exporter())


def sampler(kit: Kit, engine: ModelEngine, new_tokens: int) -> InProcessRollout | None:
    """None, with a note, where this model cannot generate in process."""
    try:
        return InProcessRollout(
            kit.policy.model,
            kit.template.tokenizer,
            kit.template.eos_ids,
            SamplingParams(temperature=1.0, max_new_tokens=new_tokens),
            seed=kit.cfg.seed,
            progress=lambda done, total: kit.place.progress("rollout", done, total),
            forward_context=engine.forward_context,
            response_prefix=kit.template.response_prefix,
        )
    except RolloutError as error:
        kit.notes.append(f"the distance of the data from the policy is not measured: {error.what}")
        return None


def following_reference(kit: Kit) -> Reference:
    """A reference with weights of its own that can follow the policy's."""
    found = roles.reference(kit)
    found.following = FollowingWeights(cast(ModelEngine, found.engine))
    return found


def caching_reference(kit: Kit, pairs: int) -> CachedReference:
    """A reference that is asked for all rows once."""
    progress = kit.place.progress
    return CachedReference(
        roles.reference(kit), progress=lambda done: progress("reference logprobs", min(done, pairs), pairs)
    )


def cached_reference(kit: Kit, path: str) -> CachedReference:
    """The table of an earlier run; no model is loaded."""
    kit.notes.append(f"reference logprobs are read from {path}; no reference is loaded")
    return CachedReference(table=ReferenceTable.read(Path(path)))


# ---- one run


def of_run(cfg: DPOConfig, data: StageData) -> dict[str, Any]:
    """The fields of the stage that depend on the recipe.  Raises DataError for a reference cache of something else."""
    distance = DataDistance(cfg.evaluation.distance_warning)
    changes: dict[str, Any] = {
        "makers": {"actor": functools.partial(policy, new_tokens=new_tokens(cfg, data)), **reference_maker(cfg, data)},
        "evaluator": functools.partial(prepared_evaluator, distance),
    }
    if cfg.dpo.sync_every:
        changes["learners"] = ("actor", "reference")
    if cfg.evaluation.distance_prompts:
        changes["alarms"] = lambda cfg: distance
        changes["finish"] = lambda handles: distance.summary()
    return changes


def reference_maker(cfg: DPOConfig, data: StageData) -> dict[str, Any]:
    if not has_reference(cfg.dpo):
        return {}
    if cfg.dpo.sync_every:
        return {"reference": following_reference}
    path = cache_path(cfg)
    if path is None:
        return {"reference": roles.reference}
    if not path.exists():
        return {"reference": functools.partial(caching_reference, pairs=sum(map(len, cached_pairs(cfg, data))))}
    require_same_key(path, cache_key(cfg, data))
    return {"reference": functools.partial(cached_reference, path=str(path))}


def prepared_evaluator(
    distance: DataDistance, cfg: DPOConfig, data: StageData, handles: Any, folder: Path
) -> Evaluator | None:
    """The held-out pairs; before them, in a run that begins: reference logprobs of all rows, distance of the data."""
    path = cache_path(cfg)
    if path is not None and not path.exists():
        write_cache(path, cfg, data, handles.reference)
    begins = Checkpoints(folder / "checkpoints", "", 1).latest() is None
    if begins and cfg.evaluation.distance_prompts:
        if new_tokens(cfg, data):
            distance.measure(handles.actor, distance_sample(cfg, data))
        else:
            distance.found = {"not_measured": "the policy is on pipeline stages, which do not generate in process"}
    return held_out_pairs(cfg, data, handles, folder)


def held_out_pairs(cfg: DPOConfig, data: StageData, handles: Any, folder: Path) -> Evaluator | None:
    """The training loss on held-out pairs; a reference that never moves is asked once."""
    if data.prepared.eval is None:
        return None

    def with_reference(pairs: Any) -> Any:
        return pairs.adding(ref_logp=handles.reference.logprobs(pairs).gather())

    loss, rows = preference_loss(cfg.dpo), cfg.evaluation.max_rows
    if cfg.dpo.sync_every:
        return MovingHeldOutPairs(handles.actor, data.prepared.eval, loss, rows, with_reference)
    complete = with_reference if has_reference(cfg.dpo) else None
    return HeldOutLoss(handles.actor, data.prepared.eval, loss, rows, complete)


# ---- reference logprobs in a file


def cache_path(cfg: DPOConfig) -> Path | None:
    """Full, since ranks have other working folders."""
    name = cfg.dpo.reference_cache
    if name is None or not has_reference(cfg.dpo):
        return None
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"dpo.reference_cache is {name}, a folder", fix="name a file, such as reference.safetensors")
    return path


def cached_pairs(cfg: DPOConfig, data: StageData) -> list[Pairs]:
    """The training pairs, and the held-out ones that are evaluated."""
    held = data.prepared.eval
    found: list[Pairs] = [data.prepared.train]
    return found if held is None else [*found, held.select(torch.arange(min(len(held), cfg.evaluation.max_rows)))]


def cache_key(cfg: DPOConfig, data: StageData) -> dict[str, str]:
    """What reference logprobs depend on."""
    return {
        "data": data.prepared.fingerprint,
        "model": runfolder.model_fingerprint(local_path(cfg.model.path)),
        "template": template_fingerprint(data.template),
        "rows": rows_fingerprint(Sequences.concat([pairs.sequences for pairs in cached_pairs(cfg, data)])),
        "dtype": cfg.model.dtype,
        **({} if cfg.model.quantize == "none" else {"quantize": cfg.model.quantize}),
    }


def template_fingerprint(template: ChatTemplate) -> str:
    """The name of a built-in template, or of any other what it writes around two turns."""
    written = template.render(PROBE)
    return f"{template.name}-{hashlib.sha256(written.encode()).hexdigest()[:16]}"


def write_cache(path: Path, cfg: DPOConfig, data: StageData, reference: Any) -> None:
    """One pass over all rows; then the file answers, and the reference's model is let go."""
    parts, columns = [], []
    for pairs in cached_pairs(cfg, data):
        for index in torch.arange(len(pairs)).split(PAIRS_A_CALL):
            part = pairs.select(index)
            columns.append(reference.logprobs(part).gather())
            parts.append(part.sequences)
    table = ReferenceTable.of(Sequences.concat(parts), Ragged.concat(columns))
    table.save(path, cache_key(cfg, data))
    reference.use_table(str(path)).gather()


# ---- distance of the data


def distance_sample(cfg: DPOConfig, data: StageData) -> Pairs:
    train: Pairs = data.prepared.train
    order = keyed_permutation(len(train), sample_key(cfg.seed, 0, "distance", 0, "rows"))
    return sample_of(train, order, cfg.evaluation.distance_prompts)


def new_tokens(cfg: DPOConfig, data: StageData) -> int:
    """As long as the chosen answers of the sample, as far as the context allows; 0: nothing is generated."""
    if not cfg.evaluation.distance_prompts or cfg.cluster.settings_of("actor").pipeline > 1:
        return 0
    sample = distance_sample(cfg, data)
    longest = int(sample.chosen.response_lens.max())
    if data.context is None:
        return longest
    return max(1, min(longest, data.context - int(sample.chosen.prompt_lens.max())))
