"""Serve an engine on another host: starts vLLM, joins the run's registry, leaves at SIGTERM or Ctrl-C.

    python -m skyrl_megatron.entrypoints.serve_engine --model FOLDER --registry http://HOST:PORT --token-file FILE
        [options] [-- options of vLLM]

The run (``generator.inference_engine.enable_registry=true``) says where its registry is and which file holds the
token. The engine gets the run's weights, proves them, and then serves. It leaves with its requests finished or moved
to other engines; when the run forgets it, as after a restart, it joins again. Exit code 0: left, or the run is over;
1: refused, or vLLM failed.

An engine over several hosts is started on each with --nodes N, the same --tp and --pp, --host its own address and
--node-rank 0, 1, …; the first with a --port, the others with --first http://ITS_HOST:ITS_PORT. Workers meet at the
port after that one. The further ones end when the first does.
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

from skyrl_megatron import hub
from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.errors import EngineError, LaunchError, SkyRLMegatronError
from skyrl_megatron.inference.fleet import package_versions
from skyrl_megatron.inference.http_endpoint import bound
from skyrl_megatron.inference.protocol import ENGINE_KEY
from skyrl_megatron.inference.vllm.processes import own_temporary_folder
from skyrl_megatron.inference.vllm.remote import EngineHosts, EngineServer
from skyrl_megatron.inference.vllm.settings import EngineSettings, hf_config
from skyrl_megatron.interrupts import Interrupted, replace_handlers, restore_handlers

ANSWER_S = 30.0
JOIN_S = 1800.0
"""A run asks the engine before it takes it in."""
LEAVE_S = 1800.0
"""Requests in flight may finish, and a sync under way ends."""
AGAIN_S = 1.0


class FleetClient:
    """The registry at ``url``; ``source`` says where the token is from. ``patience_s``: how long it may not answer."""

    def __init__(self, url: str, token: str, source: str, patience_s: float) -> None:
        self.url, self.source, self.patience_s = url.rstrip("/"), source, patience_s
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"})

    def check(self, model: Mapping[str, Any], versions: Mapping[str, str], stop: Callable[[], bool]) -> dict[str, Any]:
        """Return what the run asks of an engine. Raises LaunchError for one that cannot join."""
        return self._patiently("/engines/check", {"model": model, "versions": versions}, ANSWER_S, stop)

    def join(self, offer: Mapping[str, Any], stop: Callable[[], bool]) -> dict[str, Any]:
        """Join; returns the engine's name, its state and ``heartbeat_s``. Raises LaunchError as :meth:`check`."""
        return self._patiently("/engines", offer, JOIN_S, stop)

    def heartbeat(self, name: str) -> dict[str, Any] | None:
        """Give a sign of life; returns the engine's state, None where the run does not know the engine. Raises
        ConnectionError when there is no answer."""
        return self._asked("PUT", f"/engines/{name}", None, ANSWER_S)

    def leave(self, name: str) -> dict[str, Any] | None:
        """Leave; returns when nothing needs the engine any more. As :meth:`heartbeat`."""
        return self._asked("DELETE", f"/engines/{name}", None, LEAVE_S)

    def _patiently(self, path: str, body: Any, timeout_s: float, stop: Callable[[], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer = self._asked("POST", path, body, timeout_s)
                assert answer is not None
                return answer
            except ConnectionError as error:
                if time.monotonic() > deadline or stop():
                    raise LaunchError(
                        f"--registry={self.url}: no answer for {self.patience_s:g} s ({error}): is the run up, with "
                        "generator.inference_engine.enable_registry=true and a registry_host that this host reaches?"
                    ) from error
                time.sleep(AGAIN_S)

    def _asked(self, method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer; None for an engine that the run does not know."""
        try:
            response = self._http.request(method, self.url + path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if response.status_code == 401:
            raise LaunchError(f"{self.source}: the run at {self.url} has another token")
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
        raise LaunchError(f"--registry={self.url}: answers {response.status_code}, which no registry of a run does")


LOOK_S = 1.0
CHANGED = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name the temporary folder of what is served."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args, more = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(args)

    def work() -> int:
        with _end_requests() as asked:
            return _serve(options, more, asked)

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
    add("--registry", required=True, metavar="URL", help="of the run's registry")
    add("--token-file", required=True, metavar="FILE", help="holds the registry's token")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=0, help="port to listen on; 0 takes a free one (0)")
    add("--url", help="of this server as the run reaches it (http://HOST:PORT)")
    add("--tensor-parallel-size", "--tp", type=int, default=1, metavar="N", help="GPUs a layer is split over (1)")
    add("--pipeline-parallel-size", "--pp", type=int, default=1, metavar="N", help="stages (1)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences decoded at the same time (256)")
    add("--max-model-len", type=int, metavar="N", help="tokens of the longest sequence (the run's)")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="share of GPU memory (0.9)")
    add("--nodes", type=int, default=1, metavar="N", help="hosts that the engine is over (1)")
    add("--node-rank", type=int, default=0, metavar="R", help="which of them this one is, from 0 (0)")
    add("--first", metavar="URL", help="of the engine's server on host 0, for the other hosts")
    add("--patience", type=float, default=60.0, metavar="S", help="how long the registry may not answer (60)")
    add("--start-timeout", type=float, default=1800.0, metavar="S", help="for vLLM to be ready (1800)")
    add("--log-file", type=Path, metavar="FILE", help="for vLLM's output (a file of its own, kept when it fails)")
    return parser


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Return (our arguments, those behind ``--``)."""
    if "--" not in args:
        return args, []
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _serve(options: argparse.Namespace, more: Sequence[str], asked: threading.Event) -> int:
    """Serve, with the sockets and, unless it is elsewhere, the output of vLLM in a folder that only this user can
    enter. It is removed at the end, but for the output of an engine that failed."""
    usual, before = tempfile.tempdir, {name: os.environ.get(name) for name in CHANGED}
    folder = Path(own_temporary_folder() or tempfile.mkdtemp(prefix="skyrl-engine-"))
    log = options.log_file or folder / "engine.log"
    failed = False
    try:
        return _serve_in(options, more, asked, log)
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
        with contextlib.suppress(OSError):  # the output is there
            folder.rmdir()


def _serve_in(options: argparse.Namespace, more: Sequence[str], asked: threading.Event, log: Path) -> int:
    hosts = _hosts(options)
    folder = _model_folder(options.model)
    source = f"--token-file={options.token_file}"
    registry = FleetClient(options.registry, _token(options.token_file), source, options.patience)
    with bound(options.host, options.port, "--port") as listener:
        port = int(listener.getsockname()[1])
    said = {"model": hf_config(folder), "versions": package_versions()}
    wanted = registry.check(**said, stop=asked.is_set)
    _say(f"run: {options.registry} takes engines of this model, in {wanted['dtype']}")
    settings = EngineSettings(
        model=str(folder),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        dtype=wanted["dtype"],
        max_model_len=options.max_model_len or wanted["max_model_len"],
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        distributed_executor_backend="mp",
        served_model_name=wanted["served_model_name"],
        log_file=log,
    ).on_this_node()
    key = os.environ.get(ENGINE_KEY) or secrets.token_urlsafe(32)
    server = EngineServer(settings, options.host, port, key, more, hosts)
    offer = said | {"url": options.url or server.url, "key": key}
    offer |= {"dtype": settings.dtype, "workers": settings.workers}
    began = time.monotonic()
    server.start()
    try:
        if hosts.number:
            return _stay_with_the_first(server, options, asked)
        if not server.wait_until_ready(options.start_timeout, asked.is_set):
            return 0
        _say(f"server: {server.url} is ready after {time.monotonic() - began:.0f} s, output in {server.log_file}")
        return _Membership(registry, server, offer, asked).keep()
    finally:
        server.stop()


def _hosts(options: argparse.Namespace) -> EngineHosts:
    """Return the hosts of the engine. Raises LaunchError for options that do not go together."""
    nodes, number, first = options.nodes, options.node_rank, options.first
    workers = options.tensor_parallel_size * options.pipeline_parallel_size
    if not 0 <= number < nodes:
        raise LaunchError(f"--node-rank={number}: with --nodes={nodes} it is 0 to {nodes - 1}")
    if workers % nodes:
        raise LaunchError(f"--nodes={nodes} does not divide the {workers} workers of --tp and --pp")
    if number == 0:
        if nodes > 1 and not options.port:
            raise LaunchError("--port is missing: the engine's other hosts find this one by it")
        return EngineHosts(nodes, 0, (options.host, options.port))
    address = urlsplit(first or "")
    if address.hostname is None or address.port is None:
        said = "--first is missing" if first is None else f"--first={first} is not http://HOST:PORT"
        raise LaunchError(f"{said}: where the engine's server listens on its first host")
    return EngineHosts(nodes, number, (address.hostname, address.port))


def _stay_with_the_first(server: EngineServer, options: argparse.Namespace, asked: threading.Event) -> int:
    """Keep a further host's workers until the server of the first one is gone: vLLM's would wait for ever."""
    began = heard = time.monotonic()
    ready = False
    while not asked.wait(LOOK_S):
        server.require_alive()
        if server.answers():
            heard = time.monotonic()
            if not ready:
                ready = True
                _say(f"workers: ready for {server.url} after {heard - began:.0f} s, output in {server.log_file}")
        elif ready and time.monotonic() - heard > options.patience:
            _say(f"{server.url} is over: no answer for {options.patience:g} s")
            return 0
        elif not ready and time.monotonic() - began > options.start_timeout:
            raise EngineError(f"--first={server.url} was not ready after {options.start_timeout:g} s")
    return 0


class _Membership:
    """An engine's life in a run, and in the next one that the registry stands for."""

    def __init__(
        self, registry: FleetClient, server: EngineServer, offer: dict[str, Any], asked: threading.Event
    ) -> None:
        self.registry, self.server, self.offer, self.asked = registry, server, offer, asked
        self._told = ""

    def keep(self) -> int:
        """Join, and again where the run has forgotten the engine, until it is asked to end or the run is over."""
        while True:
            member = self.registry.join(self.offer, self.asked.is_set)
            self._tell(member)
            try:
                member_again = self._stay(member)
            except EngineError:
                self._leave(member["engine"])
                raise
            if not member_again:
                return 0

    def _stay(self, member: dict[str, Any]) -> bool:
        """Give signs of life; returns whether to join again. Raises EngineError when vLLM ended, LaunchError when the
        run refuses the engine."""
        name, heard = member["engine"], time.monotonic()
        next_beat = heard + member["heartbeat_s"]
        while not self.asked.wait(LOOK_S):
            self.server.require_alive()
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + member["heartbeat_s"]
            try:
                state = self.registry.heartbeat(name)
            except ConnectionError as error:
                if time.monotonic() - heard > self.registry.patience_s:
                    gone = f"no answer for {self.registry.patience_s:g} s ({error})"
                    _say(f"the run at {self.registry.url} is over: {gone}")
                    return False
                continue
            heard = time.monotonic()
            if state is None or state["state"] in ("lost", "left"):
                _say(f"{name}: {'unknown' if state is None else state['why']} to the run: joins again")
                return True
            if state["state"] == "refused":
                raise LaunchError(f"{name} is refused: {state['why']}")
            self._tell(state)
        self._leave(name)
        return False

    def _leave(self, name: str) -> None:
        try:
            state = self.registry.leave(name)
        except (ConnectionError, LaunchError) as error:
            _say(f"{name}: could not say that it leaves: {error}")
            return
        if state is not None:
            _say(f"{name}: left after {state['answered']} requests, {state['moved']} moved to others")

    def _tell(self, state: dict[str, Any]) -> None:
        told = f"{state['engine']}: {state['state']}"
        if told != self._told:
            self._told = told
            _say(told)


@contextmanager
def _end_requests() -> Iterator[threading.Event]:
    """Yield what Ctrl-C, SIGTERM and SIGHUP set; the second one ends at once."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise Interrupted(number)
        asked.set()

    before = replace_handlers(ask)
    try:
        yield asked
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
        raise LaunchError(f"--token-file={file}: {error.strerror}") from error
    if not token:
        raise LaunchError(f"--token-file={file}: the file is empty")
    return token


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
