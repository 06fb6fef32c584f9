"""What the `distill` stage builds besides the roles of other stages: the teacher, and the distance to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tutelage.algorithms import distill
from tutelage.build.data import StageData, load_template
from tutelage.build.environments import has_environments
from tutelage.build.functions import held_out_rules, load_gold
from tutelage.build.kit import Kit
from tutelage.config.distill import DistillConfig
from tutelage.errors import ConfigError, ModelError
from tutelage.evals.answers import HeldOutAnswers, Judging, first_prompts
from tutelage.evals.evaluation import Evaluator
from tutelage.evals.teacher_distance import HeldOutDistance
from tutelage.models.load import context_length, load_causal_lm, require_model
from tutelage.roles.teacher import Teacher


def teacher(kit: Kit) -> Teacher:
    """The frozen teacher, at the temperature of the student.  Raises ModelError for another tokenizer."""
    cfg: DistillConfig = kit.cfg
    tokenizer = kit.template.tokenizer
    require_same_tokenizer(cfg, tokenizer)
    settings = cfg.model.model_copy(
        update={
            "path": cfg.teacher.path,
            "dtype": cfg.teacher.dtype,
            "lora_rank": 0,
            "quantize": "none",
            "gradient_checkpointing": False,
        }
    )
    model = load_causal_lm(
        settings, tokenizer, seed=cfg.seed, device=kit.device, sharding=kit.sharding("teacher"), frozen=True
    )
    return Teacher(kit.engine("teacher", model, None), cfg.rollout.temperature, len(tokenizer))


def require_same_tokenizer(cfg: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError where the teacher would read the student's tokens as others."""
    theirs = load_template(cfg.teacher.path, None).tokenizer.get_vocab()
    ours = tokenizer.get_vocab()
    if theirs == ours:
        return
    other = next((t for t in sorted(ours.keys() | theirs.keys()) if ours.get(t) != theirs.get(t)), "")
    raise ModelError(
        f"the teacher {cfg.teacher.path} has another tokenizer than {cfg.model.path}: {len(theirs)} tokens against "
        f"{len(ours)}, first {other!r} (id {theirs.get(other)} against {ours.get(other)})",
        fix="distil from a model of the same family, or train a reward model or preferences on the teacher's text",
    )


def of_run(cfg: DistillConfig, data: StageData) -> Mapping[str, Any]:
    """Nothing is otherwise in this run; what can be said of its teacher before a weight is loaded is said here.

    Raises ModelError for a teacher that is not there, of another tokenizer or with a context that is too short,
    ConfigError for too many candidates.
    """
    require_model(cfg.teacher.path)
    tokenizer = data.template.tokenizer
    require_same_tokenizer(cfg, tokenizer)
    if not cfg.distill.from_sampled_tokens and cfg.distill.candidates > len(tokenizer):
        raise ConfigError(
            f"distill.candidates is {cfg.distill.candidates}, the tokenizer has {len(tokenizer)} tokens",
            fix=f"use at most {len(tokenizer)}, which is exact",
        )
    asked = list(data.prepared.train.tokens)
    if data.prepared.eval is not None:
        asked += first_prompts(data.prepared.eval, cfg.evaluation.prompts).tokens
    needed = max(len(tokens) for tokens in asked) + cfg.rollout.max_new_tokens
    context = context_length(cfg.teacher.path)
    if context is not None and needed > context:
        raise ModelError(
            f"the longest prompt and its response may take {needed} tokens, the teacher {cfg.teacher.path} reads "
            f"{context}",
            fix="lower data.max_prompt_tokens or rollout.max_new_tokens, or take a teacher with a longer context",
        )
    return {}


def held_out_distance(cfg: Any, data: StageData, handles: Any, folder: Path) -> Evaluator | None:
    """The student's distance from the teacher on held-out prompts; proxy, gold and rules where there is a reward."""
    if data.prepared.eval is None:
        return None
    said = cfg.evaluation
    prompts = first_prompts(data.prepared.eval, said.prompts)
    answers = None
    if cfg.rewarded:
        skip = cfg.reward.on_error == "skip" or has_environments(cfg)
        judging = Judging(held_out_rules(cfg), said.samples, said.greedy, tuple(said.pass_at), skip)
        answers = HeldOutAnswers(handles, prompts, load_gold(cfg), folder, 0.0, judging)
    loss = distill.loss_of(cfg)
    return HeldOutDistance(
        handles,
        prompts,
        said.samples,
        folder,
        lambda rollout, roles: distill.judged(rollout, roles, cfg),
        None if cfg.distill.from_sampled_tokens else loss,
        answers,
    )
