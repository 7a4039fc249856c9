"""Plans of target maps over random layouts of trainer and engines, carried out on real memory: every element that a
worker needs reaches its place once, whoever holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_sync.reshard_layouts import carried_out, engine_target_maps, trainer_source_maps, whole_tensors

BUCKET_BYTES = 1 << 13


@st.composite
def layouts(draw):
    """(tensors, source maps with their memory, target maps with what they should become)."""
    seed = draw(st.integers(0, 2**16))
    model = dict(
        layers=draw(st.integers(1, 3)),
        experts=draw(st.sampled_from([0, 4, 6])),
        hidden=draw(st.sampled_from([16, 24, 40])),
        ffn=draw(st.sampled_from([8, 12, 32])),
        vocabulary=draw(st.sampled_from([31, 64])),
        fused=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    trainer = dict(
        tp=draw(st.sampled_from([1, 2, 4])),
        etp=draw(st.sampled_from([1, 2, 4])),
        ep=draw(st.sampled_from([1, 2])),
        pp=draw(st.integers(1, 2)),
        dp=draw(st.integers(1, 3)),
    )
    engine = dict(
        tp=draw(st.sampled_from([1, 2, 4])),
        ep=draw(st.booleans()),
        engines=draw(st.integers(1, 2)),
        pp=draw(st.integers(1, 2)),
    )
    return seed, model, trainer, engine


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_every_element_reaches_its_place_once(layout):
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.weight_sync.slices import tensors_of

    seed, model, trainer, engine = layout
    wholes = whole_tensors(seed, **model)
    source_maps, memory = trainer_source_maps(wholes, model, **trainer)
    tensors = tensors_of(source_maps)
    target_maps, expected = engine_target_maps(wholes, tensors, model, **engine)
    plan = plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES)
    found = carried_out(plan, tensors, memory, target_maps)
    for worker, targets in enumerate(expected):
        for number, target in enumerate(targets):
            assert np.array_equal(found[worker][number], target), (worker, target_maps[worker].targets[number])
    for worker, transfers in enumerate(plan.workers):
        own = int(target_maps[worker].covered().sum()) * 4
        padding = 16 * len(transfers.copies) + 4096 * len(transfers.buckets)
        assert own <= transfers.nbytes <= own + padding
        assert all(nbytes <= BUCKET_BYTES for nbytes in transfers.buckets[:, 1])
    assert sum(p.nbytes for p in plan.ranks) == sum(p.nbytes for p in plan.workers)


def test_replicas_share_the_work():
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.weight_sync.slices import tensors_of

    model = dict(layers=3, experts=8, hidden=64, ffn=64, vocabulary=64, fused=True, tied=False)
    wholes = whole_tensors(0, **model)
    source_maps, _ = trainer_source_maps(wholes, model, tp=2, etp=1, ep=2, pp=1, dp=2)
    tensors = tensors_of(source_maps)
    target_maps, _ = engine_target_maps(wholes, tensors, model, tp=2, ep=False, engines=2, pp=1)
    sent = [transfers.nbytes for transfers in plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES).ranks]
    assert max(sent) <= 1.1 * sum(sent) / len(sent)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("missing", "^7 of 8 elements of 1.norm are held, by trainer ranks 1, 3; rows 7 to 8 by none$"),
        ("nowhere", "^0 of 8 elements of 1.norm are held, by no trainer rank$"),
        ("twice", "^rows 1 to 3 of 1.norm are held in parts that overlap, by trainer ranks 1, 3$"),
        ("unlike", "^rows 0 to 8 of 1.norm are held in parts that overlap, by trainer ranks 1, 3$"),
        (
            "other shape",
            r"^1.norm is listed .* or dtypes: \[8\] float32 and \[9\] float32 on trainer ranks 1, 3;",
        ),
        ("wide", "^a row of 64 bytes does not fit into half a bucket$"),
    ],
)
def test_what_cannot_be_planned_says_why(fault, message):
    """Two stages of two replicas; ranks 1 and 3 have the second layer. What is not held once is an error: other paths
    would send the same. A row that is too wide travels by another path."""
    from dataclasses import replace

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.weight_sync.slices import ReshardUnsupported, SourceMap, tensors_of

    model = dict(layers=2, experts=0, hidden=8, ffn=8, vocabulary=8, fused=False, tied=True)
    wholes = whole_tensors(0, **model)
    source_maps, _ = trainer_source_maps(wholes, model, tp=1, etp=1, ep=1, pp=2, dp=2)
    source_maps = [source_maps[n] for n in (0, 2, 1, 3)]  # stages take turns
    tensors = tensors_of(source_maps)
    target_maps, _ = engine_target_maps(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)

    def faulty(rank):
        held, tiles = source_maps[rank], source_maps[rank].slices.copy()
        (norm,) = [n for n, tile in enumerate(tiles) if held.tensors[tile[0]].name == "1.norm"]
        if fault == "missing" or (fault == "unlike" and rank == 3):
            tiles[norm, 2] -= 1
        if fault == "nowhere":
            tiles = np.delete(tiles, norm, 0)
        if fault == "twice" and rank == 3:
            extra = tiles[norm].copy()
            extra[1:3] = 1, 2
            tiles = np.concatenate([tiles, extra[None]])
        named = list(held.tensors)
        if fault == "other shape" and rank == 3:
            named = [replace(meta, shape=(9,)) if meta.name == "1.norm" else meta for meta in named]
        return SourceMap(named, tiles)

    found = [faulty(rank) if rank % 2 else source_maps[rank] for rank in range(4)]
    with pytest.raises(WeightSyncError, match=message) as raised:
        plan_reshard(tensors_of(found), found, target_maps, 32 if fault == "wide" else BUCKET_BYTES)
    assert isinstance(raised.value, ReshardUnsupported) == (fault == "wide")


def test_parcels_that_miss_or_repeat_an_element_are_refused():
    from dataclasses import replace

    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard
    from skyrl_megatron.weight_sync.slices import ReshardUnsupported, check_transfers, tensors_of

    model = dict(layers=1, experts=4, hidden=16, ffn=8, vocabulary=8, fused=True, tied=True)
    wholes = whole_tensors(0, **model)
    source_maps, _ = trainer_source_maps(wholes, model, tp=2, etp=1, ep=2, pp=1, dp=1)
    tensors = tensors_of(source_maps)
    (target_map,), _ = engine_target_maps(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)
    (transfers,) = plan_reshard(tensors, source_maps, [target_map], BUCKET_BYTES).workers
    check_transfers(transfers, target_map)
    ranks = r", from trainer ranks? \d"
    for column, change, message in (
        (2, -1, rf"the plan sends \d+ of \d+ elements of module \d.weight{ranks}"),
        (5, 1, rf"of module \d.weight (is copied to twice|is beyond its end){ranks}"),
        (4, 1000, r"^the plan has target 10\d\d, but the engine's worker has only \d+ targets: the plan was made for"),
    ):
        copies = transfers.copies.copy()
        copies[3, column] += change
        with pytest.raises(ReshardUnsupported, match=message):
            check_transfers(replace(transfers, copies=copies), target_map)
    halves, _ = engine_target_maps(wholes, tensors, model, tp=2, ep=False, engines=1, pp=1)
    with pytest.raises(ReshardUnsupported, match=rf"module \d.weight .*{ranks}"):  # the engine has another layout now
        check_transfers(transfers, halves[0])
