"""Wrong input about processes, Ray and vLLM, through the commands: error class, value seen, fix, nothing left behind.

The cases are those of scripts/wrong_cluster.py; what each must say is written here.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tutelage.errors import installed
from tutelage.rollout.vllm import checks
from tutelage.transport import ray as ray_package

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(SCRIPTS)
        return importlib.import_module("wrong_cluster")


script = load_script()


@dataclass(frozen=True)
class Says:
    """error: the class that the message begins with; words: what must stand in it."""

    error: str
    words: tuple[str, ...]
    exit_code: int = 2


SAYS = {
    "pool_too_large": Says(
        "ClusterError",
        ("devices: main 4096", "CPU 4096", "a Ray instance on this machine has CPU", "cluster.address to a larger"),
        1,
    ),
    "no_gpu": Says("ClusterError", ("GPU 1", "on this machine has", "GPU 0", "lower cluster.pools.NAME.devices"), 1),
    "strict_spread": Says(
        "ClusterError", ("2 x (CPU 1), strategy STRICT_SPREAD", "room for 1", "1 node", "another strategy"), 1
    ),
    "pool_too_large_cluster": Says(
        "ClusterError", ("64 x (CPU 1)", "not placed within 30 s", "CPU 2 of 2 free", "or add nodes"), 1
    ),
    "layout_size": Says("ConfigError", ("4 ranks (shard 4)", "main has 2 devices", "make them equal")),
    "unknown_pool": Says("ConfigError", ("'scor'", "Did you mean score?", "Pools: train, score")),
    "unknown_role": Says("ConfigError", ("cluster.place.critc", "Did you mean critic?", "Roles: actor")),
    "unknown_layout": Says("ConfigError", ("cluster.layout.actr", "Did you mean actor?", "default")),
    "misspelt_key": Says("ConfigError", ("cluster.pools.main.devces", "Did you mean cluster.pools.main.devices?")),
    "tensor_heads": Says(
        "ConfigError", ("3 tensor ranks", "4 (attention heads)", "1, 2 or 4 would", "change cluster.layout of actor")
    ),
    "tensor_heads_run": Says("ConfigError", ("the layout of actor (tensor 3)", "models/served", "1, 2 or 4 would")),
    "vllm_tensor": Says(
        "ConfigError", ("rollout.vllm.tensor_parallel is 3", "4 attention heads", "use one of [1, 2, 4]")
    ),
    "vllm_tensor_colocated": Says(
        "ConfigError", ("rollout.vllm.tensor_parallel is 2 in mode colocated", "rollout.vllm.mode to separate")
    ),
    "pipeline_blocks": Says("ConfigError", ("4 pipeline stages for 2 blocks", "change cluster.layout of actor")),
    "pipeline_in_process": Says("ConfigError", ("2 pipeline stages", "is inprocess", "set rollout.engine=vllm")),
    "sequence_heads": Says("ConfigError", ("4 attention heads", "3 sequence ranks", "1, 2 or 4 would")),
    "vllm_missing": Says("MissingExtraError", ("vLLM, which is not installed", "make vllm"), 1),
    "vllm_missing_check": Says("MissingExtraError", ("vLLM, which is not installed", "make vllm"), 1),
    "ray_missing": Says("MissingExtraError", ("ray is not installed", "pip install 'tutelage[ray]'"), 1),
    "ray_missing_check": Says("MissingExtraError", ("ray is not installed", "pip install 'tutelage[ray]'"), 1),
    "nobody_listens": Says(
        "ClusterError", ("nothing answers at cluster.address 127.0.0.1:", "refused", "ray start --head"), 1
    ),
    "not_ray": Says(
        "ClusterError", ("accepts connections, but no Ray", "within 8 s", "check that the port is Ray's"), 1
    ),
    "odd_address": Says("ClusterError", ("cluster.address is 'head-node'", "HOST:PORT"), 1),
    "server_port": Says("RolloutError", ("of 127.0.0.1 is taken", "rollout.vllm.port to another one"), 1),
    "server_port_twice": Says("ConfigError", ("rollout.vllm.port is 8000", "pool gen has 2 devices", "leave port out")),
    "larger_tokenizer": Says(
        "ModelError", ("models/swapped has 148 tokens", "98 embeddings", "use the tokenizer that the model"), 1
    ),
    "larger_tokenizer_vllm": Says("ModelError", ("models/swapped has 148 tokens", "98 embeddings"), 1),
    "other_tokenizer": Says(
        "RolloutError", ("token ' ' is 97 for the policy and 3 in models/served", "policy's own folder"), 1
    ),
    "short_engine": Says(
        "ConfigError",
        ("rollout.vllm.max_model_len is 12", "the longest prompt has 16", "that is 22", "to at least 22"),
    ),
    "long_engine": Says("ConfigError", ("rollout.vllm.max_model_len is 256", "context is 128", "at most 128")),
    "no_room": Says("DataError", ("rollout.max_new_tokens=128", "128 positions", "lower rollout.max_new_tokens"), 1),
    "head_size": Says("ModelError", ("head_dim is 16", "CPU attention", "use the inprocess rollout"), 1),
    "kv_cache": Says("RolloutError", ("no memory for its KV cache", "kv_cache_memory_bytes is 214748364800"), 1),
    "no_transport": Says("ConfigError", ("cluster.pools has no effect", "cluster.transport is ray")),
    "no_engine": Says("ConfigError", ("rollout.vllm.max_num_seqs has no effect", "value 4", "rollout.engine is vllm")),
    "separate_local": Says("ConfigError", ("rollout.vllm.mode is separate", "set cluster.transport=ray")),
    "separate_shared": Says("ConfigError", ("shares the actor's pool", "set cluster.place.rollout")),
    "folds": Says("ConfigError", ("reward_model.folds is 3", "use cluster.transport=local")),
    "restarts": Says("ConfigError", ("cluster.restarts is 1", "checkpoint.every is 0", "set checkpoint.every")),
    "runtime_env_key": Says("ConfigError", ("cluster.runtime_env.working_dr", "Did you mean working_dir?")),
    "runtime_env_folder": Says("ConfigError", ("working_dir is code, which does not exist", "give a folder")),
}
CASES = {case.name: case for case in script.CASES if case.name in SAYS}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
NEEDS_VLLM = pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed: make vllm")
NEEDS_CPU = ("no_gpu", "head_size")


def params(*, starts: bool) -> list[Any]:
    """Cases that start Ray or vLLM, or those that start nothing."""
    found = []
    for case in CASES.values():
        if bool(case.starts) != starts:
            continue
        marks = [ON_CPU] if case.name in NEEDS_CPU else []
        marks += [pytest.mark.slow] if starts else []
        marks += [pytest.mark.vllm, NEEDS_VLLM] if case.starts == "vllm" else []
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script.build(tmp_path_factory.mktemp("cluster").resolve())


def held(outcome: Any, says: Says) -> None:
    assert re.search(rf"^{says.error}: ", outcome.message, re.MULTILINE), outcome.message
    assert "Traceback" not in outcome.message
    for word in says.words:
        assert word in outcome.message, outcome.message
    assert outcome.exit_code == says.exit_code, outcome.message
    assert outcome.left == []


def test_every_case_is_held() -> None:
    assert {case.name for case in script.CASES} - set(SAYS) == {"nothing_wrong"}
    assert set(SAYS) <= set(CASES)


@pytest.mark.parametrize("case", params(starts=False))
def test_what_needs_no_start_is_refused_before_one(case: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_package, "connected", lambda: False)
    monkeypatch.setattr(ray_package, "ray_transport", never)
    if case.hides:
        monkeypatch.setitem(sys.modules, case.hides, None)
    else:
        monkeypatch.setattr(checks, "require_vllm", lambda: None)
    if case.name in ("nobody_listens", "odd_address"):
        monkeypatch.undo()  # the transport itself refuses these, before it starts anything
        monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests before this one may have connected
    case = replace(case, hides="")
    held(script.run_case(root, case), SAYS[case.name])


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a transport was made")


@pytest.mark.parametrize("case", params(starts=True))
def test_what_only_a_start_shows_ends_in_a_message(case: Any, root: Path) -> None:
    held(script.run_case(root, case), SAYS[case.name])


@pytest.mark.slow
def test_a_hidden_package_is_not_found_by_the_process_of_its_case(root: Path) -> None:
    case = CASES["ray_missing_check"]
    held(script.run_case(root, case), SAYS[case.name])


def test_a_traceback_or_an_exit_without_error_is_counted_as_failed() -> None:
    case = CASES["folds"]
    outcome = script.Outcome((), 2, 0.0, "ConfigError: x")
    assert not script.failed(case, outcome)
    assert script.failed(case, script.Outcome((), 1, 0.0, "Traceback (most recent call last):"))
    assert script.failed(case, script.Outcome((), 0, 0.0, ""))
    assert script.failed(case, script.Outcome((), -9, 0.0, "(no answer within 180 s)"))
