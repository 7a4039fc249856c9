"""Memory that leaves and comes back: nothing is lost, nothing is replaced, and what needs it brings it back."""

import pytest

from tests.training import bodies
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

LAYOUTS = {
    "single": dict(world=1),
    "dp2·ep2": dict(world=2, ep=2),
    "tp2": dict(world=2, tp=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
}
FREE = {f"{MEGATRON}freeze_moe_router": True}
OPTIONS = {
    "distributed": {},
    "not distributed": NO_DISTRIBUTED,
    "gradients in the parameters' type": {f"{MEGATRON}ddp_config.grad_reduce_in_fp32": False},
    "optimizer stays": {"trainer.policy.optimizer_config.offload_after_step": False},
    "router frozen": FREE,
    "from hidden states": {"trainer.fused_lm_head_logprob": True},
}


def train(folder, batch, layout, overrides, offloads, fault=None):
    """Three steps; with ``offloads`` every part leaves around each of them, as it does for engines on the same GPU.
    Returns SHA-256 of all state, log-probs, and what was found wrong on the way."""
    import hashlib

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.checkpoint.rank_state import owned_ranges
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.offload import optimizer_tensors
    from skyrl_megatron.types import PARTS

    engine = MegatronEngine(bodies.config(folder, **layout, overrides=overrides))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    problems, taken = [], []
    for memory in engine._memory._host.values():
        memory._block_bytes = 1 << 12  # far less than the state of a tiny model

    def held():
        """Bytes of all storages of the rank's state."""
        tensors = [*(p for chunk in engine.chunks for p in chunk.parameters()), *optimizer_tensors(engine.optimizer)]
        tensors += [b.grad_data for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    def leave():
        if not offloads:
            return
        before = held()
        engine.offload()
        stays = "optimizer" if "optimizer" not in engine.away() else None
        if engine.away() != tuple(p for p in PARTS if p != stays):
            problems.append(f"away: {engine.away()}")
        if stays is None and any(held().values()):
            problems.append(f"{sum(held().values())} bytes of {sum(before.values())} are still here")
        if held().keys() != before.keys():
            problems.append("a storage was replaced")
        taken.append(engine._memory.host_bytes)
        if len(set(taken)) > 1 and fault is None:
            problems.append(f"host memory was taken after the first time: {taken}")
        if fault == "replaced weights":
            engine.onload()
            for chunk in engine.chunks:
                for parameter in chunk.parameters():
                    parameter.data = parameter.data.clone()
        if fault == "lost moments":
            engine.onload()
            for tensor in optimizer_tensors(engine.optimizer):
                if tensor.dim():
                    tensor.detach().zero_()

    leave()  # before the optimizer has moments; memory for them is taken here
    for _ in range(3):
        logprobs = engine.compute_logprobs(part)
        if offloads and "weights" in engine.away():
            problems.append("scored without weights")
        engine.forward_backward(part)
        if offloads:
            with pytest.raises(ValueError, match="optim_step"):
                engine.offload("gradients")
        engine.optim_step()
        leave()
    engine.onload()
    digest = hashlib.sha256()
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    for owned in owned_ranges(engine.optimizer):
        for _, tensor in sorted(owned.tensors.items()):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest(), logprobs.tolist(), problems


def compare(ranks, folder, batch, layout, overrides, fault=None):
    """Assert that training with everything offloaded around each step is training without, bit for bit."""
    plain = ranks(layout["world"], train, folder, batch, layout, overrides, False)
    moved = ranks(layout["world"], train, folder, batch, layout, overrides, True, fault)
    for (state, logprobs, _), (moved_state, moved_logprobs, problems) in zip(plain, moved, strict=True):
        assert not problems
        assert moved_logprobs == logprobs
        assert moved_state == state


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    ["dp2·ep2", *(pytest.param(name, marks=pytest.mark.full_matrix) for name in LAYOUTS if name != "dp2·ep2")],
)
def test_training_is_the_same_bit_for_bit(ranks, folder, batch, name):
    compare(ranks, folder, batch, LAYOUTS[name], {})


@pytest.mark.process
@pytest.mark.parametrize(
    "option",
    ["not distributed", *(pytest.param(o, marks=pytest.mark.full_matrix) for o in OPTIONS if o != "not distributed")],
)
def test_every_optimizer_option(ranks, folder, batch, option):
    compare(ranks, folder, batch, LAYOUTS["single"], OPTIONS[option])


@pytest.mark.process
@pytest.mark.parametrize("fault", ["replaced weights", "lost moments"])
def test_planted_faults_are_seen(ranks, folder, batch, fault):
    with pytest.raises(AssertionError, match="At index 0 diff"):
        compare(ranks, folder, batch, LAYOUTS["single"], {}, fault)


def aliases(folder, fault):
    """Where the optimizer's shards lie that are views of parameters, as those of the precision-aware optimizer are."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder))
    if fault:  # what Megatron's own offload_to_cpu and restore_from_cpu do
        for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
            for group in part.optimizer.param_groups:
                for shard in group["params"]:
                    shard.data = shard.data.clone()
    else:
        engine.offload()
        engine.onload()
    parameters = {p.untyped_storage().data_ptr() for chunk in engine.chunks for p in chunk.parameters()}
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    shards = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    return len(shards), sum(shard.untyped_storage().data_ptr() in parameters for shard in shards)


@pytest.mark.process
def test_shards_still_lie_in_the_parameters(ranks, folder):
    """In fp32 the groups of the distributed optimizer are views of the parameter buffer."""
    shards, within = ranks(1, aliases, folder, False)[0]
    assert shards == within > 10
    assert ranks(1, aliases, folder, True)[0][1] == 0


def test_host_memory_is_taken_once(monkeypatch):
    """Pieces fill blocks without a gap, and the second pass gets the memory of the first."""
    from skyrl_megatron.runtime.offload import HostMemory

    memory = HostMemory(64)
    for _ in range(2):
        memory.rewind()
        assert [len(piece) for piece in memory.pieces(40)] == [40]
        assert [len(piece) for piece in memory.pieces(100)] == [24, 64, 12]
        assert len(memory.take(60)) == 60 and memory.pieces(0) == []
        assert memory.nbytes == 4 * 64
    memory.rewind()
    first = memory.pieces(40)[0]
    first.fill_(7)
    memory.rewind()
    assert int(memory.take(8).sum()) == 56
