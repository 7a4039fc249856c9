"""A rank's state is copied, its neighbour keeps it too, and one that begins anew with it goes on bit for bit."""

import pytest

from tests.training import bodies
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

LAYOUTS = {
    "dp2·ep2": dict(world=2, ep=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "tp2·cp2·ep4": dict(world=4, tp=2, cp=2, ep=4),
}
LORA = "trainer.policy.model.lora."
OPTIONS = {
    "distributed": {},
    "not distributed": NO_DISTRIBUTED,
    "a decaying rate": {
        "trainer.policy.optimizer_config.scheduler": "linear",
        "trainer.policy.optimizer_config.num_decay_steps": 9,
    },
    "router frozen": {f"{MEGATRON}freeze_moe_router": True},
    "Muon": {"trainer.policy.optimizer_config.optimizer": "muon", "trainer.policy.optimizer_config.adam_lr": 1e-3},
    "adapters": {f"{LORA}rank": 2, f"{LORA}dropout": 0.5, f"{LORA}adapters": {"a": {}, "b": {}}},
}
FAULTS = ("no random states", "lost moments")


def hashes_of(engine):
    """SHA-256 of every storage of the state, and of the random states."""
    import hashlib

    from skyrl_megatron.runtime.checkpoint import rank_files as rng
    from skyrl_megatron.runtime.peer_checkpoint import StateSnapshot

    copy = StateSnapshot()
    copy.take(engine)
    return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in copy.slices()] + [
        hashlib.sha256(rng.capture_rng()).hexdigest(),
        engine.lr_schedule.num_steps,
        engine.steps,
        engine.adapter,
    ]


def lost_and_back(folder, batch, layout, overrides, lost, fault=None):
    """Three steps, of which the last two are repeated by ranks that were all built anew; ``lost`` ones have no copy of
    their own. Returns the state behind step 1, behind step 3, and both once more."""
    import torch.distributed as dist

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.offload import optimizer_tensors
    from skyrl_megatron.runtime.parallel_state import end_groups
    from skyrl_megatron.runtime.peer_checkpoint import PeerCheckpoints

    def made():
        return MegatronEngine(bodies.config(folder, **layout, overrides=overrides), total_steps=9)

    def step(engine):
        part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
        if engine.adapter_names != ("",):
            part.adapters = [engine.adapter_names[row % 2] for row in range(len(part))]
        engine.compute_logprobs(part)
        engine.forward_backward(part)
        engine.optim_step()

    engine, copies, rank, world = made(), PeerCheckpoints(), dist.get_rank(), dist.get_world_size()
    step(engine)
    copies.keep(engine, 1)
    found = [hashes_of(engine)]
    for _ in range(2):
        step(engine)
    found.append(hashes_of(engine))
    del engine
    dist.barrier()
    end_groups()
    if rank in lost:
        copies.own = PeerCheckpoints().own
    engine = made()
    copies.roll_back(engine, {each: (each + 1) % world for each in lost})
    if fault == "no random states":
        import torch

        torch.manual_seed(5)
    elif fault == "lost moments":
        for tensor in optimizer_tensors(engine.optimizer):
            tensor.detach().zero_()
    found.append(hashes_of(engine))
    for _ in range(2):
        step(engine)
    return [*found, hashes_of(engine)]


def cases():
    for layout in LAYOUTS:
        for option in OPTIONS:
            plain = layout == "dp2·ep2" and option in ("distributed", "Muon")
            yield pytest.param(layout, option, marks=() if plain else pytest.mark.full_matrix, id=f"{layout} {option}")


@pytest.mark.process
@pytest.mark.parametrize(("layout", "option"), list(cases()))
def test_what_was_kept_goes_on_bit_for_bit(ranks, folder, batch, layout, option):
    world = LAYOUTS[layout]["world"]
    for found in ranks(world, lost_and_back, folder, batch, LAYOUTS[layout], OPTIONS[option], (1,), timeout_s=300):
        assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_what_is_missing(ranks, folder, batch, fault):
    results = ranks(2, lost_and_back, folder, batch, LAYOUTS["dp2·ep2"], {}, (1,), fault, timeout_s=300)
    assert any(found[0] != found[2] for found in results)
