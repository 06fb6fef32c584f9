"""Hints for keys that are not settings: the closest key of the schema, names from other libraries, reasons."""

from __future__ import annotations

import difflib

from tutelage.config import describe
from tutelage.config.schema import Schema

FOREIGN_NAMES = {
    "learning_rate": "optim.lr",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "warmup": "optim.warmup_steps",
    "cliprange": "ppo.clip_high",
    "clip_range": "ppo.clip_high",
    "clip_ratio": "ppo.clip_high",
    "clip_ratio_low": "ppo.clip_low",
    "clip_ratio_high": "ppo.clip_high",
    "cliprange_value": "ppo.clip_value",
    "gae_lambda": "ppo.lam",
    "lambda": "ppo.lam",
    "ppo_epochs": "ppo.epochs",
    "num_ppo_epochs": "ppo.epochs",
    "num_mini_batches": "ppo.minibatches",
    "whiten": "ppo.whiten_advantages",
    "beta": "kl.coef",
    "kl_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "target_kl": "kl.target",
    "num_train_epochs": "epochs",
    "response_length": "rollout.max_new_tokens",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "model_name_or_path": "model.path",
    "reward_model_path": "reward.model",
    "dataset_name": "data.train",
}
"""What other libraries call a setting -> its full key here; used only in hints."""

_TRUNCATED = (
    "rollouts sample from the whole distribution: with {name} the samples would come from another distribution than "
    "the one whose logprobs are trained. Remove it: {name} is for evaluation and chat"
)


def unknown_key(schema: type[Schema], name: str, value: str, source: str, *, nested: bool = False) -> str:
    """The message for a key that is not in the schema; `nested`: it is, but was written with dots in a recipe."""
    shown = f"({source}, value {value})"
    last = name.rpartition(".")[2]
    if nested:
        section = name.split(".")[0]
        return f"{name} must be written in a section {shown}: `{section}:` and, indented below it, `{last}:`"
    if last in ("top_k", "top_p", "min_p"):
        return f"{name} is not a setting {shown}: {_TRUNCATED.format(name=last)}"
    return f"{name} is not a setting {shown}.{closest_key(name, schema)}"


def closest_key(name: str, schema: type[Schema]) -> str:
    """` Did you mean X?` with the closest full key anywhere in a schema, or an empty string.

    Compares whole keys and last parts, so a key in the wrong section finds its place; names from other libraries too.
    Keys of the entries of a mapping are compared under the entry's name.
    """
    mappings = describe.mappings(schema)
    known = [found for key in describe.walk(schema) if (found := _written(key.name, name, mappings))]
    known += list(describe.sections(schema))
    known = [key for key in known if key not in mappings or not name.startswith(f"{key}.")]
    foreign = FOREIGN_NAMES.get(name.rpartition(".")[2].lower())
    if foreign in known:
        return f" Did you mean {foreign}?"
    best, best_score = "", 0.0
    for candidate in known:
        score = _likeness(name.lower(), candidate.lower())
        if score > best_score:
            best, best_score = candidate, score
    return f" Did you mean {best}?" if best_score >= 0.65 else ""


def _likeness(name: str, candidate: str) -> float:
    """From 0 to 1.  In one section the last parts alone are compared."""
    (above, _, last), (section, _, part) = name.rpartition("."), candidate.rpartition(".")
    parts = difflib.SequenceMatcher(None, last, part).ratio()
    if above and above == section:
        return parts
    whole = difflib.SequenceMatcher(None, name, candidate).ratio()
    return max(whole, 0.9 * parts + 0.1 * whole)


def _written(known: str, name: str, mappings: set[str]) -> str:
    """A known key as it is written in the entry that `name` is of: `a[].b` for `a.x.c` is `a.x.b`; empty elsewhere.

    The mapping's name may be misspelt.
    """
    above, inside, below = known.partition("[].")
    if not inside:
        return known
    places, given = above.split("."), name.split(".")
    named = ".".join(given[: len(places)])
    if above not in mappings or (named != above and named in mappings) or len(given) < len(places) + 2:
        return ""
    return f"{above}.{given[len(places)]}.{below}"
