"""A model folder to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tutelage.build.data import load_template
from tutelage.config.common import ModelConfig
from tutelage.errors import RolloutError
from tutelage.models.load import context_length, load_causal_lm
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams


class ChatEngine:
    """complete(messages, seed, **sampling) -> text; sampling is what `SamplingParams` takes, truncation included."""

    def __init__(self, path: str) -> None:
        self.template = load_template(path, None)
        self.context = context_length(path)
        self.model = load_causal_lm(ModelConfig(path=path))

    def complete(self, messages: Sequence[dict[str, str]], seed: int = 0, **sampling: Any) -> str:
        prompt = self.template.encode_prompt(messages)
        params = self.fitting(SamplingParams(**sampling), len(prompt))
        engine = InProcessRollout(
            self.model.model,
            self.template.tokenizer,
            self.template.eos_ids,
            params,
            seed=seed,
            purpose="chat",
            response_prefix=self.template.response_prefix,
        )
        answer = engine.complete([prompt], params)
        if not len(answer):
            raise RolloutError("the model gave no answer", fix="raise max_new_tokens")
        return answer.texts[0].strip()

    def fitting(self, params: SamplingParams, prompt: int) -> SamplingParams:
        """The answer may take what the model's context leaves.  Raises RolloutError where it leaves nothing."""
        room = params.max_new_tokens if self.context is None else self.context - prompt
        if room < 1:
            raise RolloutError(
                f"the conversation has {prompt} tokens, the model's context is {self.context}",
                fix="start again with /reset, or use a model with a longer context",
            )
        return replace(params, max_new_tokens=min(params.max_new_tokens, room))


def chat_engine(path: str) -> ChatEngine:
    return ChatEngine(path)
