"""Data of a stage: read, converted, checked and split, before any weight is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from tutelage.build.environments import with_environments
from tutelage.config import AnyConfig, GeneratingConfig, KTOConfig, RewardModelConfig, SFTConfig
from tutelage.data.answers import prepare_labelled, prepare_steps, prepare_unpaired
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_demonstrations, prepare_pairs, prepare_prompts
from tutelage.data.sampler import EpochSampler
from tutelage.data.special import SpecialIds, special_ids
from tutelage.data.templates import BUILT_IN
from tutelage.errors import ConfigError, DataError
from tutelage.models.load import context_length, load_config, load_tokenizer
from tutelage.models.paths import base_of_adapter, local_path, quiet
from tutelage.runfolder import write_json
from tutelage.types import Prompts


@dataclass(frozen=True)
class StageData:
    """template: of the policy or reward model; prepared: train and eval; context: longest sequence of the model.

    notes: how the rows fill the batches, where that is not even.
    """

    template: ChatTemplate
    prepared: Prepared[Any]
    context: int | None
    notes: tuple[str, ...] = ()


TEMPLATE_FILE = "tutelage_template.json"


def load_template(path: str, chat_template: str | None) -> ChatTemplate:
    """The tokenizer of a model folder with the template asked for, else the built-in one it was trained with."""
    trained_with = Path(path).expanduser() / TEMPLATE_FILE
    if chat_template is None and trained_with.is_file():
        chat_template = json.loads(trained_with.read_text(encoding="utf8"))["chat_template"]
    tokenizer = load_tokenizer(path)
    return ChatTemplate(tokenizer, chat_template, special=end_ids(path, tokenizer))


def end_ids(path: str, tokenizer: Any) -> SpecialIds | None:
    """Every EOS id that tokenizer, generation config and config of a model name; None where none of them names any."""
    configs = [*generation_configs(path), load_config(path)]
    if all(getattr(source, "eos_token_id", None) is None for source in (tokenizer, *configs)):
        return None
    return special_ids(tokenizer, *configs)


def generation_configs(path: str) -> list[GenerationConfig]:
    """The generation config of a folder or hub name (of its base for an adapter), where it has one."""
    try:
        with quiet():
            return [GenerationConfig.from_pretrained(local_path(base_of_adapter(path) or path))]
    except OSError:
        return []


def write_template(template: ChatTemplate, folder: Path) -> None:
    """Beside an exported model: the name of its built-in template.  Any other template is in the tokenizer."""
    if template.name in BUILT_IN:
        write_json(folder / TEMPLATE_FILE, {"chat_template": template.name})


def stage_data(cfg: AnyConfig) -> StageData:
    """Everything `check` can say about the data of a recipe.  Raises DataError over `data.max_bad_fraction`."""
    template = load_template(cfg.model.path, cfg.model.chat_template)
    context = context_length(cfg.model.path)
    prepared: Prepared[Any]
    if isinstance(cfg, SFTConfig):
        prepared = prepare_demonstrations(cfg.data, template, cfg.sft.loss_on, cfg.seed, context=context)
    elif isinstance(cfg, GeneratingConfig):
        prepared = prepare_prompts(
            cfg.data, template, cfg.seed, context=context, max_new_tokens=cfg.rollout.max_new_tokens
        )
        prepared = with_environments(cfg, prepared)
    elif isinstance(cfg, KTOConfig):
        prepare = prepare_unpaired if cfg.kto.loss == "kto" else prepare_labelled
        prepared = prepare(cfg.data, template, cfg.seed, context=context)
    elif isinstance(cfg, RewardModelConfig) and cfg.reward_model.scores_steps:
        prepared = labelled_steps(cfg, template, context)
    else:
        prepared = prepare_pairs(cfg.data, template, cfg.seed, context=context)
    return StageData(template, prepared, context, batch_notes(cfg, prepared))


def labelled_steps(cfg: RewardModelConfig, template: ChatTemplate, context: int | None) -> Prepared[Any]:
    """Rows of a process reward model, with labels that its loss can take."""

    def allowed(label: float) -> bool:
        return cfg.reward_model.loss != "step_bce" or 0.0 <= label <= 1.0

    separator = cfg.reward_model.step_separator
    return prepare_steps(cfg.data, template, cfg.seed, separator, context=context, allowed=allowed)


def batch_notes(cfg: AnyConfig, prepared: Prepared[Any]) -> tuple[str, ...]:
    """What the batch settings do to these rows.  Raises ConfigError where they cannot work together."""
    rows = len(prepared.train)
    if isinstance(cfg, RewardModelConfig) and not cfg.reward_model.scores_steps:
        require_margins(cfg, prepared.train.margin)
    if isinstance(cfg, RewardModelConfig) and cfg.reward_model.scores_steps:
        require_different_labels(cfg, prepared.train.labels.flat)
    if isinstance(cfg, KTOConfig):
        return balance_notes(cfg, prepared.train.desirable)
    if not isinstance(cfg, GeneratingConfig):
        return ()
    size, wanted = min(cfg.rollout.prompts_per_step, rows), cfg.rollout.prompts_per_step
    responses = size * cfg.rollout.samples_per_prompt
    minibatches = section(cfg).minibatches
    if responses < minibatches:
        raise ConfigError(
            f"a step has {responses} responses ({rows} prompts in {cfg.data.train}), fewer than "
            f"{cfg.algorithm}.minibatches {minibatches}",
            fix=f"give more prompts, or lower {cfg.algorithm}.minibatches",
        )
    longest = max(len(tokens) for tokens in prepared.train.tokens) + cfg.rollout.max_new_tokens
    if cfg.rollout.engine == "inprocess" and longest > cfg.rollout.tokens_in_flight:
        raise ConfigError(
            f"the longest prompt and its response may take {longest} tokens, rollout.tokens_in_flight is "
            f"{cfg.rollout.tokens_in_flight}",
            fix=f"raise rollout.tokens_in_flight to at least {longest}",
        )
    if size < wanted:
        return (f"there are {rows} prompts, fewer than rollout.prompts_per_step {wanted}: a step takes all of them",)
    left_out = rows % size
    return (f"{left_out} of {rows} prompts are left out of each pass, others each time",) if left_out else ()


def require_margins(cfg: RewardModelConfig, margin_P: Tensor) -> None:
    """Raises ConfigError where the loss reads margins that the rows do not have."""
    fix = "add a margin column, name it in data.columns, or"
    if cfg.reward_model.use_margin and not bool(margin_P.any()):
        raise ConfigError(
            f"reward_model.use_margin is true, but no row of {cfg.data.train} has a margin",
            fix=f"{fix} drop use_margin",
        )
    bad = int((margin_P <= 0).sum())
    if cfg.reward_model.loss == "scaled_bradley_terry" and bad:
        raise ConfigError(
            f"reward_model.loss is scaled_bradley_terry, and {bad} of {len(margin_P)} rows have no margin above 0",
            fix=f"{fix} use bradley_terry",
        )


def require_different_labels(cfg: RewardModelConfig, label_N: Tensor) -> None:
    """Raises DataError where every step has the same label: any answer would get the same scores."""
    if len(label_N) and bool((label_N == label_N[0]).all()):
        raise DataError(
            f"all {len(label_N)} step labels of the training rows of {cfg.data.train} are {float(label_N[0]):g}: there "
            "is nothing to tell apart",
            fix="give rows with good and bad steps",
        )


KTO_BALANCE = (1.0, 4.0 / 3.0)
"""Where desirable_weight * desirable / (undesirable_weight * undesirable) belongs (arXiv:2402.01306, section 4.2)."""


def balance_notes(cfg: KTOConfig, desirable_B: Tensor) -> tuple[str, ...]:
    """A note where the kinds of answers are out of the balance that KTO's authors recommend.

    Raises ConfigError where no answer of the training rows has a loss above 0, and DataError where bco, which is a
    classifier, has answers of one kind alone.
    """
    good, bad = int(desirable_B.sum()), int((~desirable_B).sum())
    if cfg.kto.loss == "bco":
        if not (good and bad):
            kind = "desirable" if good else "undesirable"
            raise DataError(
                f"all {good + bad} training rows of {cfg.data.train} are {kind}, and kto.loss is bco, which learns to "
                "tell the two kinds apart",
                fix="give rows of both kinds, or use kto.loss=kto or apo_zero_unpaired",
            )
        return ()
    weighted = cfg.kto.desirable_weight * good, cfg.kto.undesirable_weight * bad
    if not any(weighted):
        raise ConfigError(
            f"every loss has the weight 0: {good} desirable answers x {cfg.kto.desirable_weight:g}, {bad} undesirable "
            f"ones x {cfg.kto.undesirable_weight:g}",
            fix="raise kto.desirable_weight or kto.undesirable_weight",
        )
    if not (good and bad):
        kind = "undesirable" if good else "desirable"
        return (f"there are no {kind} answers: {good + bad} of one kind teach the policy in one direction only",)
    ratio = weighted[0] / weighted[1] if weighted[1] else float("inf")
    low, high = KTO_BALANCE
    if low <= ratio <= high:
        return ()
    advice = ""
    if cfg.kto.undesirable_weight:
        fitting = cfg.kto.undesirable_weight * bad / good
        advice = f"; kto.desirable_weight from {low * fitting:.3g} to {high * fitting:.3g} would put it there"
    return (
        f"{good} desirable answers x {cfg.kto.desirable_weight:g} over {bad} undesirable ones x "
        f"{cfg.kto.undesirable_weight:g} is {ratio:.3g}, outside of {low:g} to {high:.3g}{advice}",
    )


def section(cfg: AnyConfig) -> Any:
    """The settings of the algorithm itself: the section of its name."""
    return getattr(cfg, cfg.algorithm)


def training_source(cfg: AnyConfig, items: int) -> tuple[EpochSampler, int]:
    """Batches of item indices, and the number of steps of the run.

    Where prompts are answered, the last, smaller batch of a pass is skipped, so that every step has the batch the
    recipe names; where there are fewer prompts than that, a pass is one batch of all of them.
    """
    if isinstance(cfg, GeneratingConfig):
        size, epochs = min(cfg.rollout.prompts_per_step, items), cfg.epochs
        sampler = EpochSampler(items, size, epochs, cfg.seed, drop_last=True)
    else:
        stage = section(cfg)
        sampler = EpochSampler(items, stage.batch_size, stage.epochs, cfg.seed)
    return sampler, min(sampler.steps, cfg.max_steps or sampler.steps)


def batch_maker(data: Any, cfg: AnyConfig) -> Any:
    """(indices, step) -> the batch of that step."""
    if isinstance(data, Prompts):
        assert isinstance(cfg, GeneratingConfig)
        samples = cfg.rollout.samples_per_prompt

        def prompts_of(index: Tensor, step: int) -> Prompts:
            return replace(data.select(index.tolist()), step=step, n=samples)

        return prompts_of
    return lambda index, step: data.select(index)
