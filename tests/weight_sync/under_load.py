"""Bodies of tests of an engine whose weights change while it works: on CPU in ``test_under_load.py``, with CUDA
graphs, IPC, NCCL and sleep in ``tests/gpu``."""

from __future__ import annotations

import contextlib
import json

from tests.support.engines import LoopThread, reference_logprobs
from tests.weight_sync.trainer_process import BUCKET_BYTES, TrainerProcess

TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
SAMPLING = {"max_tokens": 96, "temperature": 1.0, "ignore_eos": True}
STALE = 1e-3
"""Nats: the largest difference of an engine's scores from those of the same weights before. A bucket that was not
loaded, or loaded twice, moves them by a hundred times as much."""


class Trainer(TrainerProcess):
    """A trainer process that has nothing to offload."""

    async def offload(self, parts):
        pass


@contextlib.contextmanager
def synced_engine(settings, models, *, transport=None, shared_gpus=False, kind=None):
    """``(engine, loop, sync)``: ``sync(model, fault)`` gives a real engine the weights of ``models["A"]`` or
    ``models["B"]``. ``kind``: the engine's class; None: vLLM's."""
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    loop, trainer, count = LoopThread(), Trainer(transport), 0
    pool = EnginePool([lambda: (kind or VLLMEngine)(settings)], wait_s=60)
    try:
        loop(pool.start(), 590)
        config = json.loads((models["A"] / "config.json").read_text())
        options = dict(dtype=settings.dtype, bucket_sizes=(BUCKET_BYTES,), phase_s=120.0, deadline_s=400.0)
        options |= dict(probe_interval=0, transport=transport, shared_gpus=shared_gpus)
        synchronizer = WeightSynchronizer(pool, [trainer], hf_config=config, **options)
        synchronizer.syncs = 1  # the probe is about fp32 on both sides; scores are compared below

        def sync(model, fault=None):
            nonlocal count
            count += 1
            if shared_gpus:
                loop(synchronizer.begin_training(), 120)
            trainer.load(models[model], fault)
            synchronizer._connected = []  # what a new sender needs
            return loop(synchronizer.sync(f"{model}{count}"), 500)

        yield pool.slots[0].engine, loop, sync
    finally:
        loop(pool.shutdown())
        trainer.close()
        loop.close()


def baseline(engine, loop, sync, models, *, near):
    """Scores of both models in a quiet engine; ``near`` transformers' on average, and far from one another."""
    found = {}
    for name in ("B", "A"):
        sync(name)
        found[name] = loop(engine.score(TOKENS))
        assert mean_gap(found[name], reference_logprobs(models[name], TOKENS)) <= near
    assert mean_gap(found["A"], found["B"]) > 100 * STALE
    return found


def mean_gap(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def change_weights_under_load(engine, loop, sync, expected, *, rounds=4, requests=16, fault=None):
    """Requests are in flight when weights change, and go on with the new ones; afterwards the engine scores as it did
    with these weights before."""
    for number in range(rounds):
        model = "BA"[number % 2]
        running = [
            loop.start(engine.generate(f"{number}.{each}", TOKENS[: 8 + each], SAMPLING | {"seed": each}))
            for each in range(requests)
        ]
        report = sync(model, fault if number == rounds - 1 else None)
        assert not report.failures
        samples = [each.result(300) for each in running]
        assert all(len(sample.token_ids) == SAMPLING["max_tokens"] for sample in samples)
        last = {sample.versions[-1][0] for sample in samples}
        assert last & {report.version}, f"no request was in flight: {last}"
        compare(loop(engine.score(TOKENS)), expected, model, f"round {number}")


def change_weights_asleep(engine, loop, sync, expected, *, rounds=4):
    """The engine sleeps while the trainer works, and wakes to other weights."""
    for number in range(rounds):
        model = "BA"[number % 2]
        sync(model)
        compare(loop(engine.score(TOKENS)), expected, model, f"round {number}")
        sample = loop(engine.generate(f"awake {number}", TOKENS[:8], SAMPLING))
        assert len(sample.token_ids) == SAMPLING["max_tokens"]


def compare(scores, expected, model, where):
    gap = max(abs(a - b) for a, b in zip(scores, expected[model], strict=True))
    assert gap <= STALE, f"{where}: scores are {gap:.2g} nats from those of the same weights ({model}): stale or torn"
