"""Bodies of the multi-process tests of adapters, and the checks of what they return."""

from dataclasses import dataclass

import pytest

from tests.lora import reference as adapters
from tests.training import reference

LORA = "trainer.policy.model.lora."
HOW = "trainer.policy.megatron_config.lora_config."
KEYS = {f"{LORA}rank": adapters.RANK, f"{LORA}alpha": adapters.ALPHA}
LOGPROBS_TOLERANCE = 1e-5  # nats
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of each factor's gradient
WEIGHT_TOLERANCE = 2e-5  # after three steps of at most 1e-2 each


@dataclass
class Outcome:
    """What one rank saw."""

    logprobs: float
    """Largest error of a log-prob of this rank's rows, before the first step."""
    final_loss: float
    grad_norm: float
    gradients: dict
    """Factor → error of its gradient over the largest entry; {} when they are not looked at."""
    weights: dict
    """Factor → largest error after three steps."""
    base: bool
    """Whether the base's weights are what they were."""


def adapted_engine(folder, layout, overrides, factors=None):
    """An engine whose adapters are ``factors``, or as they start."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron_lora.folder import fill_factors
    from tests.training.bodies import config

    engine = MegatronEngine(config(folder, **layout, overrides=KEYS | overrides))
    if factors is not None:
        fill_factors(engine.adapters, engine.groups, adapters.finder(factors))
        engine.optimizer.reload_model_params()
    return engine


def three_steps(folder, batch, expected, layout, overrides, fault=None):
    """Three steps on this rank's share of the batch; errors against PEFT's."""
    import torch

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.model.local_weights import local_weights
    from skyrl_megatron_lora.folder import stream_factors
    from tests.lora.faults import planted

    engine = adapted_engine(folder, layout, overrides, expected.start)
    before = [weight.tensor.clone() for weight in local_weights(engine.model, engine.groups)]
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    part = batch.select(rows)
    gradients = {}
    with planted(fault, engine):
        wanted = batch.responses.select(expected.logprobs, rows)
        logprobs = float((engine.compute_logprobs(part) - wanted).abs().max())
        for step in range(reference.STEPS):
            measured = engine.forward_backward(part)
            if step == 0 and not engine.optimizer.config.use_distributed_optimizer:
                engine.reduce_gradients()
                for factor in stream_factors(engine.adapters, engine.groups, of=lambda p: p.main_grad):
                    name = f"{factor.module}.{factor.letter}"
                    want = expected.grads[name]
                    gradients[name] = float((factor.tensor.cpu() - want).abs().max() / want.abs().max())
            result = engine.optim_step()
            if step == 0:
                final_loss, grad_norm = measured["final_loss"], result.grad_norm
    weights = {
        f"{factor.module}.{factor.letter}": float(
            (factor.tensor.cpu() - expected.weights[f"{factor.module}.{factor.letter}"]).abs().max()
        )
        for factor in stream_factors(engine.adapters, engine.groups)
    }
    after = local_weights(engine.model, engine.groups)
    base = all(torch.equal(old, new.tensor) for old, new in zip(before, after, strict=True))
    return Outcome(logprobs, final_loss, grad_norm, gradients, weights, base)


def one_backward(folder, batch, factors, layers, overrides, fault=None):
    """Log-probs [R] and the gradient of every factor, as ``tests.training.bodies.one_backward`` of weights."""
    from skyrl_megatron_lora.folder import stream_factors
    from tests.lora.faults import planted
    from tests.training.bodies import MEGATRON, NO_DISTRIBUTED

    asked = {f"{MEGATRON}transformer_config_kwargs.transformer_impl": layers}
    engine = adapted_engine(folder, {}, NO_DISTRIBUTED | asked | overrides, factors)
    assert engine.model.config.transformer_impl == layers
    batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
    with planted(fault, engine):
        logprobs = engine.compute_logprobs(batch)
        engine.forward_backward(batch)
        engine.reduce_gradients()
    pieces = stream_factors(engine.adapters, engine.groups, of=lambda parameter: parameter.main_grad)
    return {"log-probs": logprobs.numpy()} | {
        f"{each.module}.{each.letter}": each.tensor.detach().float().cpu().numpy() for each in pieces
    }


def check(outcomes, expected):
    """Assert that loss, gradient norm, gradients and weights are PEFT's, and that the base has not moved."""
    for outcome in outcomes:
        assert outcome.logprobs <= LOGPROBS_TOLERANCE
        assert outcome.final_loss == pytest.approx(expected.final_loss, abs=1e-5 * expected.terms)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert outcome.base, "weights of the base changed"
    for field, tolerance in (("gradients", GRADIENT_TOLERANCE), ("weights", WEIGHT_TOLERANCE)):
        errors = {name: error for outcome in outcomes for name, error in getattr(outcome, field).items()}
        if errors:
            assert set(errors) == set(expected.weights), f"{field}: some factors were not looked at"
            worst = max(errors, key=errors.get)
            print(f"largest error of {field}: {errors[worst]:.1e} ({worst})")
            assert errors[worst] <= tolerance, f"{field} of {worst} are off by {errors[worst]:.1e}"
