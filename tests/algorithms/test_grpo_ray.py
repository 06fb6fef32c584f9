"""Greedy scores beside a rollout on the ray transport: a column with a row a prompt, over several ranks."""

from __future__ import annotations

import pytest
import ray_kit

pytest.importorskip("ray")

from tutelage.algorithms import grpo
from tutelage.config import GRPOConfig
from tutelage.transport.local import LocalTransport
from tutelage.transport.ray import ray_transport
from tutelage.transport.roleset import RoleSet

ROLES = ("actor", "reward")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_remax_on_several_ranks_compares_with_the_same_greedy_scores_as_one_process(n: int) -> None:
    cfg = GRPOConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "kl": {"coef": 0.0},
            "grpo": {"estimator": "remax"},
            "off_policy": {"old_logprobs": "trainer"},
            "rollout": {"samples_per_prompt": n},
        }
    )
    prompts = ray_kit.prompts_of(5, n)
    alone = LocalTransport()
    built = ray_kit.ppo_roles(ROLES, alone.place).roles
    roles = RoleSet({name: alone.handle(name, role) for name, role in built.items()})
    wanted = grpo.collect(alone.put(prompts), roles, cfg).gather()
    ray_kit.shared_ray()
    cluster = ray_kit.cluster(pools={"main": 3, "pair": 2}, place={"reward": "pair"})
    running = ray_transport(cluster)
    try:
        handles, _ = running.start(ray_kit.ppo_roles, ROLES)
        found = grpo.collect(running.put(prompts), RoleSet(handles), cfg).gather()
    finally:
        running.close()
    assert found.group.tolist() == wanted.group.tolist() == [i for i in range(5) for _ in range(n)]
    assert found.baseline.total.tolist() == wanted.baseline.total.tolist()
    assert len(found.baseline.total) == 5
    assert found.old_logp.flat.tolist() == wanted.old_logp.flat.tolist()
    state = grpo.initial_state(cfg)
    ours, theirs = (grpo.advantages(batch, state, cfg)[0].advantage for batch in (wanted, found))
    assert ours.flat.tolist() == theirs.flat.tolist()
    assert len(set(ours.flat.tolist())) > 2 or n == 1  # the first sample of the kit is its greedy response
