"""Experts that change their ranks between steps: the same weights and moments as without, wherever experts are."""

import pytest

from tests.checkpoint import training
from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

SHUFFLED = {f"{MEGATRON}moe_expert_moves": "shuffle"}
NOT_CLIPPED = {"trainer.policy.optimizer_config.max_grad_norm": 0.0}
"""The clipped gradient depends on the last bit of its norm, which depends on the order of the ranks' sums."""
LAYOUTS = ["dp2·ep2", "tp2·dp2·ep2", "pp2·cp2·ep2"]
MORE = ["tp2·ep2", "pp2·vpp2·dp2·ep2", "tp2·cp2·ep4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return training.save_model(tmp_path_factory.mktemp("model"))


def state_by_expert(engine):
    """SHA-256 of every global weight, master and moment, put together from the blocks that the ranks would save."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save

    mine = [
        (block.key, block.global_shape, block.offsets, block.data.detach().clone().view(block.sizes))
        for block in blocks_to_save(engine.chunks, engine.optimizer, engine.groups)
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {}
    for key, shape, offsets, data in (block for rank in everyone for block in rank):
        whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))
        whole[key][tuple(slice(a, a + n) for a, n in zip(offsets, data.shape, strict=True))] = data
    return {key: training.digest(tensor) for key, tensor in sorted(whole.items())}


def trained(folder, layout, overrides, steps=(1, 2, 3)):
    """Losses, gradient norms, the state afterwards, the slots of the experts, and the metrics of the last move."""
    engine = training.engine(folder, layout, **overrides)
    seen = training.train(engine, steps)
    moved = engine.model.experts.moved
    return seen, state_by_expert(engine), dict(moved)


@pytest.mark.parametrize("options", [{}, NO_DISTRIBUTED], ids=["distributed", "not distributed"])
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], LAYOUTS[1], *(pytest.param(each, marks=pytest.mark.full_matrix) for each in (LAYOUTS[2], *MORE))],
)
def test_a_run_with_moves_is_the_run_without(ranks, folder, layout, options):
    """Bit for bit: two experts a token have one sum, and nothing is clipped."""
    world = training.LAYOUTS[layout]["world"]
    plain, state, none = ranks(world, trained, folder, layout, NOT_CLIPPED | options)[0]
    seen, same, slots = ranks(world, trained, folder, layout, NOT_CLIPPED | options | SHUFFLED)[0]
    assert not none and slots, "experts were moved in one of the runs only"
    assert [loss for loss, _ in seen] == [loss for loss, _ in plain]
    assert same == state
