"""A vLLM server in a process of its own that takes weights from a trainer: its command, variables, start and end."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.errors import EngineError
from skyrl_megatron.inference.http_guard import EngineGuard
from skyrl_megatron.inference.http_limits import MAX_HEAD_BYTES
from skyrl_megatron.inference.protocol import ENGINE_KEY
from skyrl_megatron.inference.vllm.log import last_errors
from skyrl_megatron.inference.vllm.model_folder import hf_config
from skyrl_megatron.inference.vllm.platform import platform_arguments, worker_environment
from skyrl_megatron.inference.vllm.settings import EngineSettings

MODULE = "skyrl_megatron.inference.vllm.api_server"
FURTHER = "skyrl_megatron.inference.vllm.further_host"
NEEDED = {
    "worker_extension_cls": "skyrl_megatron.inference.vllm.compat.WorkerExtension",
    "weight_transfer_config": {"backend": "skyrl_megatron"},
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
}
"""Arguments of every server (``remote.NEEDED`` says what for)."""
LOOK_S = 0.2
END_S = 30.0
_PR_SET_PDEATHSIG = 1
_set_at_death = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True)
class EngineHosts:
    """How many hosts an engine is over, which of them this one is, and where the first one's server listens. Workers
    meet at the port after that."""

    count: int = 1
    number: int = 0
    first: tuple[str, int] = ("127.0.0.1", 0)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for it."""
        if self.count == 1:
            return {}
        host, port = self.first
        return {"nnodes": self.count, "node_rank": self.number, "master_addr": host, "master_port": port + 1}


class EngineServer:
    """A vLLM server of ``settings`` on ``host:port``, which asks every request for ``key``; on a further host of
    ``hosts`` the workers there alone, for the first one's server.

    ``more``: arguments of vLLM's command line, applied last. Its output goes to ``settings.log_file``.
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
        arguments = settings.arguments() | platform_arguments(hf_config(settings.folder)) | NEEDED | hosts.arguments()
        if hosts.number:
            self.command = [sys.executable, "-m", FURTHER, *flags(arguments), *more]
        else:
            guard = f"{EngineGuard.__module__}.{EngineGuard.__name__}"
            own = {"host": host, "port": port, "middleware": guard, "h11_max_incomplete_event_size": MAX_HEAD_BYTES}
            self.command = [sys.executable, "-m", MODULE, *flags(arguments | own), *more]
        self.environment = os.environ | worker_environment() | {ENGINE_KEY: key, "VLLM_SERVER_DEV_MODE": "1"}
        if hosts.count > 1:
            self.environment["VLLM_HOST_IP"] = host  # what workers of other hosts reach this one's by
        if settings.enforce_eager and not device.has_cuda():
            self.environment["TORCH_COMPILE_DISABLE"] = "1"  # as compat.WorkerExtension.skyrl_compile_nothing
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own; it ends when this process does, whatever ended it."""
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
        """Wait until it answers; False when ``stop`` says so first. Raises EngineError with its last errors."""
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if stop():
                return False
            self.require_alive("did not start")
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM was not ready after {timeout_s:g} s; its output is in {self.log_file}")
            time.sleep(LOOK_S)
        return True

    def require_alive(self, what: str = "ended") -> None:
        """Raise EngineError, with what vLLM said last, if its process is gone."""
        if self._process is None or self._process.poll() is not None:
            said = "\n  ".join(last_errors(self.log_file)) or "it gave no error"
            raise EngineError(f"vLLM {what}: {said}\n  (all of it: {self.log_file})")

    def stop(self) -> None:
        """End it and all of its processes."""
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
        """Whether the server (that of the first host) says that it is well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except (OSError, http.client.HTTPException):
            return False


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments of vLLM's engine as options of its command line; None is left out."""
    found: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            found.append(f"--{option}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            found += [f"--{option}", *map(str, value)]
        else:
            found.append(f"--{option}={value}")
    return found
