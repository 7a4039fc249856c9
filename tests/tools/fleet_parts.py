"""A run's registry over real engines, and engines that join it: servers, and the command that starts one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.support.engines import tiny_settings
from tests.support.processes import left_behind
from tests.weight_sync.trainer_process import BUCKET_BYTES

ROOT = Path(__file__).resolve().parents[2]
START_S = 580.0


class Run:
    """What a run has of engines: a pool, with a shared engine of its own unless ``own`` is 0, the sync, and the
    registry."""

    def __init__(
        self, engines, trainer, model, folder, *, own=1, port=0, silence_s=60.0, drain_s=60.0, **synchronizer
    ):
        from skyrl_megatron.inference.client import HealthMonitor, InferenceClient
        from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer
        from skyrl_megatron_tools.remote.fleet import Fleet, engine_requirements

        self.loop, self.trainer, self.model, self.said = engines.loop, trainer, model, []
        self.settings = tiny_settings(model)
        self._lent = contextlib.ExitStack()
        self.pool = self._lent.enter_context(engines.pool(*[self.settings] * own, wait_s=120))
        self.token_file = folder / "registry_token"
        options = dict(hf_config=json.loads((model / "config.json").read_text()), dtype="float32")
        options |= dict(bucket_sizes=(BUCKET_BYTES,), phase_s=60.0, deadline_s=400.0, reshard=True) | synchronizer

        async def make():
            self.client = InferenceClient(self.pool)
            self.fleet = Fleet(
                self.pool,
                engine_requirements(self.settings),
                silence_s=silence_s,
                drain_s=drain_s,
                say=self.said.append,
            )
            self.synchronizer = WeightSynchronizer(self.pool, [trainer], **options)
            self.pool.sync_engine = self.synchronizer.sync_engine
            self.fleet.start()
            self.monitor = HealthMonitor(self.pool, interval_s=1.0, sync_engine=self.synchronizer.sync_engine)
            self.monitor.start()

        self.loop(make(), START_S)
        self._open(port)

    def _open(self, port):
        from skyrl_megatron_agents.http_endpoint import HttpServer, endpoint_token
        from skyrl_megatron_tools.remote.registry import build_registry

        self.token = endpoint_token(self.token_file, "registry_token_path")

        async def serve():
            self.registry = HttpServer(build_registry(self.fleet, self.token), "127.0.0.1", port)
            await self.registry.start()

        self.loop(serve())
        self.url = self.registry.url

    def load(self, model):
        """Let the trainer have a model's weights; its sender is then a new one, which is connected to nobody."""
        self.trainer.load(model)
        self.synchronizer._connected = []

    def sync(self, version, model):
        self.load(model)
        return self.loop(self.synchronizer.sync(version), 500)

    def ask(self, method="GET", path="/engines", body=None, token=None):
        """(status, answer) of the registry."""
        import httpx

        headers = {"Authorization": f"Bearer {token or self.token}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=200)
        return answer.status_code, answer.json()

    def engines(self):
        return {entry["engine"]: entry for entry in self.ask()[1]["engines"]}

    def until(self, name, *states, within_s=120.0):
        """What the registry says of an engine once it is in one of ``states``."""
        deadline = time.monotonic() + within_s
        while (entry := self.engines().get(name, {})).get("state") not in states:
            assert time.monotonic() < deadline, (entry, self.said)
            time.sleep(0.1)
        return entry

    def close(self):
        self.loop(self.registry.stop())
        self.loop(self.monitor.stop())
        self._lent.close()


@contextlib.contextmanager
def server(run, folder):
    """A server that is ready and has not joined, and what it offers when it does."""
    from skyrl_megatron_tools.remote.fleet import package_versions
    from skyrl_megatron_tools.remote.remote_engine import EngineServer
    from tests.support.rank_pool import free_port

    settings = tiny_settings(run.model, max_num_seqs=16, log_file=folder / "vllm.log")
    server = EngineServer(settings, "127.0.0.1", free_port(), "a key")
    server.start()
    try:
        assert server.wait_until_ready(START_S, lambda: False)
        model = json.loads((run.model / "config.json").read_text())
        offer = {"url": server.url, "key": "a key", "model": model, "versions": package_versions()}
        yield server, offer | {"dtype": "float32", "workers": 1}
    finally:
        server.stop()


class Load:
    """Requests that follow one another, ``width`` at a time, until it is ended."""

    def __init__(self, run, prompt, sampling, width=8):
        self.run, self.asked, self.answers, self.over = run, 0, [], False

        async def one():
            while not self.over:
                self.asked += 1
                self.answers.append(await run.client.sample(prompt, sampling))

        async def all_of_them():
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(one())

        self._future = run.loop.start(all_of_them())

    def end(self):
        self.over = True
        self._future.result(200)
        assert len(self.answers) == self.asked, "each request has one answer"
        return self.answers


class HeldTransfer:
    """The trainer's next transfer waits until it is let go."""

    def __init__(self, run, monkeypatch):
        self.begun, self.go, really = asyncio.Event(), asyncio.Event(), run.trainer.send_weights

        async def send_weights():
            self.begun.set()
            await self.go.wait()
            return await really()

        monkeypatch.setattr(run.trainer, "send_weights", send_weights)
        self.run = run

    def sync(self, version, model):
        """A sync that is in its transfer."""
        self.run.load(model)
        sync = self.run.loop.start(self.run.synchronizer.sync(version))
        self.run.loop(asyncio.wait_for(self.begun.wait(), 120))
        return sync

    def let_go(self):
        self.run.loop.loop.call_soon_threadsafe(self.go.set)


class Command:
    """``skyrl-megatron serve-engine`` in a process of its own."""

    def __init__(self, run, folder, *more, model=None, patience=10):
        arguments = [f"--model={model or run.model}", f"--registry={run.url}", f"--token-file={run.token_file}"]
        arguments += [f"--patience={patience}", "--max-num-seqs=16", f"--log-file={folder}/vllm.log"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_megatron_tools.remote.serve_engine", *arguments, *more],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )
        self.folder, self.lines = folder, []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def err(self):
        return (self.folder / "stderr").read_text()

    def until(self, text, within_s=START_S):
        """The first line that has ``text``."""
        deadline = time.monotonic() + within_s
        while not (found := [line for line in self.lines if text in line]):
            ended = self.process.poll() is not None and not self._reader.is_alive()
            assert not ended and time.monotonic() < deadline, (text, self.lines, self.err())
            time.sleep(0.1)
        return found[0]

    def processes(self):
        return [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]

    def kill(self):
        """Kill everything of it at once, as when its host goes down."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def end(self, within_s=120):
        """Ask it to leave; its exit code."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within_s)
        assert not left_behind(children)
        self._reader.join(10)
        return code
