"""What to say about episodes with environments, each environment apart.   Shapes: B episodes."""

from __future__ import annotations

import torch

from tutelage.types import Rollout, Stat, Stats


def episode_stats(batch: Rollout) -> Stats:
    """`environment/NAME/...` of every environment in the batch; nothing for answers of one turn.

    reward    sum of the turn rewards of an episode, mean over the episodes that did not fail.
    turns     responses of the policy in an episode.     truncated_fraction  ended by a limit, not by the environment.
    episodes, failed   how many; those whose environment raised, was late or answered with nonsense.
    KEY       sum over the turns of a number that the environment told, such as tool_errors, mean over the episodes.
    The last three means leave out failed episodes too; an environment of which all failed has `episodes` and `failed`.
    """
    if batch.environments is None or batch.turns is None:
        return {}
    failed_B = torch.tensor([bool(error) for error in batch.episode_errors or ("",) * len(batch)], dtype=torch.bool)
    reward_B = batch.adding(score=None).rewarded()
    infos = batch.episode_info or ({},) * len(batch)
    out: Stats = {}
    for name in sorted(set(batch.environments)):
        own_B = torch.tensor([other == name for other in batch.environments], dtype=torch.bool)
        good_B = own_B & ~failed_B
        count = float(good_B.sum())
        out[f"environment/{name}/episodes"] = Stat(float(own_B.sum()), 1)
        out[f"environment/{name}/failed"] = Stat(float((own_B & failed_B).sum()), 1)
        if not count:
            continue
        told = [info for info, good in zip(infos, good_B.tolist(), strict=True) if good]
        out[f"environment/{name}/reward"] = Stat.of(reward_B, good_B)
        out[f"environment/{name}/turns"] = Stat.of(batch.turns, good_B)
        out[f"environment/{name}/truncated_fraction"] = Stat.of((~batch.finished).double(), good_B)
        for key in sorted({key for info in told for key in info}):
            out[f"environment/{name}/{key}"] = Stat(sum(info.get(key, 0.0) for info in told), count)
    return out
