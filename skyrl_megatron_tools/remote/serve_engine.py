"""Serve an engine for a run on another host: start vLLM, join the run's registry, and leave at SIGTERM or Ctrl-C.

    skyrl-megatron serve-engine --model FOLDER --registry http://HOST:PORT --token-file FILE [options]
        [-- options of vLLM]

The run (``generator.inference_engine.enable_registry=true``) prints the address of its registry and the file with the
token. The engine receives the run's weights, a probe checks them, and it serves requests. When it leaves, its requests
finish or move to other engines. If the run no longer knows it, for example after a restart, it joins again. Exit code
0: the engine left, or the run ended. 1: the run rejected the engine, or vLLM failed.

To serve one engine on several hosts, start this command on each of them with --nodes N, --node-rank 0, 1, …, the same
--tp and --pp, and --host with the host's own address. Host 0 also needs --port. The others need --first
http://HOST0:PORT. The workers connect over the port after that one. The other hosts end when host 0 ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from skyrl_megatron import device, hub
from skyrl_megatron.command import run_command
from skyrl_megatron.errors import EngineError, LaunchError, SkyRLMegatronError
from skyrl_megatron.inference.protocol import ENGINE_KEY
from skyrl_megatron.inference.vllm.processes import use_private_temporary_folder
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config
from skyrl_megatron.interrupts import Interrupted, replace_handlers, restore_handlers
from skyrl_megatron_agents.http_endpoint import listening_socket
from skyrl_megatron_tools.remote.fleet import package_versions
from skyrl_megatron_tools.remote.remote_engine import EngineHosts, EngineServer

ANSWER_S = 30.0
JOIN_S = 1800.0
"""The run checks the engine and sends it the weights before it answers."""
LEAVE_S = 1800.0
"""The run finishes or moves requests, and completes a running sync, before it answers."""
RETRY_S = 1.0


class FleetClient:
    """A client of the registry at ``url``.

    ``source``: where the token is from, for messages. ``patience_s``: how long the registry may be unreachable.
    """

    def __init__(self, url: str, token: str, source: str, patience_s: float) -> None:
        self.url, self.source, self.patience_s = url.rstrip("/"), source, patience_s
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"})

    def check(self, model: Mapping[str, Any], versions: Mapping[str, str], stop: Callable[[], bool]) -> dict[str, Any]:
        """Return the settings that the run requires. Raises LaunchError if such an engine cannot join."""
        return self._post_with_retries("/engines/check", {"model": model, "versions": versions}, ANSWER_S, stop)

    def join(self, join_request: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Any]:
        """Join the run. Return the engine's name, its state and ``heartbeat_s``. Raises LaunchError if rejected."""
        return self._post_with_retries("/engines", join_request, JOIN_S, stop)

    def heartbeat(self, name: str) -> dict[str, Any] | None:
        """Send a heartbeat. Return the engine's state, or None if the run does not know the engine.

        Raises ConnectionError if there is no answer.
        """
        return self._request("PUT", f"/engines/{name}", None, ANSWER_S)

    def leave(self, name: str) -> dict[str, Any] | None:
        """Leave the run. Return as :meth:`heartbeat`, once the engine is not needed any more."""
        return self._request("DELETE", f"/engines/{name}", None, LEAVE_S)

    def _post_with_retries(self, path: str, body: Any, timeout_s: float, stop: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer = self._request("POST", path, body, timeout_s)
                assert answer is not None
                return answer
            except ConnectionError as error:
                if time.monotonic() > deadline or stop():
                    raise LaunchError(
                        f"--registry={self.url}: no answer for {self.patience_s:g} s ({error}); check that the run is "
                        "up, with generator.inference_engine.enable_registry=true and a registry_host that this host "
                        "can reach"
                    ) from error
                time.sleep(RETRY_S)

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer, or None if the run does not know the engine."""
        try:
            response = self._http.request(method, self.url + path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if response.status_code == 401:
            raise LaunchError(
                f"{self.source}: the run at {self.url} does not accept this token: copy its file registry_token"
            )
        if response.status_code == 404 and method != "POST":
            return None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code < 300 and isinstance(answer, dict):
            return answer
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise LaunchError(str(answer["error"].get("message")))
        raise LaunchError(
            f"--registry={self.url}: status {response.status_code}: this is not the registry of a run; give the one "
            "that the run prints"
        )


POLL_S = 1.0
TEMPORARY_VARIABLES = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
"""Environment variables that are set to the engine's temporary folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args, more = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(args)

    def work() -> int:
        with _stop_signals() as stop:
            return _serve(options, more, stop)

    return run_command(work)


def _parser() -> argparse.ArgumentParser:
    about, usage, rest = (__doc__ or "").split("\n\n", 2)
    parser = argparse.ArgumentParser(
        usage=" ".join(usage.split()),
        description=about,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="the run's model: HF folder, or org/name of the Hugging Face hub")
    add("--registry", required=True, metavar="URL", help="address of the run's registry")
    add("--token-file", required=True, metavar="FILE", help="file with the registry's token")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=0, help="port to listen on (default 0: any free port)")
    add("--url", help="address at which the run reaches this server (default http://HOST:PORT)")
    add("--tensor-parallel-size", "--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)")
    add("--pipeline-parallel-size", "--pp", type=int, default=1, metavar="N", help="pipeline stages (default 1)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences decoded concurrently (default 256)")
    add("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (default: the run's)")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="share of GPU memory (default 0.9)")
    add("--nodes", type=int, default=1, metavar="N", help="number of hosts of this engine (default 1)")
    add("--node-rank", type=int, default=0, metavar="R", help="rank of this host, from 0 (default 0)")
    add("--first", metavar="URL", help="address of the server on host 0, required on the other hosts")
    add("--patience", type=float, default=60.0, metavar="S", help="how long the run may be unreachable (default 60)")
    add("--start-timeout", type=float, default=1800.0, metavar="S", help="deadline for vLLM to start (default 1800)")
    add("--log-file", type=Path, metavar="FILE", help="file for vLLM's output (default: temporary, kept on failure)")
    return parser


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Return (arguments of this command, arguments after ``--``)."""
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _serve(options: argparse.Namespace, more: Sequence[str], stop: threading.Event) -> int:
    """Serve the engine with a temporary folder for vLLM's sockets and log, which only this user can read.

    The folder is removed at the end, except the log of an engine that failed.
    """
    usual, before = tempfile.tempdir, {name: os.environ.get(name) for name in TEMPORARY_VARIABLES}
    folder = Path(use_private_temporary_folder())
    log = options.log_file or folder / "engine.log"
    failed = False
    try:
        return _serve_in(options, more, stop, log)
    except SkyRLMegatronError:
        failed = True
        raise
    finally:
        tempfile.tempdir = usual
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for path in folder.iterdir():
            if not (failed and path == log):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the log is still there
            folder.rmdir()


def _serve_in(options: argparse.Namespace, more: Sequence[str], stop: threading.Event, log: Path) -> int:
    hosts = _hosts(options)
    folder = _model_folder(options.model)
    source = f"--token-file={options.token_file}"
    registry = FleetClient(options.registry, _token(options.token_file), source, options.patience)
    with listening_socket(options.host, options.port, "--port") as listener:
        port = int(listener.getsockname()[1])
    checked = {"model": hf_config(folder), "versions": package_versions()}
    required = registry.check(**checked, stop=stop.is_set)
    _say(f"run: {options.registry} accepts engines of this model, in {required['dtype']}")
    settings = EngineSettings(
        model=str(folder),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        dtype=required["dtype"],
        max_model_len=options.max_model_len or required["max_model_len"],
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=not device.has_cuda(),
        distributed_executor_backend="mp",
        served_model_name=required["served_model_name"],
        log_file=log,
    ).on_this_node()
    key = os.environ.get(ENGINE_KEY) or secrets.token_urlsafe(32)
    server = EngineServer(settings, options.host, port, key, more, hosts)
    join_request = checked | {"url": options.url or server.url, "key": key}
    join_request |= {"dtype": settings.dtype, "workers": settings.workers}
    began = time.monotonic()
    server.start()
    try:
        if hosts.number:
            return _run_other_host(server, options, stop)
        if not server.wait_until_ready(options.start_timeout, stop.is_set):
            return 0
        _say(f"server: {server.url} is ready after {time.monotonic() - began:.0f} s, output in {server.log_file}")
        return _Membership(registry, server, join_request, stop).run()
    finally:
        server.stop()


def _hosts(options: argparse.Namespace) -> EngineHosts:
    """Return the hosts of the engine. Raises LaunchError for inconsistent options."""
    nodes, number, first = options.nodes, options.node_rank, options.first
    workers = options.tensor_parallel_size * options.pipeline_parallel_size
    if not 0 <= number < nodes:
        raise LaunchError(f"--node-rank={number}: with --nodes={nodes}, give 0 to {nodes - 1}")
    if workers % nodes:
        raise LaunchError(f"--nodes={nodes} does not divide the {workers} workers (--tp times --pp): change one")
    if number == 0:
        if nodes > 1 and not options.port:
            raise LaunchError("--port is missing: the engine's other hosts connect to it, so choose one that is free")
        return EngineHosts(nodes, 0, (options.host, options.port))
    address = urlsplit(first or "")
    if address.hostname is None or address.port is None:
        wrong = "--first is missing" if first is None else f"--first={first} is not http://HOST:PORT"
        raise LaunchError(f"{wrong}: give the address of the engine's server on host 0")
    return EngineHosts(nodes, number, (address.hostname, address.port))


def _run_other_host(server: EngineServer, options: argparse.Namespace, stop: threading.Event) -> int:
    """Run the workers of another host until the server on host 0 ends. vLLM itself would wait forever."""
    began = answered = time.monotonic()
    ready = False
    while not stop.wait(POLL_S):
        server.require_alive()
        if server.answers():
            answered = time.monotonic()
            if not ready:
                ready = True
                _say(f"workers: ready for {server.url} after {answered - began:.0f} s, output in {server.log_file}")
        elif ready and time.monotonic() - answered > options.patience:
            _say(f"{server.url} ended: no answer for {options.patience:g} s")
            return 0
        elif not ready and time.monotonic() - began > options.start_timeout:
            raise EngineError(
                f"--first={server.url} was not ready after {options.start_timeout:g} s: see its log there, or raise "
                "--start-timeout"
            )
    return 0


class _Membership:
    """The membership of an engine in a run, also across restarts of the run."""

    def __init__(
        self, registry: FleetClient, server: EngineServer, join_request: dict[str, Any], stop: threading.Event
    ) -> None:
        self.registry, self.server, self.join_request, self.stop = registry, server, join_request, stop
        self._reported = ""

    def run(self) -> int:
        """Join, and rejoin if the run no longer knows the engine, until it is stopped or the run ends."""
        while True:
            member = self.registry.join(self.join_request, self.stop.is_set)
            self._report(member)
            try:
                rejoin = self._send_heartbeats(member)
            except EngineError:
                self._leave(member["engine"])
                raise
            if not rejoin:
                return 0

    def _send_heartbeats(self, member: dict[str, Any]) -> bool:
        """Send heartbeats until the membership ends. Return whether to join again.

        Raises EngineError if vLLM ended, and LaunchError if the run rejects the engine.
        """
        name, answered = member["engine"], time.monotonic()
        next_beat = answered + member["heartbeat_s"]
        while not self.stop.wait(POLL_S):
            self.server.require_alive()
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + member["heartbeat_s"]
            try:
                state = self.registry.heartbeat(name)
            except ConnectionError as error:
                if time.monotonic() - answered > self.registry.patience_s:
                    reason = f"no answer for {self.registry.patience_s:g} s ({error})"
                    _say(f"the run at {self.registry.url} ended: {reason}")
                    return False
                continue
            answered = time.monotonic()
            if state is None or state["state"] in ("lost", "left"):
                _say(f"{name}: {'unknown to the run' if state is None else state['why']}; joining again")
                return True
            if state["state"] == "refused":
                raise LaunchError(f"the run rejected {name}: {state['why']}")
            self._report(state)
        self._leave(name)
        return False

    def _leave(self, name: str) -> None:
        try:
            state = self.registry.leave(name)
        except (ConnectionError, LaunchError) as error:
            _say(f"{name}: could not leave the registry: {error}")
            return
        if state is not None:
            _say(f"{name}: left after {state['answered']} requests, {state['moved']} moved to others")

    def _report(self, state: dict[str, Any]) -> None:
        line = f"{state['engine']}: {state['state']}"
        if line != self._reported:
            self._reported = line
            _say(line)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C, SIGTERM or SIGHUP sets. The second signal raises Interrupted."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise Interrupted(number)
        stop.set()

    before = replace_handlers(handle)
    try:
        yield stop
    finally:
        restore_handlers(before)


def _model_folder(name: str) -> Path:
    if Path(name).is_dir() or not hub.is_hub_name(name):
        return Path(name).expanduser().absolute()
    repo = hub.Repo("model", name)
    return hub.fetch(repo, hub.resolve(repo, say=_say), hub.WHOLE, say=_say)


def _token(file: str) -> str:
    try:
        token = Path(file).expanduser().read_text().strip()
    except OSError as error:
        raise LaunchError(
            f"--token-file={file}: {error.strerror}; give a copy of the run's file registry_token"
        ) from error
    if not token:
        raise LaunchError(f"--token-file={file}: the file is empty: copy the run's file registry_token")
    return token


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
