"""A Ray actor that is an inference engine, and the handle through which the client, which knows no Ray, calls it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron.errors import EngineGoneError, SkyRLMegatronError
from skyrl_megatron.inference.protocol import InferenceEngine, OpenAIAnswer
from skyrl_megatron.inference.vllm.engine import EngineSettings, VLLMEngine
from skyrl_megatron.inference.vllm.processes import own_temporary_folder
from skyrl_megatron.workers.actor_group import ACTOR_LOST, lost_because
from skyrl_megatron.workers.forked import runtime_environment

_SAMPLING = frozenset({"generate", "generate_batch", "score"})
"""Calls that end in the actor, too, when nobody waits for their answer."""
KILL_TIMEOUT_S = 20
"""For killing an engine's processes on another host."""


def engine_actor(kind: type[InferenceEngine]) -> Any:
    """Make a Ray actor class of an engine class, whose methods are then the actor's."""

    class EngineActor(kind):  # type: ignore[misc, valid-type]
        """``environment``: variables of this engine's processes, set before anything looks for a GPU."""

        def __init__(self, settings: EngineSettings, environment: Mapping[str, str]) -> None:
            os.environ.update(environment)
            _start_tracker(own_temporary_folder())
            super().__init__(settings)

        async def start(self) -> None:
            await super().start()
            gc.collect()
            gc.freeze()  # the garbage of requests is not looked for among what the engine keeps

        def process_ids(self) -> list[int]:
            """List the actor's process, and those that the engine says it started."""
            return [os.getpid(), *getattr(super(), "process_ids", list)()]

        def node_id(self) -> str:
            """Return Ray's name of the host."""
            return str(ray.get_runtime_context().get_node_id())

    return ray.remote(num_cpus=1, max_concurrency=4096)(EngineActor)


class RayEngine:
    """The ``InferenceEngine`` of an actor, as the client and the weight sync call it: every method is the actor's.

    A lost actor becomes EngineGoneError; an error inside keeps its type, without the actor's traceback around it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        kind: type[InferenceEngine] = VLLMEngine,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """``kind``: engine class, made of ``settings``. ``environment``: variables of the engine's processes.
        ``options``: of the actor, such as ``num_cpus`` or a ``scheduling_strategy``."""
        options = {"runtime_env": runtime_environment({}, serving=True)} | options
        self.actor = engine_actor(kind).options(**options).remote(settings, environment or {})
        self._node = ""
        self._processes: list[int] = []

    async def start(self) -> None:
        await self._call("start")
        self._processes, self._node = await self._call("process_ids"), await self._call("node_id")

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return self._call(name, *args, **kwargs)

        return call

    async def openai(self, path: str, body: bytes) -> OpenAIAnswer:
        answer = self.actor.openai.remote(path, body)
        try:
            with _lost_actors():
                async for piece in answer:
                    yield await piece
        except (asyncio.CancelledError, GeneratorExit):
            _cancel(answer)  # nobody waits for the rest
            raise

    async def shutdown(self) -> None:
        await self._call("shutdown")
        ray.kill(self.actor)

    async def kill(self) -> None:
        """Kill the actor and the engine's processes, on the host where they are: a stopped one (SIGSTOP) does not
        notice that its parent is gone."""
        if self._node == ray.get_runtime_context().get_node_id():
            _kill(self._processes)
        elif self._processes:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # the host may be gone
                await asyncio.wait_for(_kill_on(self._node, self._processes), KILL_TIMEOUT_S)
        ray.kill(self.actor)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.actor, name).remote(*args, **kwargs)
        try:
            with _lost_actors():
                return await answer
        except asyncio.CancelledError:
            if name in _SAMPLING:
                _cancel(answer)  # the actor would continue
            raise


def _cancel(answer: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):  # the actor may be gone
        ray.cancel(answer)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


async def _kill_on(node: str, processes: Sequence[int]) -> None:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    await ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=there).remote(processes)


def _start_tracker(folder: str | None) -> None:
    """Start what takes away the shared memory and semaphores of processes that were killed, multiprocessing's resource
    tracker, as nobody's child: Ray kills the children of an actor that it ends, and the memory would stay. With the
    last process that has the tracker it removes ``folder`` too."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    reader, writer = os.pipe()
    tracks = f"import shutil; from multiprocessing.resource_tracker import main; main({reader}); "
    tracks += f"{folder!r} and shutil.rmtree({folder!r}, ignore_errors=True)"
    starts = f"import subprocess, sys; subprocess.Popen([*sys.argv[1:], '-c', {tracks!r}], pass_fds=[{reader}])"
    python = [sys.executable, "-I", "-S"]
    try:
        subprocess.run(
            [*python, "-c", starts, *python], pass_fds=[reader], check=True, timeout=60, start_new_session=True
        )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    tracker._fd = writer  # as in a process that multiprocessing spawns, whose tracker is its parent's


@contextlib.contextmanager
def _lost_actors() -> Iterator[None]:
    try:
        yield
    except ACTOR_LOST as error:
        raise EngineGoneError(f"the engine's actor is gone: {lost_because(error)}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SkyRLMegatronError):
            raise error.cause from None
        raise
