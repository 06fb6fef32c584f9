"""Give the commands wrong input that concerns several processes, Ray or vLLM, and show what they say.

    python scripts/wrong_cluster.py [--only TEXT] [--markdown]

Everything is made offline in a temporary folder: tiny models, small data files, recipes.  Every case is a real command
line.  Those that start Ray or vLLM, and those where a package is missing, run in a process of their own, and their
seconds count from its start; the others run in this process, without the start of Python and imports, whose seconds the
first case shows.  What is not installed is simulated: the import system of that process does not find it.  A process
that gives no answer within its deadline has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from wrong_files import CONTEXT, build_workspace, write_model
from wrong_input import COMMAND, Outcome, call, outcome_of, run_folders

WAIT_S = 180
START_S = 8
"""cluster.start_timeout of the cases that wait for it."""
HIDDEN = """\
import sys
from importlib.machinery import PathFinder

class Without:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == {package!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from tutelage.cli import main
main()
"""
OTHER_TOKENIZER = """\
from tutelage.errors import RolloutError
from tutelage.models.load import load_tokenizer
from tutelage.rollout.sampling import SamplingParams
from tutelage.rollout.vllm.engine import VLLMSpec

try:
    VLLMSpec("models/served", load_tokenizer("models/renumbered"), (1,), SamplingParams(max_new_tokens=6)).check()
except RolloutError as error:
    raise SystemExit(f"RolloutError: {error}")
"""
RAY = "cluster.transport=ray"
TALL = "model.path=models/served"
VLLM = (TALL, "rollout.engine=vllm")
TWO_POOLS = (RAY, "cluster.pools={train: {}, gen: {}}", "cluster.place.rollout=gen")
SERVER = (*VLLM, *TWO_POOLS, "rollout.vllm.mode=server")
PPO = ("run", "ppo.yaml")
CHECK = ("check", "ppo.yaml")


@dataclass(frozen=True)
class Case:
    """title: what is wrong; args: the command line after `tutelage`, where {port} is a port of this machine.

    port   what is at that port: nothing; a socket, which accepts and says nothing; or a cluster of 2 CPUs.
    hides  a package that the process does not find.
    code   Python to run instead of a command, for what no recipe can cause.
    starts "ray" or "vllm": what really starts before the answer (or "python" alone); else nothing is started.
    """

    name: str
    title: str
    args: tuple[str, ...] = ()
    port: str = ""
    hides: str = ""
    code: str = ""
    starts: str = ""


CASES = (
    Case(
        "nothing_wrong",
        "Nothing wrong: the seconds of Python's start, imports and checks",
        (*CHECK, TALL),
        starts="python",
    ),
    Case("pool_too_large", "A pool larger than this machine", (*PPO, RAY, "cluster.pools.main.devices=4096")),
    Case("no_gpu", "A pool of GPUs where there are none", (*PPO, RAY, "cluster.pools.main.kind=gpu")),
    Case(
        "strict_spread",
        "A pool that wants two nodes where there is one",
        (*PPO, RAY, "cluster.pools.main={devices: 2, strategy: STRICT_SPREAD}"),
        starts="ray",
    ),
    Case(
        "pool_too_large_cluster",
        "A pool larger than a running cluster, which might grow",
        (*PPO, RAY, "cluster.address=127.0.0.1:{port}", "cluster.pools.main.devices=64"),
        port="a cluster",
        starts="ray",
    ),
    Case(
        "layout_size",
        "A layout of other size than its pool",
        (*PPO, RAY, "cluster.pools.main.devices=2", "cluster.layout.actor.shard=4"),
    ),
    Case(
        "unknown_pool",
        "An unknown pool",
        (*PPO, RAY, "cluster.pools={train: {}, score: {}}", "cluster.place.reward=scor"),
    ),
    Case("unknown_role", "An unknown role in cluster.place", (*PPO, RAY, "cluster.place.critc=main")),
    Case("unknown_layout", "An unknown role in cluster.layout", (*PPO, RAY, "cluster.layout.actr.shard=2")),
    Case("misspelt_key", "A misspelt key of a pool", (*PPO, RAY, "cluster.pools.main.devces=4")),
    Case(
        "tensor_heads",
        "Tensor parallel that does not divide the heads, seen by check",
        (*CHECK, TALL, RAY, "cluster.pools.main.devices=3", "cluster.layout.actor.tensor=3"),
    ),
    Case(
        "tensor_heads_run",
        "The same in a run",
        (*PPO, TALL, RAY, "cluster.pools.main.devices=3", "cluster.layout.actor.tensor=3"),
    ),
    Case(
        "vllm_tensor",
        "Tensor parallel of the rollout engine that does not divide the heads",
        (*CHECK, *SERVER, "rollout.vllm.tensor_parallel=3"),
    ),
    Case(
        "vllm_tensor_colocated",
        "A rollout engine of two processes inside the actor's one",
        (*CHECK, *VLLM, "rollout.vllm.tensor_parallel=2"),
    ),
    Case(
        "pipeline_blocks",
        "More pipeline stages than blocks",
        (*PPO, TALL, RAY, "cluster.pools.main.devices=4", "cluster.layout.actor.pipeline=4"),
    ),
    Case(
        "pipeline_in_process",
        "In-process rollouts of an actor with pipeline stages",
        (*PPO, TALL, RAY, "cluster.pools.main.devices=2", "cluster.layout.actor.pipeline=2"),
    ),
    Case(
        "sequence_heads",
        "Sequence parallel that does not divide the heads",
        (*PPO, TALL, RAY, "cluster.pools.main.devices=3", "cluster.layout.actor.sequence=3"),
    ),
    Case("vllm_missing", "vLLM is not installed", (*PPO, *VLLM), hides="vllm"),
    Case("vllm_missing_check", "The same, seen by check", (*CHECK, *VLLM), hides="vllm"),
    Case("ray_missing", "Ray is not installed", (*PPO, RAY), hides="ray"),
    Case("ray_missing_check", "The same, seen by check", (*CHECK, RAY), hides="ray"),
    Case(
        "nobody_listens",
        "An address where nobody listens",
        (*PPO, RAY, "cluster.address=127.0.0.1:{port}"),
        port="nothing",
    ),
    Case(
        "not_ray",
        f"A port that is taken by something else than Ray (cluster.start_timeout={START_S})",
        (*PPO, RAY, "cluster.address=127.0.0.1:{port}", f"cluster.start_timeout={START_S}"),
        port="a socket",
        starts="ray",
    ),
    Case("odd_address", "An address without a port", (*PPO, RAY, "cluster.address=head-node")),
    Case(
        "server_port",
        "The port of the vLLM server is taken",
        (*PPO, *SERVER, "rollout.vllm.port={port}"),
        port="a socket",
    ),
    Case(
        "server_port_twice",
        "One port for two vLLM servers",
        (*PPO, *SERVER, "cluster.pools.gen.devices=2", "rollout.vllm.port=8000"),
    ),
    Case("larger_tokenizer", "A tokenizer with more tokens than embeddings", (*CHECK, "model.path=models/swapped")),
    Case(
        "larger_tokenizer_vllm",
        "The same with rollouts by vLLM on Ray",
        (*PPO, *TWO_POOLS, "model.path=models/swapped", "rollout.engine=vllm", "rollout.vllm.mode=separate"),
    ),
    Case(
        "other_tokenizer",
        "Policy and rollout engine number tokens otherwise (a recipe cannot: both come from model.path)",
        code=OTHER_TOKENIZER,
    ),
    Case(
        "short_engine",
        "Prompts and responses longer than the engine's context",
        (*CHECK, *VLLM, "rollout.vllm.max_model_len=12"),
    ),
    Case(
        "long_engine",
        "An engine's context longer than the model's",
        (*CHECK, *VLLM, f"rollout.vllm.max_model_len={2 * CONTEXT}"),
    ),
    Case(
        "no_room",
        "Responses that fill the model's whole context",
        (*CHECK, *VLLM, f"rollout.max_new_tokens={CONTEXT}"),
    ),
    Case("head_size", "A head size that vLLM's CPU attention has not", (*CHECK, "rollout.engine=vllm")),
    Case(
        "kv_cache",
        "A KV cache that does not fit",
        (*PPO, *VLLM, f"rollout.vllm.kv_cache_memory_bytes={200 << 30}"),
        starts="vllm",
    ),
    Case("no_transport", "A cluster key without cluster.transport=ray", (*PPO, "cluster.pools.main.devices=2")),
    Case("no_engine", "A key of vLLM with in-process rollouts", (*PPO, "rollout.vllm.max_num_seqs=4")),
    Case("separate_local", "vLLM in a process of its own without Ray", (*PPO, *VLLM, "rollout.vllm.mode=separate")),
    Case(
        "separate_shared",
        "vLLM in a process of its own in the actor's pool",
        (*PPO, *VLLM, RAY, "rollout.vllm.mode=separate"),
    ),
    Case(
        "folds",
        "Cross-validation on Ray",
        ("run", "reward_model.yaml", RAY, "reward_model.folds=3"),
    ),
    Case("restarts", "Restarts without checkpoints", (*PPO, RAY, "cluster.restarts=1", "checkpoint.every=0")),
    Case(
        "runtime_env_key",
        "An unknown key of the runtime environment",
        (*PPO, RAY, "cluster.runtime_env.working_dr=."),
    ),
    Case(
        "runtime_env_folder",
        "A runtime environment from a folder that does not exist",
        (*PPO, RAY, "cluster.runtime_env.working_dir=code"),
    ),
)


def build(root: Path) -> Path:
    """The workspace of wrong_input, and models that vLLM can serve: two blocks, four heads of 32.

    swapped has a tokenizer with more tokens than the model has embeddings; renumbered has as many tokens as
    models/served, in another order.
    """
    disable_progress_bar()
    build_workspace(root)
    write_tall_model(root / "models" / "served")
    for name in ("swapped", "renumbered"):
        shutil.copytree(root / "models" / "served", root / "models" / name)
    size = len(PreTrainedTokenizerFast.from_pretrained(root / "models" / "served"))
    tokenizer(size + 50).save_pretrained(root / "models" / "swapped")
    tokenizer(size).save_pretrained(root / "models" / "renumbered")
    return root


def write_tall_model(folder: Path) -> None:
    write_model(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update(
        {
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "max_position_embeddings": CONTEXT,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Printable characters from the last to the first, then made-up tokens up to `size`."""
    tokens = ["<|unk|>", "<|end|>", "\n", *(chr(code) for code in reversed(range(32, 127)))]
    tokens += [f"<|{number}|>" for number in range(size - len(tokens))]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<|unk|>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<|unk|>", eos_token="<|end|>", pad_token="<|end|>"
    )


@contextlib.contextmanager
def port_with(what: str) -> Iterator[int]:
    """A port of this machine: free ("nothing"), "a socket" that accepts and says nothing, or "a cluster" of 2 CPUs."""
    if what == "a cluster":
        with port_with("nothing") as free, cluster_at(free):
            yield free
        return
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        if what == "nothing":
            taken.close()
        else:
            taken.listen(16)
        yield number


@contextlib.contextmanager
def cluster_at(port: int) -> Iterator[None]:
    """A Ray cluster of one node of this machine, and nothing left of it afterwards."""
    words = ["start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        node = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                *words,
                "--node-ip-address=127.0.0.1",
                f"--temp-dir={folder}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # a head asks for a token where an account has one
            start_new_session=True,
        )
        try:
            wait_for(port, node)
            yield
        finally:
            node.terminate()  # a blocked head ends its services with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"the Ray cluster did not come up within {WAIT_S} s (exit {process.poll()})")


def arguments(case: Case, port: int) -> tuple[str, ...]:
    return tuple(arg.replace("{port}", str(port)) for arg in case.args)


def run_case(root: Path, case: Case) -> Outcome:
    """The case where it belongs: in this process, or in one of its own."""
    if case.starts or case.hides:
        return in_process(root, case)
    if case.code:
        return code_here(root, case)
    with port_with(case.port or "nothing") as port:
        return call(root, arguments(case, port))


def code_here(root: Path, case: Case) -> Outcome:
    """Python that ends in SystemExit with the message; anything else is shown as it is."""
    message, exit_code, started = "", 0, time.perf_counter()
    with contextlib.chdir(root):
        try:
            exec(case.code, {})
        except SystemExit as stop:
            message, exit_code = str(stop.code), 1
        except Exception:
            message, exit_code = traceback.format_exc(), 1
    return Outcome((), exit_code, time.perf_counter() - started, message)


def in_process(root: Path, case: Case) -> Outcome:
    """The case in a process of its own, which is ended with everything it started at the deadline."""
    with port_with(case.port or "nothing") as port:
        args = arguments(case, port)
        command = [sys.executable, "-c", HIDDEN.format(package=case.hides)] if case.hides else list(COMMAND)
        command += args
        folders, started, used = run_folders(root), time.perf_counter(), cpu_seconds()
        process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\n(no answer within {WAIT_S} s)"
        seconds = time.perf_counter() - started
    message = (err + (out if process.returncode == 0 else "")).replace(sys.prefix, "ENVIRONMENT")
    outcome = outcome_of(root, args, process.returncode, seconds, message, folders)
    outcome.facts.append(f"{cpu_seconds() - used:.1f} s of CPU")
    return outcome


def cpu_seconds() -> float:
    """Of all processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def as_text(case: Case, outcome: Outcome, markdown: bool) -> str:
    shown = "python -c '...' (VLLMSpec.check)" if case.code else f"tutelage {shlex.join(outcome.args)}"
    hidden = f"  ({case.hides} hidden)" if case.hides else ""
    told = [f"$ {shown}{hidden}", *outcome.message.splitlines()]
    left = f"run folder made: {', '.join(outcome.left) or 'none'}"
    facts = [f"exit {outcome.exit_code}", f"{outcome.seconds:.1f} s", *outcome.facts, left]
    heading = f"### {case.title}" if markdown else f"== {case.title}"
    return "\n".join([heading, "", *(["```text", *told, "```"] if markdown else told), "", "; ".join(facts) + ".", ""])


def failed(case: Case, outcome: Outcome) -> bool:
    """A traceback, a wait without end, or no error where one is due."""
    traced = re.search(r"^\s*Traceback", outcome.message, re.MULTILINE) is not None
    return traced or (outcome.exit_code not in (1, 2) if case.name != "nothing_wrong" else outcome.exit_code != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        root = build(Path(folder).resolve())
        for case in CASES:
            if options.only not in case.name:
                continue
            outcome = run_case(root, case)
            if failed(case, outcome):
                bad.append(case.name)
            print(as_text(case, outcome, options.markdown), flush=True)
    print(f"{len(bad)} cases ended otherwise than with a message: {', '.join(bad) or 'none'}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
