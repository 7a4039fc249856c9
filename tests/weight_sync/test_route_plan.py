"""Plans of routes over random layouts of trainer and engines, carried out on real memory: every element that a worker
needs reaches its place once, whoever holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_sync.routes_of_layouts import carried_out, engine_routes, trainer_holdings, whole_tensors

BUCKET_BYTES = 1 << 13


@st.composite
def layouts(draw):
    """(tensors, holdings with their memory, routes with what they should become)."""
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
    from skyrl_megatron.weight_sync.reshard_plan import join
    from skyrl_megatron.weight_sync.slices import tensors_of

    seed, model, trainer, engine = layout
    wholes = whole_tensors(seed, **model)
    holdings, memory = trainer_holdings(wholes, model, **trainer)
    tensors = tensors_of(holdings)
    routes, expected = engine_routes(wholes, tensors, model, **engine)
    plan = join(tensors, holdings, routes, BUCKET_BYTES)
    found = carried_out(plan, tensors, memory, routes)
    for worker, targets in enumerate(expected):
        for number, target in enumerate(targets):
            assert np.array_equal(found[worker][number], target), (worker, routes[worker].targets[number])
    for worker, parcels in enumerate(plan.workers):
        own = int(routes[worker].covered().sum()) * 4
        padding = 16 * len(parcels.copies) + 4096 * len(parcels.buckets)
        assert own <= parcels.nbytes <= own + padding
        assert all(nbytes <= BUCKET_BYTES for nbytes in parcels.buckets[:, 1])
    assert sum(p.nbytes for p in plan.ranks) == sum(p.nbytes for p in plan.workers)


def test_replicas_share_the_work():
    from skyrl_megatron.weight_sync.reshard_plan import join
    from skyrl_megatron.weight_sync.slices import tensors_of

    model = dict(layers=3, experts=8, hidden=64, ffn=64, vocabulary=64, fused=True, tied=False)
    wholes = whole_tensors(0, **model)
    holdings, _ = trainer_holdings(wholes, model, tp=2, etp=1, ep=2, pp=1, dp=2)
    tensors = tensors_of(holdings)
    routes, _ = engine_routes(wholes, tensors, model, tp=2, ep=False, engines=2, pp=1)
    sent = [parcels.nbytes for parcels in join(tensors, holdings, routes, BUCKET_BYTES).ranks]
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
            r"^1.norm is listed .* or dtypes: \[8\] float32 and \[9\] float32 on trainer ranks 1, 3$",
        ),
        ("wide", "^a row of 64 bytes does not fit into half a bucket$"),
    ],
)
def test_what_cannot_be_planned_says_why(fault, message):
    """Two stages of two replicas; ranks 1 and 3 have the second layer. What is not held once is an error: other paths
    would send the same. A row that is too wide travels by another path."""
    from dataclasses import replace

    from skyrl_megatron.errors import WeightSyncError
    from skyrl_megatron.weight_sync.reshard_plan import join
    from skyrl_megatron.weight_sync.slices import Holdings, Unroutable, tensors_of

    model = dict(layers=2, experts=0, hidden=8, ffn=8, vocabulary=8, fused=False, tied=True)
    wholes = whole_tensors(0, **model)
    holdings, _ = trainer_holdings(wholes, model, tp=1, etp=1, ep=1, pp=2, dp=2)
    holdings = [holdings[n] for n in (0, 2, 1, 3)]  # stages take turns
    tensors = tensors_of(holdings)
    routes, _ = engine_routes(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)

    def faulty(rank):
        held, tiles = holdings[rank], holdings[rank].tiles.copy()
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
        return Holdings(named, tiles)

    found = [faulty(rank) if rank % 2 else holdings[rank] for rank in range(4)]
    with pytest.raises(WeightSyncError, match=message) as raised:
        join(tensors_of(found), found, routes, 32 if fault == "wide" else BUCKET_BYTES)
    assert isinstance(raised.value, Unroutable) == (fault == "wide")


def test_parcels_that_miss_or_repeat_an_element_are_refused():
    from dataclasses import replace

    from skyrl_megatron.weight_sync.reshard_plan import join
    from skyrl_megatron.weight_sync.slices import Unroutable, check_parcels, tensors_of

    model = dict(layers=1, experts=4, hidden=16, ffn=8, vocabulary=8, fused=True, tied=True)
    wholes = whole_tensors(0, **model)
    holdings, _ = trainer_holdings(wholes, model, tp=2, etp=1, ep=2, pp=1, dp=1)
    tensors = tensors_of(holdings)
    (route,), _ = engine_routes(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)
    (parcels,) = join(tensors, holdings, [route], BUCKET_BYTES).workers
    check_parcels(parcels, route)
    ranks = r", from trainer ranks? \d"
    for column, change, message in (
        (2, -1, rf"elements of module \d.weight are planned{ranks}"),
        (5, 1, rf"of module \d.weight (is copied to twice|is beyond its end){ranks}"),
        (4, 1000, r"^target 10\d\d is planned, and the engine's worker has \d+: its layout is not the one"),
    ):
        copies = parcels.copies.copy()
        copies[3, column] += change
        with pytest.raises(Unroutable, match=message):
            check_parcels(replace(parcels, copies=copies), route)
    halves, _ = engine_routes(wholes, tensors, model, tp=2, ep=False, engines=1, pp=1)
    with pytest.raises(Unroutable, match=rf"module \d.weight .*{ranks}"):  # the engine has another layout now
        check_parcels(parcels, halves[0])
