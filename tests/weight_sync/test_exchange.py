"""The rounds in which ranks give one another what is for the engine workers on their devices: they come to an end, and
bring each worker its buckets in the order of the plan. With real ranks and engines: ``test_layouts.py``."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pytest
from hypothesis import assume, given, settings

from tests.support.rank_pool import RankFailure
from tests.weight_sync.reshard_layouts import engine_target_maps, trainer_source_maps, whole_tensors
from tests.weight_sync.test_reshard_plan import BUCKET_BYTES, layouts


def carried_through(parts):
    """[(sender, its bucket, receiver, place)] of all that travels, as ranks would do it: each begins a round when its
    last one is over, and ends it when what it sends and what it receives have met their other sides."""
    from skyrl_megatron.weight_sync.point_to_point import NONE

    at, met, order = [0] * len(parts), [set() for _ in parts], []

    def now(rank):
        return parts[rank].rounds[at[rank]] if at[rank] < len(parts[rank].rounds) else (NONE, NONE, NONE)

    while True:
        pairs = [
            (rank, now(rank)[0], now(rank)[1], now(now(rank)[1])[2])
            for rank in range(len(parts))
            if now(rank)[0] != NONE and "sent" not in met[rank]
        ]
        pairs = [p for p in pairs if p[3] != NONE and parts[p[2]].incoming[p[3]][0] == p[0]]
        for sender, number, receiver, place in pairs:
            met[sender].add("sent")
            met[receiver].add("received")
            order.append((sender, number, receiver, place))
        ended = [
            rank
            for rank in range(len(parts))
            if at[rank] < len(parts[rank].rounds)
            and (now(rank)[0] == NONE or "sent" in met[rank])
            and (now(rank)[2] == NONE or "received" in met[rank])
        ]
        for rank in ended:
            at[rank] += 1
            met[rank] = set()
        if not pairs and not ended:
            break
    assert at == [len(part.rounds) for part in parts], "ranks wait for one another"
    return order


def check_nearest(plan, tensors, source_maps, local):
    """A worker gets nothing from another rank that the rank on its device has, nor from another node what is in its
    own. ``source_maps``: of each rank, tiles of whole rows and columns that equal ranks share."""
    has = [
        {(each.tensors[n].name, *place) for n, *place in each.slices[:, :5].tolist()} for each in source_maps
    ]  # (tensor, row, rows, column, columns)
    for worker, transfers in enumerate(plan.workers):
        own = local[worker]
        node = [rank for rank in range(len(source_maps)) if rank // 2 == own // 2]
        for rank, _, _, first, stop, _ in transfers.buckets.tolist():
            names = {tensors[number].name for number in transfers.copies[first:stop, 0].tolist()}
            theirs = {piece for piece in has[rank] if piece[0] in names}
            assert rank == own or not theirs <= has[own]
            assert rank in node or not theirs <= set().union(*(has[each] for each in node))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_every_bucket_comes_to_its_worker_in_order(layout):
    from skyrl_megatron.weight_sync.point_to_point import plan_exchange
    from skyrl_megatron.weight_sync.reshard_plan import Colocation, plan_reshard
    from skyrl_megatron.weight_sync.slices import tensors_of

    seed, model, trainer, engine = layout
    wholes = whole_tensors(seed, **model)
    source_maps, _ = trainer_source_maps(wholes, model, **trainer)
    tensors = tensors_of(source_maps)
    target_maps, _ = engine_target_maps(wholes, tensors, model, **engine)
    assume(len(target_maps) <= len(source_maps))
    local = random.Random(seed).sample(range(len(source_maps)), len(target_maps))
    plan = plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES, Colocation(local, 2))
    check_nearest(plan, tensors, source_maps, local)
    parts = plan_exchange(plan, tensors, local)
    order = carried_through(parts)
    for worker, transfers in enumerate(plan.workers):
        rank, buckets = local[worker], transfers.buckets.tolist()
        assert parts[rank].worker == worker
        assert [each[:2] for each in parts[rank].incoming] == [(source, nbytes) for source, nbytes, *_ in buckets]
        arrived = [(sender, number, place) for sender, number, to, place in order if to == rank]
        assert [place for *_, place in arrived] == [n for n, (source, *_) in enumerate(buckets) if source != rank]
        for sender, number, place in arrived:
            to, nbytes, _, _, _, tensor = plan.ranks[sender].buckets[number].tolist()
            assert (to, nbytes, tensor) == (worker, buckets[place][1], buckets[place][5])
    sent = [(sender, number) for sender, number, *_ in order]
    assert (
        len(set(sent))
        == len(sent)
        == sum(len(p.buckets) for p in plan.workers)
        - sum(source == local[worker] for worker, p in enumerate(plan.workers) for source in p.buckets[:, 0].tolist())
    )
    busiest = max((sum(n >= 0 for n, *_ in part.rounds) for part in parts), default=0)
    busiest = max(busiest, *(sum(place >= 0 for *_, place in part.rounds) for part in parts))
    assert max(len(part.rounds) for part in parts) <= 2 * busiest


def with_a_lost_rank(lost, report):
    """Rank 0 has all that the worker on rank 1's device needs, and one of them leaves before the exchange. The other
    writes what it gets to know."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.weight_sync.point_to_point import ExchangeSender, plan_exchange
    from skyrl_megatron.weight_sync.reshard_plan import Colocation, plan_reshard
    from skyrl_megatron.weight_sync.slices import tensors_of
    from skyrl_megatron.weight_sync.tensors import TensorShard

    rank, model = dist.get_rank(), dict(layers=2, experts=0, hidden=16, ffn=8, vocabulary=8, fused=False, tied=True)
    wholes = whole_tensors(0, **model)
    source_maps, memory = trainer_source_maps(wholes, model, tp=1, etp=1, ep=1, pp=2, dp=1)
    tensors = tensors_of(source_maps)
    target_map = engine_target_maps(wholes, tensors, model, tp=1, ep=False, engines=1, pp=2)[0][0]
    plan = plan_reshard(tensors, source_maps, [target_map], BUCKET_BYTES, Colocation([1], 1))
    part = plan_exchange(plan, tensors, [1])[rank]
    own = source_maps[rank]
    names = {int(piece[5]): own.tensors[int(piece[0])] for piece in own.slices}
    shards = [TensorShard(names[number], local, ()) for number, local in enumerate(memory[rank])]
    sender = ExchangeSender(part, plan.ranks[rank], shards, {0: 1}, torch.device("cpu"))
    if rank == lost:
        dist.destroy_process_group()
        deadline = time.monotonic() + 30
        while not report.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return
    try:
        sender.send(None, lambda adapter: True)
    except RuntimeError as error:
        report.with_suffix(".new").write_text(str(error))
        report.with_suffix(".new").rename(report)


@pytest.mark.process
@pytest.mark.parametrize(("lost", "whither"), [(0, "from trainer rank 0"), (1, "to trainer rank 1")])
def test_a_rank_that_is_lost_is_named_with_what_was_under_way(ranks, tmp_path, lost, whither):
    """The sync that ends with it: ``test_layouts.py``, ``test_a_rank_that_dies_in_the_exchange_ends_the_sync``."""
    report = tmp_path / "report"
    with contextlib.suppress(RankFailure):  # the group that ended is missed at the end of the body
        ranks(2, with_a_lost_rank, lost, report, timeout_s=20)
    said = report.read_text()
    assert re.match(rf"exchange of (embed|0\.\S+) {whither}: ", said), said
