"""How far a student is from its teacher on held-out prompts: on its own samples, the same random keys every time.

Shapes: B sequences, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tutelage.evals.answers import HeldOutAnswers
from tutelage.evals.evaluation import Evaluation
from tutelage.math.kl import kl_k1
from tutelage.math.masking import masked_values
from tutelage.protocols import Loss
from tutelage.rewards.checks import prompt_text
from tutelage.runfolder import write_samples
from tutelage.types import Prompts, Rollout

Judged = Callable[[Any, Any], Any]
"""(rollout, roles) -> the rollout with the teacher's logprobs."""


class HeldOutDistance:
    """Quality is minus the divergence that is trained, where it is over distributions; else minus the reverse KL of a
    response, estimated from its tokens.  With a gold function gold alone decides.

    answers  what proxy, gold and rules say of the answers; None where the recipe names no reward.
    loss     the divergence, or None.
    """

    def __init__(
        self,
        roles: Any,
        prompts: Prompts,
        samples: int,
        folder: Path,
        judged: Judged,
        loss: Loss | None,
        answers: HeldOutAnswers | None,
    ) -> None:
        self.roles = roles
        self.prompts = replace(prompts, step=0, n=samples, purpose="evaluation", greedy=False)
        self.folder = folder
        self.judged = judged
        self.loss = loss
        self.answers = answers

    def state(self) -> dict[str, Any]:
        return {} if self.answers is None else self.answers.state()

    def load_state(self, saved: Mapping[str, Any]) -> None:
        if self.answers is not None:
            self.answers.load_state(saved)

    def evaluate(self, phase: str, step: int) -> Evaluation:
        rollout = self.answered()
        kl_B = teacher_kl(rollout)
        tokens = float(rollout.sequences.trained.flat.sum())
        metrics = {
            "eval/teacher_kl_sequence": float(kl_B.mean()),
            "eval/teacher_kl_token": float(kl_B.sum()) / max(tokens, 1.0),
        }
        if self.loss is not None:
            stats = self.roles.actor.evaluate(rollout, self.loss).gather()
            metrics |= {f"eval/{name}": stats[name].mean for name in ("divergence", "tail", "teacher_tail")}
        nearest = "eval/teacher_kl_sequence" if self.loss is None else "eval/divergence"
        found = Evaluation(metrics, -metrics[nearest], f"minus {nearest}", {"prompts": len(self.prompts)})
        if self.answers is None:
            metrics["eval/length_mean"] = float(rollout.sequences.response_lens.double().mean())
            metrics["eval/truncated_fraction"] = float((~rollout.finished).double().mean())
            self.write(rollout, kl_B, phase, step)
            return found
        said = self.answers.evaluate(phase, step)
        best = said if self.answers.gold is not None else found
        return Evaluation({**metrics, **said.metrics}, best.quality, best.measured_by, said.details)

    def answered(self) -> Rollout:
        """Answers with the teacher's and the student's logprobs."""
        rollout = self.roles.actor.generate(self.prompts)
        judged = self.judged(rollout, self.roles)
        found: Rollout = judged.adding(old_logp=self.roles.actor.logprobs(rollout)).gather()
        return found

    def write(self, rollout: Rollout, kl_B: Tensor, phase: str, step: int) -> None:
        """The answers as the report reads them; their proxy is minus the reverse KL, what is trained for."""
        rows = [
            {
                "id": rollout.prompt_ids[i],
                "phase": phase,
                "prompt": prompt_text(rollout.messages[i]),
                "response": rollout.texts[i],
                "proxy": -float(kl_B[i]),
                "length": int(rollout.sequences.response_lens[i]),
                "finished": bool(rollout.finished[i]),
            }
            for i in range(len(rollout))
        ]
        write_samples(self.folder, phase if phase != "step" else f"step_{step:06d}", rows)


def teacher_kl(rollout: Rollout) -> Tensor:
    """(B,) k1 of KL(student || teacher), summed over the trained tokens, in float64; nats."""
    kl_BT = kl_k1(rollout.column("old_logp").padded(), rollout.column("teacher_logp").padded())
    return masked_values(kl_BT, rollout.sequences.trained.padded()).sum(dim=1).double()
