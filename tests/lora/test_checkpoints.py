"""Adapters saved at one layout and loaded at another: every factor and moment bit-equal, and training goes on."""

import pytest

from tests.lora import bodies
from tests.training.conftest import batch, folder  # noqa: F401

OTHERS = {
    f"{bodies.LORA}target_modules": "self_attn,mlp,embed_tokens,lm_head",
    f"{bodies.HOW}experts_shared_outer_loras": True,
}
"""Also those of the vocabulary, whose padding depends on the layout, and factors that all experts have in common."""


def save_body(folder, batch, root, layout):  # noqa: F811
    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    engine = bodies.adapted_engine(folder, layout, OTHERS)
    part = share(engine, batch)
    step(engine, part)
    checkpointer = RankCheckpointer(root, training.state_of(engine))
    assert checkpointer.save(1)
    checkpointer.close()
    return held(engine), [step(engine, part) for _ in range(2)]


def load_body(folder, batch, root, layout):  # noqa: F811
    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    engine = bodies.adapted_engine(folder, layout, OTHERS | {"trainer.seed": 7})
    part = share(engine, batch)
    step(engine, part)  # away from where they start; moments are not zero
    assert RankCheckpointer(root, training.state_of(engine)).load().step == 1
    return held(engine), [step(engine, part) for _ in range(2)]


def held(engine):
    """Digests of all factors and their optimizer state; None but on rank 0."""
    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save
    from tests.checkpoint import training

    keys = {block.key for block in blocks_to_save(engine.chunks, engine.optimizer, engine.groups)}
    assert keys and all("adapters." in key for key in keys), "the base is saved with the adapters"
    digests = training.global_digests(engine)
    return digests and {key: value for key, value in digests.items() if "adapters." in key}


def share(engine, batch):  # noqa: F811
    from skyrl_megatron.data.splitting import split_for_dp

    return batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])


def step(engine, part):
    loss = engine.forward_backward(part)["final_loss"]
    return loss, engine.optim_step().grad_norm


@pytest.fixture(scope="module")
def saved(ranks, folder, batch, tmp_path_factory):  # noqa: F811
    root = str(tmp_path_factory.mktemp("checkpoints"))
    return root, *ranks(4, save_body, folder, batch, root, dict(world=4, tp=2, ep=2))[0]


@pytest.mark.parametrize(
    "layout",
    [
        dict(world=2, pp=2),
        pytest.param(dict(world=1), marks=pytest.mark.full_matrix),
        pytest.param(dict(world=2, tp=2, etp=2), marks=pytest.mark.full_matrix),
        pytest.param(dict(world=4, tp=2, cp=2, ep=4), marks=pytest.mark.full_matrix),
    ],
    ids=str,
)
def test_loads_elsewhere(ranks, folder, batch, saved, layout):  # noqa: F811
    root, expected, following = saved
    loaded, steps = ranks(layout["world"], load_body, folder, batch, root, layout)[0]
    assert len(loaded) == (4 * 4 + 2) * 2 * 4  # maps of each layer, ends; A and B; weight with master and two moments
    assert loaded == expected
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, following, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=2e-5)
