"""Real engines for tests: an event loop in a thread of its own, and engines that live on it, shared by settings."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import left_behind

KV_BYTES = 64 << 20
START_S = 590.0
ALIVE = 3
"""Engines that the tests of a session keep at the same time: each takes two processes and 2 GB."""
PROBE = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
"""Tokens whose log-probs identify an engine's weights."""
PROBE_SAMPLING = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}

VOCABULARY = 509
"""Of the models whose engines are shared: no multiple of any parallel degree, so that padded rows show."""
Answers = tuple[list[float], list[int], list[float]]
"""Log-probs of :data:`PROBE`, tokens sampled after its first 20, their log-probs."""


class LoopThread:
    """``loop(coroutine)`` runs it on the loop and waits for the result."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, Any], timeout_s: float = 300.0) -> Any:
        return self.start(work).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, Any]):
        """A future of the result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def tiny_settings(model: Path, **changes: Any):
    """Settings of a small fp32 engine on a HF folder."""
    from skyrl_megatron.inference.vllm.settings import EngineSettings

    settings = dict(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_bytes=KV_BYTES,
        served_model_name="policy",
        start_timeout_s=580.0,
    )
    return EngineSettings(**{**settings, **changes})


@dataclass(eq=False)
class _Shared:
    """An engine that runs, and how it answered before it was ever given other weights."""

    engine: Any
    first: Answers
    lent: bool = False


class SharedEngines:
    """The engines of a session by their settings: started once, lent to one user at a time, reset in between.

    Users in sequence that need the same settings share an engine; one that nobody uses ends when :data:`ALIVE` others
    are needed. A user may do anything to an engine, kill it too: one that is not healthy is started anew.
    """

    def __init__(self) -> None:
        self.loop = LoopThread()
        self.starts = 0
        """Engines that were started so far."""
        self._engines: dict[str, list[_Shared]] = {}
        """By settings, those used last at the end."""
        self._first: dict[str, Answers] = {}

    @contextlib.contextmanager
    def pool(self, *settings: Any, wait_s: float = 60.0) -> Iterator[Any]:
        """An ``EnginePool`` that serves with an engine for each of the settings, for the block. A restart in it is
        real."""
        from skyrl_megatron.inference.engine_pool import EnginePool
        from skyrl_megatron.inference.protocol import INITIAL_VERSION
        from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

        with contextlib.ExitStack() as lent:
            engines = [lent.enter_context(self._lend(each)) for each in settings]
            makers = [
                _maker(shared.engine, partial(VLLMEngine, each))
                for shared, each in zip(engines, settings, strict=True)
            ]
            pool = EnginePool(makers, wait_s=wait_s)
            slots = list(pool.slots)
            for slot in slots:
                pool.serve(slot, INITIAL_VERSION)
            try:
                yield pool
            finally:
                for shared, slot in zip(engines, slots, strict=True):
                    shared.engine = slot.engine  # another one by now, where it was restarted

    def first_answers(self, settings: Any) -> Answers:
        """What an engine of these settings answers that never held other weights."""
        if str(settings) not in self._first:
            with self.pool(settings):
                pass
        return self._first[str(settings)]

    def answers(self, engine: Any) -> Answers:
        """What an engine answers now."""
        return self.loop(_answers(engine))

    def close(self) -> None:
        """End all engines. Raises AssertionError when a process of theirs outlives them."""
        while self._end_one():
            pass
        self.loop.close()

    @contextlib.contextmanager
    def _lend(self, settings: Any) -> Iterator[_Shared]:
        """An engine that nobody else uses during the block."""
        free = [shared for shared in self._engines.get(str(settings), []) if not shared.lent]
        shared = self._reset(free[0], settings) if free else self._start(settings)
        self._engines[str(settings)] = self._engines.pop(str(settings))  # used last
        shared.lent = True
        try:
            yield shared
        finally:
            shared.lent = False

    def _start(self, settings: Any) -> _Shared:
        from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

        while sum(map(len, self._engines.values())) >= ALIVE and self._end_one(lent=False):
            pass
        engine = VLLMEngine(settings)
        self.starts += 1
        self.loop(engine.start(), START_S)
        answers = self.answers(engine)
        assert self._first.setdefault(str(settings), answers) == answers, "two engines of the same settings differ"
        self._engines.setdefault(str(settings), []).append(shared := _Shared(engine, answers))
        return shared

    def _reset(self, shared: _Shared, settings: Any) -> _Shared:
        """Make an engine what it was when it was started, which is checked bit for bit; one that died is replaced."""
        if not self.loop(_is_healthy(shared.engine)):
            self._engines[str(settings)].remove(shared)
            self._end(shared.engine)
            return self._start(settings)
        self.loop(_as_started(shared.engine))
        assert self.answers(shared.engine) == shared.first, "an engine that was reset is not what it was"
        return shared

    def _end_one(self, lent: bool = True) -> bool:
        """End the engine that was used longest ago. False: all are lent."""
        for key, engines in self._engines.items():
            for shared in engines:
                if lent or not shared.lent:
                    engines.remove(shared)
                    if not engines:
                        del self._engines[key]
                    self._end(shared.engine)
                    return True
        return False

    def _end(self, engine: Any) -> None:
        processes = [psutil.Process(pid) for pid in engine.process_ids() if psutil.pid_exists(pid)]
        self.loop(engine.shutdown())
        assert not left_behind(processes)


def _maker(running: Any, make: Any) -> Any:
    """A function that returns the engine that runs at first, and new ones afterwards."""
    engines = [running]
    return lambda: engines.pop() if engines else make()


async def _is_healthy(engine: Any) -> bool:
    try:
        async with asyncio.timeout(60):
            await engine.health()
        return True
    except Exception:  # an engine that is dying raises any
        return False


async def _as_started(engine: Any) -> None:
    """Abort requests, load the folder's weights, drop adapters, forget versions and prefixes."""
    from skyrl_megatron.inference.protocol import INITIAL_VERSION
    from skyrl_megatron.inference.vllm.adapter_versions import AdapterVersions

    await engine.wake()
    await engine.pause("abort")
    if slots := engine.settings.adapters:
        engine._adapters = AdapterVersions(slots.slots, slots.names)
        await engine._keep_adapters()
    else:
        folder = str(engine.settings.folder)  # else that of the last reload
        await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    await engine.set_version(INITIAL_VERSION)
    engine._cache_salt = None
    await engine.reset_prefix_cache()
    await engine.resume()


async def _answers(engine: Any) -> Answers:
    names = engine.settings.adapters.names if engine.settings.adapters else ("",)
    sample = await engine.generate(f"probe {id(object())}", PROBE[:20], PROBE_SAMPLING, names[0])
    scores = await engine.score(PROBE, names[0])
    await engine.reset_prefix_cache()
    return scores, sample.token_ids, sample.logprobs


def reference_logprobs(
    model: Path, token_ids: list[int], temperature: float = 1.0, dtype: str = "float32"
) -> list[float]:
    """Log-probs of tokens 1 … n−1 by transformers, at a temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    experts = {} if dtype == "float32" else {"experts_implementation": "eager"}  # others have no kernel for fp64
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **experts).eval()
    with torch.no_grad():
        logits = network(torch.tensor([token_ids])).logits[0, :-1] / temperature
    chosen = torch.tensor(token_ids[1:])[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def largest_gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other), (len(one), len(other))
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
