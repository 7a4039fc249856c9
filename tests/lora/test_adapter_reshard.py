"""Adapters by reshard plan: what is in the slots of every worker is, bit for bit, what buckets for all leave
there."""

from __future__ import annotations

import pytest

from tests.lora.adapter_ranks import MergedRank, adapted, ranks_with_adapters, synchronizer
from tests.lora.bodies import HOW
from tests.support.engines import largest_gap, reference_logprobs, tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]
EXACT = 1e-5
"""Nats: how far an engine may be from the merged model."""
ENGINES = {
    "tp2": dict(tensor_parallel_size=2),
    "ep2": dict(tensor_parallel_size=2, expert_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2),
}
CANONICAL = {f"{HOW}lora_type": "canonical_lora"}
SHARED = {f"{HOW}experts_shared_outer_loras": True}
CASES = [
    (dict(world=1), {}),
    (dict(world=4, tp=2, ep=2), {}),
    (dict(world=2, tp=2, etp=2), SHARED),
    (dict(world=2, pp=2, vpp=2), CANONICAL),
    (dict(world=4, tp=2, cp=2, ep=4), CANONICAL),
    (dict(world=2, ep=2), SHARED),
]


@pytest.fixture(scope="module")
def pool(engines, folder):
    """An engine of each kind that takes adapters."""
    with engines.pool(*(adapted(folder, **how) for how in ENGINES.values()), wait_s=20) as pool:
        yield pool


@pytest.fixture(scope="module")
def plain(engines, folder):
    """One engine that knows no adapters, of two workers."""
    with engines.pool(tiny_settings(folder, tensor_parallel_size=2), wait_s=20) as pool:
        yield pool


@pytest.mark.parametrize("layout, overrides", CASES, ids=str)
def test_slots_hold_what_buckets_leave_there(ranks, folder, loop, pool, layout, overrides):
    def held(seed, reshard):
        trainer.together("adapt", seed)
        sync = synchronizer(pool, trainer, folder, overrides, reshard=reshard)
        assert not loop(sync.sync(f"{seed} {reshard}"), 400).failures
        assert (sync.plan is not None) == reshard
        return [loop(slot.engine._llm.collective_rpc("slot_sums")) for slot in pool.alive()]

    with ranks_with_adapters(ranks, folder, layout, overrides) as trainer:
        of_3, of_4 = held(3, False), held(4, True)
        assert held(3, True) == of_3, "another slot than the one of seed 4"
        assert held(4, False) == of_4
    assert [len(workers) for workers in of_3] == [2, 2, 2]
    for one, other in zip(of_3, of_4, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            filled = [name for name in mine if mine[name] != theirs[name]]
            assert len(filled) > len(mine) / 2 and any(".experts" in name for name in filled)


@pytest.mark.parametrize(
    "layout, overrides", [(dict(world=4, tp=2, ep=2), {}), (dict(world=2, pp=2, vpp=2), CANONICAL)], ids=str
)
def test_merged_weights_travel_by_routes(ranks, folder, loop, plain, tmp_path, layout, overrides):
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    (slot,) = plain.slots
    found = {}
    with ranks_with_adapters(ranks, folder, layout, overrides, MergedRank) as trainer:
        sync = synchronizer(plain, trainer, folder, overrides)
        sync.adapters = None
        for number, seed in enumerate((3, 4, 3)):
            trainer.together("adapt", seed)
            assert not loop(sync.sync(str(number)), 400).failures
            assert isinstance(sync, WeightSynchronizer) and sync.plan is not None
            scores = loop(slot.engine.score(TOKENS))
            assert found.setdefault(seed, scores) == scores
            if number < 2:
                trainer.together("export", tmp_path / str(seed))
                assert largest_gap(scores, reference_logprobs(tmp_path / str(seed), TOKENS)) <= EXACT
    assert largest_gap(found[3], found[4]) > 100 * EXACT
