"""Mistakes of a reshard plan, and of the copies that a worker makes: none is served."""

from __future__ import annotations

import pytest

from tests.support.engines import tiny_settings
from tests.weight_sync.test_slices import EXTENDED

pytestmark = [pytest.mark.vllm, pytest.mark.engines("extended")]
OPTIONS = {"phase_s": 15.0, "bucket_sizes": (4 << 20,)}  # experts are packed together, attention travels alone
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
BUCKET = r"engine 0, worker 0: the checksum of bucket \d+ of \d+ from rank 0 differs from the sent one: .*{}"
PACKED = r"model.layers.\d.*weight\[\d\] is wrong in the memory of vLLM's kernel"
FAULTS = {
    "in the worker: offset by a row": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: two experts are swapped": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: a copy is skipped": BUCKET.format("layers.0.mlp.experts.0.down_proj.weight"),
    "in the worker: a bucket is stale": BUCKET.format("layers"),
    "in the plan: offset by a row": (
        r"element \d+ of model.layers.\d.*weight\[\d\] (is copied to twice|is beyond its end), from trainer rank 0"
    ),
    "in the plan: two experts are swapped": "differ from the trainer's",
    "in the plan: a copy is skipped": (
        r"the plan sends \d+ of \d+ elements of model.layers.\d.*weight\[\d\], from trainer rank 0"
    ),
    "in the packing: offset by a row": PACKED,
    "in the packing: an expert is skipped": PACKED,
    "in the plan: of another layout": r"the plan has target \d+, but the engine's worker has only \d+ targets",
}


@pytest.fixture(scope="module")
def pool(engines, models):
    with engines.pool(tiny_settings(models["A"], extra=EXTENDED), wait_s=20) as pool:
        yield pool


def scores(pool, loop):
    return loop(pool.slots[0].engine.score(TOKENS))


def test_faults_are_found_and_named(pool, sync, loop, monkeypatch):
    """Each before a version is published; what comes after is whole."""
    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.workers import sync_calls
    from tests.weight_sync.faulty_copies import with_fault

    first = scores(pool, loop)
    sync("B", "B", **OPTIONS)
    second = scores(pool, loop)
    for number, (fault, message) in enumerate(FAULTS.items()):
        with monkeypatch.context() as patch:
            patch.setattr(
                sync_calls, "plan_reshard", lambda *parts, fault=fault: with_fault(plan_reshard(*parts), fault)
            )
            loop(pool.slots[0].engine._llm.collective_rpc("plant", args=(fault,)))
            with pytest.raises(WeightSyncError, match=message):
                sync(f"bad {number}", "A", **OPTIONS)
        kept = f"good {number - 1}" if number else "B"
        assert pool.published == kept and pool.slots[0].state.value == "paused"
        loop(pool.slots[0].engine._llm.collective_rpc("plant", args=("",)))
        sync(f"good {number}", "B" if number % 2 else "A", **OPTIONS)
        assert scores(pool, loop) == (second if number % 2 else first)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a row without an owner", r"elements of \S+ are held, by trainer rank 0; rows \d+ to \d+ by none"),
        ("a row with two owners", r"rows 1 to 3 of \S+ are held in parts that overlap, by trainer rank 0"),
    ],
)
def test_a_trainer_that_does_not_hold_each_row_once(pool, sync, loop, fault, message):
    """The sync ends before anything is sent: the engine's weights and their version are those that it had."""
    from skyrl_megatron.errors import WeightSyncError

    sync("whole", "B", **OPTIONS)
    before, engine = scores(pool, loop), pool.slots[0].engine
    with pytest.raises(WeightSyncError, match=message):
        sync("faulty", "A", fault=fault, **OPTIONS)
    assert pool.published == "whole" == loop(engine.version()) and pool.slots[0].engine is engine
    loop(engine.resume())
    assert scores(pool, loop) == before
