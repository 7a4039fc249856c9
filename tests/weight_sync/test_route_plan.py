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
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.weight_sync.routes import tensors_of

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
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.weight_sync.routes import tensors_of

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
        ("missing", "elements of 1.norm are held"),
        ("twice", "rows of 1.norm are held in parts that overlap"),
        ("wide", "a row of 64 bytes does not fit"),
    ],
)
def test_what_cannot_be_planned_says_why(fault, message):
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.weight_sync.routes import Holdings, Unroutable, tensors_of

    model = dict(layers=2, experts=0, hidden=8, ffn=8, vocabulary=8, fused=False, tied=True)
    wholes = whole_tensors(0, **model)
    holdings, _ = trainer_holdings(wholes, model, tp=1, etp=1, ep=1, pp=1, dp=1)
    tensors = tensors_of(holdings)
    routes, _ = engine_routes(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)
    tiles = holdings[0].tiles.copy()
    (norm,) = [n for n, tile in enumerate(tiles) if holdings[0].tensors[tile[0]].name == "1.norm"]
    if fault == "missing":
        tiles[norm, 2] -= 1
    if fault == "twice":
        extra = tiles[norm].copy()
        extra[1:3] = 1, 2
        tiles = np.concatenate([tiles, extra[None]])
    with pytest.raises(Unroutable, match=message):
        join(tensors, [Holdings(holdings[0].tensors, tiles)], routes, 32 if fault == "wide" else BUCKET_BYTES)


def test_parcels_that_miss_or_repeat_an_element_are_refused():
    from dataclasses import replace

    from skyrl_megatron.weight_sync.parcels import check_parcels
    from skyrl_megatron.weight_sync.route_plan import join
    from skyrl_megatron.weight_sync.routes import Unroutable, tensors_of

    model = dict(layers=1, experts=4, hidden=16, ffn=8, vocabulary=8, fused=True, tied=True)
    wholes = whole_tensors(0, **model)
    holdings, _ = trainer_holdings(wholes, model, tp=2, etp=1, ep=2, pp=1, dp=1)
    tensors = tensors_of(holdings)
    (route,), _ = engine_routes(wholes, tensors, model, tp=1, ep=False, engines=1, pp=1)
    (parcels,) = join(tensors, holdings, [route], BUCKET_BYTES).workers
    check_parcels(parcels, route)
    for column, change, message in ((2, -1, "elements of module . are planned"), (5, 1, "of module . (is|lies)")):
        copies = parcels.copies.copy()
        copies[3, column] += change
        with pytest.raises(Unroutable, match=message.replace("module .", r"module \d.weight")):
            check_parcels(replace(parcels, copies=copies), route)
