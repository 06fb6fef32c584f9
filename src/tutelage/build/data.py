"""Data of a stage: read, converted, checked and split, before any weight is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from tutelage.config import AnyConfig, GeneratingConfig, RewardModelConfig, SFTConfig
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_demonstrations, prepare_pairs, prepare_prompts
from tutelage.data.sampler import EpochSampler
from tutelage.data.special import SpecialIds, special_ids
from tutelage.data.templates import BUILT_IN
from tutelage.errors import ConfigError
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
    else:
        prepared = prepare_pairs(cfg.data, template, cfg.seed, context=context)
    return StageData(template, prepared, context, batch_notes(cfg, prepared))


def batch_notes(cfg: AnyConfig, prepared: Prepared[Any]) -> tuple[str, ...]:
    """What the batch settings do to these rows.  Raises ConfigError where they cannot work together."""
    rows = len(prepared.train)
    if isinstance(cfg, RewardModelConfig) and cfg.reward_model.use_margin and not bool(prepared.train.margin.any()):
        raise ConfigError(
            f"reward_model.use_margin is true, but no row of {cfg.data.train} has a margin",
            fix="add a margin column, name it in data.columns, or drop use_margin",
        )
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
