"""Weight syncs by routes into real engines: what they serve afterwards, and what happens when something goes wrong."""

from __future__ import annotations

import json

import pytest

from tests.support.engines import LoopThread, tiny_settings
from tests.support.tiny_models import write_tiny_model
from tests.weight_sync.faulty_copies import with_fault
from tests.weight_sync.trainer_process import TrainerProcess

pytestmark = pytest.mark.vllm
BUCKET_BYTES = 4 << 20  # matrices of experts are packed together, those of attention travel alone
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
FAULTY = {"worker_extension_cls": "tests.weight_sync.faulty_copies.FaultyCopies"}
BUCKET = r"engine 0, worker 0: bucket \d+ of \d+ from rank 0 is not what was sent \(checksums differ\): .*{}"
FAULTS = {
    "in the worker: offset by a row": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: two experts are swapped": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: a copy is skipped": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: a bucket is stale": BUCKET.format("layers"),
    "in the plan: offset by a row": r"element \d+ of model.layers.\d.*weight (is copied to twice|lies beyond its end)",
    "in the plan: two experts are swapped": "differ from the trainer's",
    "in the plan: a copy is skipped": r"\d+ of \d+ elements of model.layers.\d.*weight are planned",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model("qwen3_moe", folder / name, seed) for name, seed in (("A", 0), ("B", 1))}


@pytest.fixture(scope="module")
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def pool(models, loop):
    from skyrl_megatron.inference.pool import EnginePool
    from skyrl_megatron.inference.vllm.engine import VLLMEngine

    pool = EnginePool([lambda: VLLMEngine(tiny_settings(models["A"], extra=FAULTY))], wait_s=20)
    loop(pool.start(), 590)
    yield pool
    loop(pool.shutdown())


@pytest.fixture(scope="module")
def trainer():
    trainer = TrainerProcess()
    yield trainer
    trainer.close()


@pytest.fixture
def sync(pool, trainer, models, loop):
    """``sync(version, model, fault)`` → report of a sync by routes."""
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    def sync(version, model, fault=None):
        trainer.load(models[model], fault)
        config = json.loads((models[model] / "config.json").read_text())
        options = {"phase_s": 15.0, "deadline_s": 400.0, "routes": True, "bucket_bytes": BUCKET_BYTES}
        synchronizer = WeightSynchronizer(pool, [trainer], hf_config=config, dtype="float32", **options)
        report = loop(synchronizer.sync(version), 500)
        assert synchronizer.plan is not None
        return report

    return sync


def scores(pool, loop):
    return loop(pool.slots[0].engine.score(TOKENS))


def test_faults_are_found_and_named(pool, sync, loop, monkeypatch):
    """Each before a version is published; what comes after is whole."""
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.workers import weight_routes

    first = scores(pool, loop)
    sync("B", "B")
    second = scores(pool, loop)
    for number, (fault, message) in enumerate(FAULTS.items()):
        with monkeypatch.context() as patch:
            patch.setattr(weight_routes, "join", lambda *parts, fault=fault: with_fault(join(*parts), fault))
            loop(pool.slots[0].engine._llm.collective_rpc("plant", args=(fault,)))
            with pytest.raises(WeightSyncError, match=message):
                sync(f"bad {number}", "A")
        assert pool.published != f"bad {number}" and pool.slots[0].state.value == "paused"
        loop(pool.slots[0].engine._llm.collective_rpc("plant", args=("",)))
        sync(f"good {number}", "B" if number % 2 else "A")
        assert scores(pool, loop) == (second if number % 2 else first)


def test_a_trainer_that_dies_leaves_engines_paused(pool, sync, loop, trainer):
    from skyrl_megatron.errors import DistributedError

    sync("before", "A")
    expected = scores(pool, loop)
    with pytest.raises(DistributedError, match="the trainer process is gone"):
        sync("bad", "B", "the trainer dies")
    assert pool.published == "before" and pool.slots[0].state.value == "paused"
    trainer.start()
    sync("after", "A")
    assert scores(pool, loop) == expected


def test_a_bucket_that_never_comes_is_noticed(pool, sync, loop):
    from skyrl_megatron.errors import WeightSyncError

    sync("before", "A")
    expected = scores(pool, loop)
    with pytest.raises(WeightSyncError, match="trainer rank 0 is gone or silent"):
        sync("bad", "B", "the last bucket is skipped")
    assert pool.published == "before" and pool.slots[0].state.value == "paused"
    sync("after", "A")
    assert scores(pool, loop) == expected


def test_an_engine_that_dies_is_restarted(pool, sync, loop):
    import signal

    sync("before", "A")
    expected = scores(pool, loop)
    engine = pool.slots[0].engine
    report = sync("after", "A", f"signal {int(signal.SIGKILL)} {engine.process_ids()[-1]}")
    assert report.failures and pool.slots[0].engine is not engine
    assert scores(pool, loop) == expected
