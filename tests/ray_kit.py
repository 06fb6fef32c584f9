"""Ray in tests: one instance per session, and toy roles that processes of a pool import from here.

Shapes: B sequences, R flat response tokens, K scores.
"""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch

from tutelage.config.cluster import ClusterConfig
from tutelage.errors import RolloutError
from tutelage.layout import Built, Dispatch, Place
from tutelage.sharing import Share
from tutelage.types import Prompts, Ragged, Rollout, Scores, Sequences, Stat, Stats

TESTS = str(Path(__file__).resolve().parent)


def shared_ray() -> None:
    """The session's instance: 2 CPUs are declared, of which every toy rank takes a tenth."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="critical",
            object_store_memory=100_000_000,
        )


def cluster(**sections: Any) -> ClusterConfig:
    """Pools as {"name": devices} or {"name": {...}}; each process takes a tenth of a CPU."""
    pools = {
        name: {"devices": pool, "per_device": 0.1, "kind": "cpu"} if isinstance(pool, int) else pool
        for name, pool in sections.pop("pools", {"main": 1}).items()
    }
    env = {"env_vars": {"PYTHONPATH": TESTS, "GLOO_SOCKET_IFNAME": "lo"}}
    return ClusterConfig.model_validate({"transport": "ray", "pools": pools, "runtime_env": env, **sections})


class Toy:
    """Says what its rank got."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "double": Dispatch.ROWS,
        "ids": Dispatch.ROWS,
        "scale": Dispatch.ROWS,
        "pair_scores": Dispatch.ROWS,
        "nothing": Dispatch.ROWS,
        "no_rows": Dispatch.ROWS,
        "too_few": Dispatch.ROWS,
        "spread": Dispatch.GENERATE,
        "learn": Dispatch.MINIBATCH,
        "who": Dispatch.EACH,
        "echo": Dispatch.EACH,
        "seen": Dispatch.EACH,
        "collective": Dispatch.EACH,
    }

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self.kept: list[Any] = []

    def who(self) -> int:
        return self.place.rank

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.place.rank, value

    def seen(self) -> list[Any]:
        """What the rank was given since the last question."""
        kept, self.kept = self.kept, []
        return kept

    def add(self, a: Any, b: Any = 0) -> Any:
        self.kept.append((a, b))
        return a + b

    def double(self, rollout: Rollout) -> Ragged:
        self.kept.append(rollout.prompt_ids)
        tokens = rollout.sequences.responses()
        return tokens.with_flat(tokens.flat.float() * 2)

    def ids(self, rollout: Rollout) -> list[str]:
        return [f"{name}/{sample}" for name, sample in zip(rollout.prompt_ids, rollout.samples.tolist(), strict=True)]

    def scale(self, factor_B: torch.Tensor, rollout: Rollout, constant: torch.Tensor) -> torch.Tensor:
        self.kept.append((factor_B, constant))
        return factor_B * rollout.sequences.tokens.lens * constant.sum()

    def pair_scores(self, pairs: Any) -> torch.Tensor:
        """(2P): all chosen, then all rejected."""
        return torch.tensor([row.sum() for row in pairs.sequences.tokens.rows()])

    def nothing(self, rollout: Rollout) -> None:
        self.kept.append(len(rollout))

    def no_rows(self, rollout: Rollout) -> dict[str, int]:
        return {"rows": len(rollout)}

    def too_few(self, rollout: Rollout) -> torch.Tensor:
        return torch.zeros(len(rollout) + 1)

    def spread(self, prompts: Prompts) -> Rollout:
        self.kept.append(prompts.ids)
        return generated(prompts)

    def learn(self, share: Share, loss: Any) -> Stats:
        """Sums over the pool's data ranks, as an engine's are."""
        self.kept.append(share)
        return {"rows": Stat(float(len(share)), 1)}

    def whole(self, batch: Rollout) -> Rollout:
        return batch

    def size(self, rollout: Rollout) -> int:
        self.kept.append(rollout.prompt_ids)
        return len(rollout)

    def fail(self) -> None:
        raise KeyError("inside")

    def refuse(self) -> None:
        error = RolloutError("the prompt has 9 tokens, 4 fit", fix="shorten it")
        error.add_note("at prompt p7")
        raise error

    def collective(self, bad: str) -> float:
        """A barrier that `bad` ranks do not reach: raise, die, sleep, or nothing at all."""
        if bad == "raise":
            raise RolloutError("rank refuses", fix="none")
        if bad == "die":
            print("these are my last words", flush=True)
            os._exit(3)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return float(total)

    def meet(self, folder: str, mine: str, other: str) -> bool:
        """Leaves a file and waits for another's: only calls that run at the same time both end."""
        Path(folder, mine).touch()
        deadline = time.monotonic() + 30
        while not Path(folder, other).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def work(self, total: int) -> None:
        print(f"hello from {self.place.rank}")
        warnings.warn("careful now", stacklevel=1)
        for done in range(total + 1):
            self.place.progress("toy work", done, total)
            time.sleep(0.25)

    def group_size(self) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def environment(self, name: str) -> str:
        return os.environ[name]

    def load(self, value: int) -> None:
        self.kept = [value]


class TokenLoss:
    """Weight 1 / tokens of the mini-batch for every response token."""

    outputs = frozenset({"logp"})

    def weights(self, batch: Any) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1 / float(lens.sum())), lens)


def toys(names: tuple[str, ...], place: Place) -> Built:
    """A Toy under every name."""
    return Built({name: Toy(name, place) for name in names}, ("every role is a toy", f"rank {place.rank}"))


def failing(names: tuple[str, ...], place: Place) -> Built:
    """One rank cannot build; the others wait for it in a collective."""
    if place.rank == 1:
        raise RolloutError("rank 1 cannot build", fix="use another builder")
    torch.distributed.barrier()
    return toys(names, place)


class Adder:
    """The role of the contract that every transport keeps."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"entry": Dispatch.EACH, "lengths": Dispatch.ROWS}

    def add(self, a: Any, b: Any = 0) -> Any:
        return a + b

    def fail(self) -> None:
        raise KeyError("inside")

    def entry(self, value: Any) -> Any:
        return value

    def batch(self) -> Rollout:
        return generated(prompts_of(3))

    def lengths(self, rollout: Rollout) -> Ragged:
        return rollout.sequences.responses()


def adders(names: tuple[str, ...], place: Place) -> Built:
    return Built({name: Adder() for name in names}, ("built",))


# ---- PPO's roles, as pure functions of tokens ----


def prompts_of(count: int, n: int = 2) -> Prompts:
    """Prompts of 1 to 5 tokens."""
    return Prompts(
        tokens=tuple(tuple(range(1, 2 + (3 * i) % 5)) for i in range(count)),
        ids=tuple(f"p{i}" for i in range(count)),
        truths=tuple(i * 10 for i in range(count)),
        messages=tuple(({"role": "user", "content": f"question {i}"},) for i in range(count)),
        n=n,
    )


def generated(prompts: Prompts) -> Rollout:
    """n responses a prompt, of lengths and tokens that depend on the prompt's id and the sample alone."""
    responses, rows = [], []
    for tokens, name in zip(prompts.tokens, prompts.ids, strict=True):
        for sample in range(prompts.n):
            length = 1 + (7 * int(name[1:]) + 3 * sample) % 6
            responses.append([(int(name[1:]) * 5 + sample * 3 + t) % 50 for t in range(length)])
            rows.append(list(tokens))
    n, count = prompts.n, len(rows)
    lens = torch.tensor([len(r) for r in responses], dtype=torch.int64)
    flat = torch.tensor([t for r in responses for t in r], dtype=torch.float32)
    return Rollout(
        sequences=Sequences.build(rows, responses),
        rollout_logp=Ragged(-flat / 7, lens),
        finished=lens > 2,
        prompt_ids=tuple(prompts.ids[b // n] for b in range(count)),
        samples=torch.arange(n).repeat(len(prompts)),
        group=torch.arange(len(prompts)).repeat_interleave(n),
        truths=tuple(prompts.truths[b // n] for b in range(count)),
        messages=tuple(prompts.messages[b // n] for b in range(count)),
        texts=tuple(" ".join(map(str, r)) for r in responses),
        weights_version=torch.full((count,), 4, dtype=torch.int64),
    )


class ToyActor:
    DISPATCH: ClassVar[dict[str, Dispatch]] = {"generate": Dispatch.GENERATE, "logprobs": Dispatch.ROWS}

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def generate(self, prompts: Prompts) -> Rollout:
        return generated(prompts)

    def logprobs(self, rollout: Rollout) -> Ragged:
        tokens = rollout.sequences.responses()
        return tokens.with_flat(torch.log_softmax(torch.stack([tokens.flat.float(), tokens.flat * self.shift]), 0)[0])


class ToyCritic:
    DISPATCH: ClassVar[dict[str, Dispatch]] = {"values": Dispatch.ROWS}

    def values(self, rollout: Rollout) -> Ragged:
        rows = [torch.cat([r.float() / 3, torch.tensor([9.0])]) for r in rollout.sequences.responses().rows()]
        return Ragged.from_rows(rows)


class ToyReward:
    DISPATCH: ClassVar[dict[str, Dispatch]] = {"score": Dispatch.ROWS}

    def score(self, rollout: Rollout) -> Scores:
        values = torch.tensor([[len(t), float(truth)] for t, truth in zip(rollout.texts, rollout.truths, strict=True)])
        return Scores(values, values.sum(1), ("length", "truth"))


PPO = ("actor", "critic", "reference", "reward")


def ppo_roles(names: tuple[str, ...], place: Place) -> Built:
    made = {"actor": ToyActor(0.5), "reference": ToyActor(0.25), "critic": ToyCritic(), "reward": ToyReward()}
    return Built({name: made[name] for name in names})


def both(names: tuple[str, ...], place: Place) -> Built:
    """PPO's roles under their names, a Toy under every other."""
    mine = toys(tuple(n for n in names if n not in PPO), place)
    return Built({**mine.roles, **ppo_roles(tuple(n for n in names if n in PPO), place).roles}, mine.notes)
