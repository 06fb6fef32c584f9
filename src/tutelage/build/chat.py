"""A model folder to talk to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tutelage.build.data import load_template
from tutelage.config.common import ModelConfig
from tutelage.errors import RolloutError
from tutelage.models.load import load_causal_lm
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams


class ChatEngine:
    """complete(messages, seed, **sampling) -> text; sampling is what `SamplingParams` takes, truncation included."""

    def __init__(self, path: str) -> None:
        self.template = load_template(path, None)
        self.model = load_causal_lm(ModelConfig(path=path))

    def complete(self, messages: Sequence[dict[str, str]], seed: int = 0, **sampling: Any) -> str:
        params = SamplingParams(**sampling)
        engine = InProcessRollout(
            self.model.model,
            self.template.tokenizer,
            self.template.eos_ids,
            params,
            seed=seed,
            purpose="chat",
        )
        answer = engine.complete([self.template.encode_prompt(messages)], params)
        if not len(answer):
            raise RolloutError("the model gave no answer", fix="raise max_new_tokens")
        return answer.texts[0].strip()


def chat_engine(path: str) -> ChatEngine:
    return ChatEngine(path)
