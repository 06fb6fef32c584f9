"""vLLM as a server: started here in a process group of its own, or one that runs already; spoken to over HTTP.

The token-in token-out endpoint (`/inference/v1/generate`) streams token ids and logprobs; closing a stream aborts its
request.  Everything else is the server's development endpoints (VLLM_SERVER_DEV_MODE=1).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from tutelage.config.vllm import VLLMConfig
from tutelage.errors import RolloutError
from tutelage.rollout.sampling import SamplingParams
from tutelage.rollout.vllm.checks import require_free_port, start_error
from tutelage.rollout.vllm.environment import full_environment, server_variables
from tutelage.rollout.vllm.jobs import Collector, Job
from tutelage.rollout.vllm.local import ADAPTER, engine_arguments, sampling_arguments
from tutelage.rollout.vllm.manifest import Named

NAME = "policy-base"
_POLL = 0.2


class VLLMServer:
    """A server and the way to it.  `process` is None for one that was attached to: it is never stopped from here."""

    def __init__(
        self, url: str, config: VLLMConfig, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise RolloutError(f"rollout.vllm.url is {url!r}", fix="give http://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port or 80
        self.url = f"http://{self.host}:{self.port}"
        self.config = config
        self.process = process
        self.log = log

    @classmethod
    def of(
        cls, model: str, config: VLLMConfig, dtype: str, device: str, lora_rank: int, log_folder: str | None = None
    ) -> VLLMServer:
        """Attach to config.url, or start one and wait for it.

        Raises RolloutError for a port that is taken, a server that ends or is not healthy within config.start_timeout.
        """
        if config.url is not None:
            server = cls(config.url, config)
        else:
            port = require_free_port(config.port)
            folder = Path(log_folder or tempfile.mkdtemp(prefix="tutelage-vllm-"))
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"vllm-{port}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command(model, port, engine_arguments(model, config, dtype, device, lora_rank)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=full_environment(server_variables(config, device)),
                    start_new_session=True,
                )
            server = cls(f"http://127.0.0.1:{port}", config, process, log)
        try:
            server.wait_until_healthy()
            server.require_processed_logprobs()
        except BaseException:
            server.close()
            raise
        return server

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        while True:
            if self.process is not None and self.process.poll() is not None:
                raise start_error(RuntimeError(f"it ended with {self.process.returncode}: {self._last()}"), self.config)
            with suppress(OSError, http.client.HTTPException):
                status, _ = self._exchange("GET", "/health", None, timeout=5)
                if status == 200:
                    return
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"the vLLM server at {self.url} was not healthy within {self.config.start_timeout:g} s",
                    fix=f"raise rollout.vllm.start_timeout, or look at its log {self.log or ''}".rstrip(),
                )
            time.sleep(_POLL)

    def require_processed_logprobs(self) -> None:
        """A server that was started by hand must report logprobs of the sampled distribution."""
        found = self.call("GET", "/server_info?config_format=json")["vllm_config"]["model_config"]["logprobs_mode"]
        if found != "processed_logprobs":
            raise RolloutError(
                f"the vLLM server at {self.url} reports {found}, which ignores the temperature",
                fix="start it with --logprobs-mode processed_logprobs",
            )

    def max_model_len(self) -> int:
        return int(self.call("GET", "/v1/models")["data"][0]["max_model_len"])

    def call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """JSON in, JSON out.  Raises RolloutError with what the server said."""
        limit = self.config.request_timeout if timeout is None else timeout
        try:
            status, data = self._exchange(method, path, body, limit)
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(f"{method} {path}: {type(error).__name__} {error}") from error
        if status != 200:
            raise RolloutError(
                f"the vLLM server answered {status} to {method} {path}: {data.decode(errors='replace')[:600]}",
                fix=f"look at its log {self.log}" if self.log else "look at its log",
            )
        return json.loads(data) if data.strip() else None

    def stream(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """The events of a streaming answer; closing the generator closes the connection, which aborts the request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.config.request_timeout)
        try:
            with closing(connection):
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != 200:
                    text = response.read().decode(errors="replace")[:600]
                    raise RolloutError(f"the vLLM server answered {response.status} to {path}: {text}")
                for line in response:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(f"{path}: {type(error).__name__} {error}") from error

    def close(self) -> None:
        """Kill the process group of a server that was started here, and wait for it; the log stays."""
        if self.process is None:
            return
        for sign, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                break
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    def _exchange(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=timeout)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def _gone(self, what: str) -> RolloutError:
        ended = self.process is not None and self.process.poll() is not None
        state = f"it ended with {self.process.returncode}" if ended and self.process else "it runs"
        return RolloutError(
            f"the vLLM server at {self.url} did not answer ({what}); {state}",
            fix=f"look at its log {self.log}" if self.log else "look at its log; raise rollout.vllm.request_timeout",
        )

    def _last(self) -> str:
        """The last line of the log that names an error, else its end."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log is not None else []
        errors = [line for line in lines if "Error" in line and "engine process failed" not in line.lower()]
        return (errors or lines or [""])[-1]


def command(model: str, port: int, arguments: dict[str, Any]) -> list[str]:
    """The server's command line.  A flag per argument; dictionaries go as JSON."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--served-model-name", NAME, "--disable-log-stats", "--disable-uvicorn-access-log", "--enable-scale-out"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


class ServerEngine:
    """Implements `jobs.Backend` over HTTP: one thread a response that is decoded, at most config.max_num_seqs."""

    def __init__(self, server: VLLMServer) -> None:
        self.server = server
        self.max_model_len = server.max_model_len()
        self._model = NAME if server.process is not None else str(server.call("GET", "/v1/models")["data"][0]["id"])

    def run(self, jobs: Sequence[Job], params: SamplingParams, stop_ids: Sequence[int], collector: Collector) -> None:
        pool = ThreadPoolExecutor(max(1, min(len(jobs), self.server.config.max_num_seqs)))
        futures = [pool.submit(self._one, i, job, params, stop_ids, collector) for i, job in enumerate(jobs)]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, index: int, job: Job, params: SamplingParams, stop_ids: Sequence[int], collector: Collector) -> None:
        if collector.enough():
            return
        body = {
            "model": self._model,
            "token_ids": list(job.tokens),
            "sampling_params": sampling_arguments(job, params, stop_ids),
            "stream": True,
        }
        with closing(self.server.stream("/inference/v1/generate", body)) as events:
            for event in events:
                if "error" in event:
                    raise RolloutError(f"the vLLM server failed on prompt {job.name!r}: {event['error']}")
                for choice in event.get("choices", ()):
                    entries = (choice.get("logprobs") or {}).get("content") or ()
                    over = collector.take(index, choice.get("token_ids") or (), [e["logprob"] for e in entries])
                    if over or collector.enough():
                        return
        raise RolloutError(
            f"the vLLM server ended prompt {job.name!r} by itself (a pause or an abort?)",
            fix="generate while the server is not paused",
        )

    def rpc(self, method: str, kwargs: dict[str, Any], timeout: float | None = None) -> list[Any]:
        reply = self.server.call("POST", "/collective_rpc", {"method": method, "kwargs": kwargs}, timeout)
        return list(reply["results"]) if reply else []

    def load(self, named: Named) -> None:
        raise RolloutError(
            "tensors cannot be sent over HTTP", fix="join a WeightSender and receive, or use load_folder"
        )

    def load_adapter(self, folder: str) -> None:
        body = {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
        self.server.call("POST", "/v1/load_lora_adapter", body)
        self._model = ADAPTER

    def reset_prefix_cache(self) -> None:
        self.server.call("POST", "/reset_prefix_cache")

    def pause(self, mode: str = "abort") -> None:
        """abort: what runs ends; wait: it is finished first; keep: it is frozen until `resume`."""
        self.server.call("POST", f"/pause?{urlencode({'mode': mode})}")

    def resume(self) -> None:
        self.server.call("POST", "/resume")

    def paused(self) -> bool:
        return bool(self.server.call("GET", "/is_paused")["is_paused"])

    def abort(self) -> int:
        """End everything that runs; how many requests that were."""
        return int(self.server.call("POST", "/abort_requests", {})["aborted"])

    def sleep(self, level: int) -> None:
        self.server.call("POST", f"/sleep?level={level}")

    def wake(self, tag: str) -> None:
        self.server.call("POST", f"/wake_up?tags={tag}")

    def close(self) -> None:
        self.server.close()
