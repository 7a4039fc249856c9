"""The time of a sync on paper: what crosses nodes is what the reshard plan sends, and times add up."""

import pytest

from tests.weight_sync.reshard_layouts import engine_target_maps, trainer_source_maps, whole_tensors

MODEL = dict(layers=3, experts=8, hidden=64, ffn=64, vocabulary=64, fused=True, tied=False)


@pytest.mark.parametrize(("ep", "dp"), [(2, 2), (4, 1), (2, 1), (4, 2), (8, 1)])
def test_bytes_from_other_nodes_are_those_of_the_plan(ep, dp):
    """Nodes of two ranks, an engine worker on each: experts of which no replica is on the node come from another,
    everything else is on every node."""
    from skyrl_megatron.weight_sync.reshard_plan import Colocation, plan_reshard
    from skyrl_megatron.weight_sync.slices import tensors_of
    from skyrl_megatron_observe.estimate.sync_time import share_away

    world, per_node = ep * dp, 2
    wholes = whole_tensors(0, **MODEL)
    source_maps, _ = trainer_source_maps(wholes, MODEL, tp=1, etp=1, ep=ep, pp=1, dp=dp)
    tensors = tensors_of(source_maps)
    target_maps, _ = engine_target_maps(wholes, tensors, MODEL, tp=1, ep=False, engines=world, pp=1)
    colocation = Colocation(range(world), per_node)
    workers = plan_reshard(tensors, source_maps, target_maps, 1 << 30, colocation).workers
    experts = sum(whole.numel() for name, whole in wholes.items() if whole.dim() == 3) * 4
    away = share_away(world // per_node, dp)
    for worker, transfers in enumerate(workers):
        far = transfers.buckets[transfers.buckets[:, 0] // per_node != worker // per_node]
        assert experts * away <= far[:, 1].sum() <= experts * away + 4096 * len(far)


def test_times_by_hand():
    from skyrl_megatron_observe.estimate.sync_time import SyncSizes, on_shared_gpus, over_network

    sizes = SyncSizes(received=30e9, sent=20e9, tensors=1000, bucket=1 << 26, away=0.5)
    took = over_network(sizes, rate=40e9, packing=1e12)
    assert (took.network, took.copies) == (0.75, 0.0)  # packing overlaps
    assert took.fixed == pytest.approx(0.02 + 1000 * 18.5e-6 + 2 * (1 << 26) / 40e9)
    assert over_network(sizes, rate=40e9, packing=30e9).copies == pytest.approx(0.25)
    shared = on_shared_gpus(sizes, rate=40e9, copies=60e9)
    assert (shared.network, shared.copies) == (0.375, 0.5)
    assert shared.fixed == pytest.approx(took.fixed + 15e9 / (1 << 25) * 0.2e-3)
    assert shared.total == pytest.approx(shared.network + shared.copies + shared.fixed)


def test_measured_sync_within_a_gpu():
    """6.23 GB in 1,575 tensors took 103.6 ms on an H200."""
    from skyrl_megatron_observe.estimate.sync_time import SyncSizes, on_shared_gpus

    took = on_shared_gpus(SyncSizes(6.23e9, 6.23e9, 1575, 64 << 20), 50e9)
    assert took.copies + 1575 * 18.5e-6 == pytest.approx(0.1036, rel=0.02)
