"""A vLLM server as a subprocess, and an engine that uses a vLLM server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from skyrl_megatron import device
from skyrl_megatron.errors import EngineError, EngineGoneError, RequestError, WeightSyncError
from skyrl_megatron.inference.protocol import (
    ENGINE_KEY,
    INITIAL_VERSION,
    Generation,
    InferenceEngine,
    OpenAIAnswer,
    PauseMode,
    SampleRequest,
    WeightMetadata,
    worker_results,
)
from skyrl_megatron.inference.sampling_params import TOKENS, WrongType, invalid_request, typed_sampling, typed_tokens
from skyrl_megatron.inference.vllm.processes import last_errors
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config, platform_arguments, worker_environment
from skyrl_megatron.weight_sync.tensors import plain_metadata
from skyrl_megatron_agents.http_endpoint import MAX_HEAD_BYTES, EngineGuard

MODULE = "skyrl_megatron_tools.remote.api_server"
REQUIRED_ARGUMENTS = {
    "worker_extension_cls": "skyrl_megatron.inference.vllm.compat.WorkerExtension",
    "weight_transfer_config": {"backend": "skyrl_megatron"},
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
}
"""Arguments of every server; :data:`REQUIRED_FLAGS` has their purpose."""
LOOK_S = 0.2
END_S = 30.0
_PR_SET_PDEATHSIG = 1
_set_at_death = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True)
class EngineHosts:
    """The hosts of an engine: their number, this host's rank, and the address of the server on host 0.

    The workers connect over the port after that of the server.
    """

    count: int = 1
    number: int = 0
    first: tuple[str, int] = ("127.0.0.1", 0)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for several hosts."""
        if self.count == 1:
            return {}
        host, port = self.first
        return {"nnodes": self.count, "node_rank": self.number, "master_addr": host, "master_port": port + 1}


class EngineServer:
    """A vLLM server on ``host:port`` that requires the token ``key``. On hosts other than host 0, only its workers.

    ``more``: arguments of vLLM's command line, applied last. The output goes to ``settings.log_file``.
    """

    def __init__(
        self,
        settings: EngineSettings,
        host: str,
        port: int,
        key: str,
        more: Sequence[str] = (),
        hosts: EngineHosts = EngineHosts(),
    ) -> None:
        assert settings.log_file is not None
        self.log_file: Path = settings.log_file
        self.url = "http://{}:{}".format(*(hosts.first if hosts.number else (host, port)))
        arguments = (
            settings.arguments()
            | platform_arguments(hf_config(settings.folder))
            | REQUIRED_ARGUMENTS
            | hosts.arguments()
        )
        if hosts.number:
            self.command = [sys.executable, "-m", MODULE, "--headless", *flags(arguments), *more]
        else:
            guard = f"{EngineGuard.__module__}.{EngineGuard.__name__}"
            serving = {
                "host": host,
                "port": port,
                "middleware": guard,
                "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
            }
            self.command = [sys.executable, "-m", MODULE, *flags(arguments | serving), *more]
        self.environment = os.environ | worker_environment() | {ENGINE_KEY: key, "VLLM_SERVER_DEV_MODE": "1"}
        if hosts.count > 1:
            self.environment["VLLM_HOST_IP"] = host  # the address for workers on other hosts
        if settings.enforce_eager and not device.has_cuda():
            self.environment["TORCH_COMPILE_DISABLE"] = "1"  # as compat.WorkerExtension.skyrl_compile_nothing
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server in a separate session. It ends when this process ends or is killed."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: _set_at_death(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def wait_until_ready(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until the server answers, or return False after ``stop()``. Raises EngineError with its errors."""
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if stop():
                return False
            self.require_alive("did not start")
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM was not ready after {timeout_s:g} s; see its output in {self.log_file}")
            time.sleep(LOOK_S)
        return True

    def require_alive(self, what: str = "ended") -> None:
        """Raise EngineError with vLLM's last errors if its process has ended."""
        if self._process is None or self._process.poll() is not None:
            errors = "\n  ".join(last_errors(self.log_file)) or "no error in its output"
            raise EngineError(f"vLLM {what}: {errors}\n  (full output: {self.log_file})")

    def stop(self) -> None:
        """End the server and all of its processes."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self._process.wait(END_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def answers(self) -> bool:
        """Return whether the server (on host 0) is healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except (OSError, http.client.HTTPException):
            return False


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments of vLLM's engine to options of its command line. None values are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            words.append(f"--{option}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *map(str, value)]
        else:
            words.append(f"--{option}={value}")
    return words


FIRST_ANSWER_S = 300.0
"""Deadline of a server's first answers, during which it compiles kernels."""
_EXTENSION = "--worker-extension-cls skyrl_megatron.inference.vllm.compat.WorkerExtension"
REQUIRED_FLAGS = {
    "VLLM_SERVER_DEV_MODE=1": "the RL endpoints (pause, weight updates, versions)",
    "--enable-scale-out": f"{TOKENS} (tokens in, tokens out)",
    "--logprobs-mode processed_logprobs": "log-probs at the sampling temperature",
    _EXTENSION: "checksums of received weights",
    '--weight-transfer-config \'{"backend":"skyrl_megatron"}\'': "weight updates from this trainer",
    "--generation-config vllm": "neutral sampling defaults",
}
"""Flags that a server must be started with → their purpose."""
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Required defaults for OpenAI requests. With others, the trainer's softmax is not the sampling distribution."""


class RemoteEngine(InferenceEngine):
    """An ``InferenceEngine`` that uses a vLLM server, which is started and ended elsewhere.

    ``url``: address of the server. ``proxy_url``: address for sampling requests, such as a router for several servers.
    ``key``: bearer token for both; None or empty: no token. A key from this process's environment must be sent only to
    servers of the user's configuration.
    """

    def __init__(
        self, url: str, *, proxy_url: str | None = None, timeout_s: float = 3600.0, key: str | None = None
    ) -> None:
        self.url, self.proxy_url = _base(url), _base(proxy_url or url)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )
        self._metadata: list[list[list[Any]]] | None = None
        self.max_model_len = 0
        """The server's longest sequence in tokens, known after :meth:`start`."""

    # ------------------------------------------------------------------ start and end
    async def start(self) -> None:
        """Check that the server answers and has the required flags. Raises EngineError with the missing flag."""
        try:
            models = (await self._http.get(f"{self.proxy_url}/v1/models", timeout=10)).json()
            self.max_model_len = int(models["data"][0]["max_model_len"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"no vLLM server at {self.proxy_url} ({error!r}): start it, or fix the URL") from error
        await self._require("VLLM_SERVER_DEV_MODE=1", "GET", f"{self.url}/weight_info")
        # calls a method of the extension; an earlier run may have left an unfinished update and a pause
        await self._require(_EXTENSION, "POST", f"{self.url}/collective_rpc", {"method": "skyrl_abort_update"})
        await self.resume()
        greedy = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "temperature": 0.5, "logprobs": 0, "seed": 0}}
        sampled = await self._require("--enable-scale-out", "POST", f"{self.proxy_url}{TOKENS}", greedy)
        entry = sampled["choices"][0]["logprobs"]["content"][0]
        [unscaled] = await self.score([1, entry["token_id"]])
        if abs(unscaled - entry["logprob"]) < 1e-6 and unscaled < -1e-3:
            raise EngineError(self._missing("--logprobs-mode processed_logprobs"))
        await self._require_neutral_defaults()
        await self.set_version(INITIAL_VERSION)

    async def shutdown(self) -> None:
        """Close the connections. The server keeps running."""
        await self._http.aclose()

    async def kill(self) -> None:
        """Close the connections. The server keeps running."""
        await self._http.aclose()

    async def health(self) -> None:
        await self._control("/collective_rpc", {"method": "skyrl_ping"})

    # ------------------------------------------------------------------ sampling
    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: Mapping[str, Any], adapter: str = ""
    ) -> Generation:
        if adapter:
            raise RequestError(f"request {request_id}: adapter {adapter!r}: remote servers do not support adapters")
        parameters = {**sampling, "logprobs": None if sampling.get("logprobs", 0) is None else 0}
        choice = (await self._tokens(request_id, prompt_token_ids, parameters))["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Generation(
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in content],
            finish_reason=choice["finish_reason"],
            versions=[(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or []],
        )

    async def generate_batch(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Sample all requests. Their order at the server varies, so results are not bitwise repeatable."""
        return list(
            await asyncio.gather(
                *(self.generate(r.request_id, r.prompt_token_ids, r.sampling, r.adapter) for r in requests)
            )
        )

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        answer = await self._tokens(f"score-{uuid.uuid4().hex}", token_ids, parameters)
        scored = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return [position[str(token)]["logprob"] for token, position in scored]

    async def abort(self, request_id: str) -> None:
        await self._post(f"{self.proxy_url}/inference/v1/abort_requests", {"request_ids": [request_id]})

    async def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        headers = {"content-type": "application/json"}
        with self._reachable():
            async with self._http.stream("POST", self.proxy_url + path, content=body, headers=headers) as response:
                yield response.status_code, response.headers.get("content-type", "application/json")
                async for piece in response.aiter_bytes():
                    yield piece

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._control(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        await self._control("/resume")

    async def reset_prefix_cache(self) -> None:
        await self._control("/reset_prefix_cache")

    async def sleep(self, level: int = 1) -> None:
        """Do nothing: a remote server shares no GPU with the trainer."""

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: a remote server shares no GPU with the trainer."""

    # ------------------------------------------------------------------ weights
    async def worker_count(self) -> int:
        return int((await self._get("/get_world_size"))["world_size"])

    async def connect_weights(
        self, senders: Sequence[tuple[str, int]], rank_offset: int, world_size: int, **options: Any
    ) -> None:
        self._metadata = None
        info = {"senders": [list(s) for s in senders], "rank_offset": rank_offset, "world_size": world_size} | options
        with _sync_errors("connect"):
            await self._control("/init_weight_transfer_engine", {"init_info": info})
            await self._workers("skyrl_connected")

    async def weight_targets(self, metadata: Sequence[Any]) -> list[Any] | str:
        """Return that there are none: plans do not fit into requests."""
        return f"{self.url} is reached over HTTP"

    async def start_update(self) -> None:
        with _sync_errors("start"):
            await self._control("/start_weight_update")

    async def receive_weights(self, metadata: WeightMetadata) -> list[list[list[int]]]:
        plain = plain_metadata(metadata)
        info = {"senders": None if plain == self._metadata else plain}
        self._metadata = None
        with _sync_errors("receive"):
            await self._control("/update_weights", {"update_info": info})
            checksums = await self._workers("skyrl_checksums")
        self._metadata = plain
        return checksums

    async def finish_update(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        """Process the loaded weights and set ``version``. ``adapters`` are not supported."""
        with _sync_errors("finish"):
            await self._control("/finish_weight_update", {"weight_version": version})
            # frozen requests would keep the cache from being cleared, so they recompute their keys and values
            await self._control("/reset_prefix_cache?reset_running_requests=true")

    async def abort_update(self) -> None:
        with _sync_errors("abort"):
            await self._workers("skyrl_abort_update")

    async def version(self) -> str:
        return str((await self._get("/weight_info"))["weight_version"])

    async def set_version(self, version: str) -> None:
        await self._control("/update_weight_version", {"new_version": version})

    # ------------------------------------------------------------------ HTTP
    async def _tokens(self, request_id: str, token_ids: Sequence[int], parameters: Mapping[str, Any]) -> Any:
        try:
            typed, sampling = typed_tokens(token_ids), typed_sampling(parameters)
        except WrongType as error:
            raise invalid_request(request_id, error) from error
        body = {"request_id": request_id, "token_ids": typed, "sampling_params": sampling}
        response = await self._send(self.proxy_url + TOKENS, body)
        # 5xx: vLLM's engine or the server behind a proxy is dead; 401 and 404: another server uses the address
        if response.status_code >= 300 and response.status_code != 400:
            raise EngineGoneError(_status_and_message(response))
        return _content(response)

    async def _workers(self, method: str) -> list[Any]:
        """Return the result of ``method`` on each worker. Raises EngineError with a worker's error."""
        answer = await self._control("/collective_rpc", {"method": "skyrl_call", "args": [method]})
        try:
            return worker_results(answer["results"])
        except RuntimeError as error:
            raise EngineError(str(error)) from error

    async def _control(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._post(self.url + path, body)

    async def _get(self, path: str) -> Any:
        with self._reachable():
            response = await self._http.get(self.url + path)
        return _content(response)

    async def _post(self, url: str, body: Mapping[str, Any] | None) -> Any:
        return _content(await self._send(url, body))

    async def _send(self, url: str, body: Mapping[str, Any] | None) -> httpx.Response:
        with self._reachable():
            return await self._http.post(url, json=body)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise EngineGoneError(f"the server at {self.url} does not answer: {error!r}") from error

    async def _require(self, flag: str, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._reachable():
            response = await self._http.request(method, url, json=body, timeout=FIRST_ANSWER_S)
        if response.status_code >= 300:
            raise EngineError(f"{self._missing(flag)}: {response.status_code} {_message(response)}")
        return _content(response)

    async def _require_neutral_defaults(self) -> None:
        """Check the server's default sampling parameters, which the model folder's ``generation_config.json`` or
        ``--override-generation-config`` may change. Raises EngineError with the flag and the values."""
        path = "/v1/completions/render"
        bare = {"prompt": [1], "max_tokens": 1}
        [rendered] = await self._require("--enable-scale-out", "POST", self.url + path, bare)
        defaults = {name: rendered["sampling_params"].get(name, value) for name, value in NEUTRAL.items()}
        changed = [f"{name}={value}" for name, value in defaults.items() if value != NEUTRAL[name]]
        if changed:
            raise EngineError(
                f"the server at {self.url} has sampling defaults {', '.join(changed)}: start it with "
                "--generation-config vllm, and without --override-generation-config"
            )

    def _missing(self, flag: str) -> str:
        return f"the server at {self.url} does not support {REQUIRED_FLAGS[flag]}: start it with {flag}"


def _base(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _content(response: httpx.Response) -> Any:
    if response.status_code == 400:
        raise RequestError(f"{response.url}: {_message(response)}")
    if response.status_code >= 300:
        raise EngineError(_status_and_message(response))
    return response.json() if response.content else None


def _status_and_message(response: httpx.Response) -> str:
    return f"{response.url}: {response.status_code} {_message(response)}"


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        return str(body.get("error", {}).get("message") or body.get("detail") or body)
    except (ValueError, AttributeError):
        return response.text[:300]


@contextlib.contextmanager
def _sync_errors(phase: str) -> Iterator[None]:
    try:
        yield
    except EngineGoneError:
        raise
    except EngineError as error:
        raise WeightSyncError(f"{phase}: {error}") from error
