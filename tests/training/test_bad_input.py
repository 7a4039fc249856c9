"""What a wrong batch does to the engine: the same clear error on every rank within seconds, and nothing changed."""

import pytest

from tests.support.rank_pool import end_layout
from tests.training import bodies
from tests.training.bodies import NO_DISTRIBUTED


def errors(folder, batch):
    """On every rank: the message of each bad call, and whether weights and gradients are as before."""
    import torch

    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, overrides=NO_DISTRIBUTED, world=2))
    rank = engine.dp_rank
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[rank])
    before = [parameter.detach().clone() for parameter in engine.chunks[0].parameters()]
    messages = {}

    def attempt(name, wrong, call=engine.forward_backward):
        with pytest.raises(Exception) as caught:
            call(wrong)
        messages[name] = f"{type(caught.value).__name__}: {caught.value}"

    wrong = part.select(range(len(part)))
    if rank == 1:
        row = wrong.responses.of(int(wrong.responses.any(wrong.loss_mask).nonzero()[0]))
        wrong.advantages = wrong.advantages.clone()
        wrong.advantages[row][wrong.loss_mask[row]] = float("nan")
    attempt("nan on one rank", wrong)

    wrong = part.select(range(len(part)))
    wrong.loss_mask = torch.zeros_like(wrong.loss_mask)
    attempt("nothing to train on", wrong)

    engine.cfg.trainer.max_tokens_per_microbatch = 8
    attempt("over the budget", part)
    attempt("over the budget, forward only", part, engine.compute_logprobs)
    engine.cfg.trainer.max_tokens_per_microbatch = -1

    wrong = part.select(range(len(part)))
    wrong.old_logprobs = None
    attempt("no old log-probs", wrong)

    def broken_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
        raise RuntimeError("planted in a custom loss")

    PolicyLossRegistry.register("broken", broken_loss)
    engine.cfg.trainer.algorithm.policy_loss_type = "broken"
    attempt("a custom loss raises", part)
    engine.cfg.trainer.algorithm.policy_loss_type = "regular"
    PolicyLossRegistry.unregister("broken")

    attempt("no gradients", None, lambda _: engine.optim_step())
    with pytest.raises(ValueError, match="each needs at least one"):
        split_for_dp(engine.flops.forward(batch.lengths[:1]), 2)

    same = all(torch.equal(a, b) for a, b in zip(before, engine.chunks[0].parameters(), strict=True))
    clean = all(not parameter.main_grad.any() for parameter in engine.chunks[0].parameters())
    engine.forward_backward(part)
    poisoned = engine.chunks[0].module.output_layer.weight
    if rank == 0:
        poisoned.main_grad[0, 0] = float("inf")
    result = engine.optim_step()
    same &= all(torch.equal(a, b) for a, b in zip(before, engine.chunks[0].parameters(), strict=True))
    return messages, same, clean, result, engine.skipped_steps


def test_every_rank_says_the_same_and_nothing_changes(ranks, folder, batch):
    first, second = ranks(2, errors, folder, batch)
    for messages, same, clean, result, skipped in (first, second):
        assert same and clean
        assert "advantages is nan at row" in messages["nan on one rank"]
        assert "rank 1" in messages["nan on one rank"]
        assert "no trainable token" in messages["nothing to train on"]
        assert "exceeds trainer.max_tokens_per_microbatch=8" in messages["over the budget"]
        assert "exceeds trainer.max_tokens_per_microbatch=8" in messages["over the budget, forward only"]
        assert "reads old log-probs" in messages["no old log-probs"]
        assert "planted in a custom loss" in messages["a custom loss raises"]
        assert "there are no gradients" in messages["no gradients"]
        assert result.skipped and skipped == 1 and "output_layer.weight" in result.offender
    assert first[0] == second[0]


def accumulated(folder, batch):
    """Largest difference of gradients: the batch in one call, and in two of unequal size."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, overrides=NO_DISTRIBUTED))
    engine.forward_backward(batch)
    engine.reduce_gradients()
    once = [parameter.main_grad.clone() for parameter in engine.chunks[0].parameters()]
    engine.clear_gradients()
    engine.forward_backward(batch.select(range(2)))
    engine.forward_backward(batch.select(range(2, len(batch))))
    engine.reduce_gradients()
    return max(
        float((a - b.main_grad).abs().max() / a.abs().max())
        for a, b in zip(once, engine.chunks[0].parameters(), strict=True)
        if a.any()
    )


def test_several_forward_backward_accumulate(ranks, folder, batch):
    assert ranks(1, accumulated, folder, batch)[0] < 1e-5


def refused_optimizers(folder, names):

    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.runtime.engine import MegatronEngine

    messages = {}
    for name in names:
        cfg = bodies.config(folder, overrides={f"{bodies.MEGATRON}optimizer_config_kwargs.{name}": True}, world=2)
        with pytest.raises(ConfigError) as caught:
            MegatronEngine(cfg)
        messages[name] = str(caught.value)
        end_layout()
    return messages


def test_optimizers_that_cannot_run_here_are_refused(ranks, folder):
    expected = {
        "use_precision_aware_optimizer": "which is not installed",
        "optimizer_cpu_offload": "without a GPU",
        "no_such_field": "has no such field",
    }
    for messages in ranks(2, refused_optimizers, folder, list(expected)):
        for name, words in expected.items():
            assert f"optimizer_config_kwargs.{name}=True" in messages[name] and words in messages[name]
