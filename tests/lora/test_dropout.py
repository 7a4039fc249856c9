"""Dropout before the factors: while training alone, drawn again where a block is recomputed, the same in every run."""

import pytest

from tests.lora import bodies
from tests.training.conftest import batch, folder  # noqa: F401

DROPOUT = {f"{bodies.LORA}dropout": 0.5}
RECOMPUTED = {
    "trainer.gradient_checkpointing": True,
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity": "full",
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_method": "uniform",
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_num_layers": 1,
}
LAYOUTS = {
    "single": dict(world=1),
    "tp2·etp2": dict(world=2, tp=2, etp=2),
    "dp2·ep2": dict(world=2, ep=2),
    "pp2·vpp2": dict(world=2, pp=2, vpp=2),
    "cp2": dict(world=2, cp=2),
}


def body(folder, batch, layout, factors, each):  # noqa: F811
    """For each of some settings: log-probs before, (loss, gradient norm) of two steps, factors after them."""
    from megatron.core import parallel_state

    from skyrl_megatron.data.splitting import split_for_dp

    found = []
    for overrides in each:
        if found:
            parallel_state.destroy_model_parallel()
        engine = bodies.adapted_engine(folder, layout, overrides, factors)
        part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
        logprobs = engine.compute_logprobs(part)
        steps = [(engine.forward_backward(part)["final_loss"], engine.optim_step().grad_norm) for _ in range(2)]
        found.append((logprobs, steps, [factor.tensor.detach().clone() for factor in engine.adapters.factors()]))
    return found


@pytest.mark.parametrize(
    "name", ["single", *(pytest.param(n, marks=pytest.mark.full_matrix) for n in LAYOUTS if n != "single")]
)
def test_masks_are_those_of_the_seed(ranks, folder, batch, name):  # noqa: F811
    import torch

    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.lora import reference

    factors = reference.start_factors(read_hf_model(folder).plan, separate=False)
    each = [{}, DROPOUT, DROPOUT | RECOMPUTED, DROPOUT | {"trainer.seed": 7}]
    for plain, dropped, recomputed, other in ranks(
        LAYOUTS[name]["world"], body, folder, batch, LAYOUTS[name], factors, each
    ):
        assert torch.equal(plain[0], dropped[0]), "log-probs are taken without dropout"
        assert plain[1][0] != dropped[1][0] and dropped[1][0] != other[1][0]
        assert dropped[1] == recomputed[1], "a recomputed block had another mask"
        assert all(torch.equal(*pair) for pair in zip(dropped[2], recomputed[2], strict=True))
