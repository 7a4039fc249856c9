"""Rates and weight decay of real steps: which step is taken with which rate, and what decays."""

import pytest

from tests.support.rank_pool import end_layout
from tests.training import bodies, reference

OPTIMIZER = "trainer.policy.optimizer_config."


def steps_body(folder, batch, every, steps):
    """For each of ``every`` set of keys: the rate of each step, and weights by name before and after the first."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf

    found = []
    for keys in every:
        engine = MegatronEngine(bodies.config(folder, overrides=keys), total_steps=steps)
        rates, weights = [], []
        for step in range(steps):
            if step < 2:
                weights.append({piece.name: piece.tensor.double() for piece in stream_hf(engine.model, engine.groups)})
            engine.forward_backward(batch)
            rates.append(engine.optim_step(more_follow=step + 1 < steps).learning_rate)
        found.append((rates, *weights))
        end_layout()
    return found


def test_warm_up_begins_with_a_rate_and_weight_decay_reaches_what_is_asked_for(ranks, folder, batch):
    """Runs without decay, with it, and with it for norms too differ after the first step by rate · decay · weight."""
    warm = {f"{OPTIMIZER}num_warmup_steps": 3}
    decay = 0.1
    every = [
        warm,
        warm | {f"{OPTIMIZER}weight_decay": decay},
        warm | {f"{OPTIMIZER}weight_decay": decay, f"{OPTIMIZER}decay_norms_and_biases": True},
    ]
    (found,) = ranks(1, steps_body, folder, batch, every, 5)
    rates, before, without = found[0]
    first = reference.LR / 3
    assert rates == pytest.approx(
        [first, first + 2 / 9 * reference.LR, first + 4 / 9 * reference.LR] + [reference.LR] * 2
    )
    for (_, _, after), norms_too in zip(found[1:], (False, True), strict=True):
        flat = [name for name, weight in before.items() if weight.dim() == 1]
        assert flat and len(flat) < len(before)
        for name, weight in before.items():
            expected = first * decay * weight if name not in flat or norms_too else 0 * weight
            # Weights are float32: rounding of weights of order 1.
            assert (without[name] - after[name] - expected).abs().max() < 2e-7, name
