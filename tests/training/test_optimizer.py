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


KWARGS = f"{bodies.MEGATRON}optimizer_config_kwargs."


def guarded_body(folder, batch, thresholds):
    """For each limit of the gradient norm: what two steps report, how far weights move, and what Megatron's own step
    says of the same gradients (whether it updated, and zeros among them)."""
    import torch

    from skyrl_megatron.runtime.engine import MegatronEngine

    found = []
    for threshold in thresholds:
        keys = {f"{KWARGS}log_num_zeros_in_grad": True}
        if threshold is not None:
            keys[f"{KWARGS}grad_norm_skip_threshold"] = threshold
        engine = MegatronEngine(bodies.config(folder, overrides=bodies.NO_DISTRIBUTED | keys, world=2), total_steps=9)
        weights = [parameter.detach().clone() for parameter in engine.chunks[0].parameters()]
        engine.forward_backward(batch)
        result = engine.optim_step()
        moved = max(
            float((old - new).abs().max()) for old, new in zip(weights, engine.chunks[0].parameters(), strict=True)
        )
        scheduled = engine.lr_schedule.num_steps
        engine.forward_backward(batch)
        engine.reduce_gradients()
        with torch.no_grad():
            updated, _, zeros = engine.optimizer.step()
        entries = sum(int((p.main_grad == 0).sum()) for p in engine.chunks[0].parameters())
        found.append((result, moved, scheduled, engine.skipped_steps, updated, zeros, entries))
        end_layout()
    return found


def test_a_gradient_above_the_limit_is_skipped_as_by_megatron(ranks, folder, batch):
    """``grad_norm_skip_threshold`` and ``log_num_zeros_in_grad``: this step and Megatron's own decide alike."""
    (found,) = ranks(1, guarded_body, folder, batch, [None, 1e-3, 1e6])
    for limit, (result, moved, scheduled, skipped, updated, zeros, entries) in zip(
        (None, 1e-3, 1e6), found, strict=True
    ):
        above = limit == 1e-3
        assert result.skipped is above and skipped == above and result.offender is None
        assert result.grad_norm > 1e-3 and entries > 0
        assert (moved == 0) is above and scheduled == (not above)
        assert updated is not above and zeros == entries
        assert result.zeros_in_grad == (None if above else pytest.approx(entries, rel=0.2))


def groups_body(folder, keys):
    """Settings of each parameter group after a step of the schedule, and the kind of the inner optimizer."""
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, overrides=bodies.NO_DISTRIBUTED | keys), total_steps=9)
    engine.lr_schedule.step(1)
    names = ("lr", "eps", "wd_mult", "weight_decay", "min_lr")
    groups = [{name: group.get(name) for name in names} for group in engine.optimizer.param_groups]
    norms = {
        id(p) for name, p in engine.chunks[0].named_parameters() if "q_layernorm." in name or "k_layernorm." in name
    }
    for found, group in zip(groups, engine.optimizer.param_groups, strict=True):
        found["norms of q and k"] = len(norms & {id(parameter) for parameter in group["params"]})
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return groups, {type(part.optimizer).__name__ for part in parts}


def test_fields_that_are_passed_on_reach_the_optimizer(ranks, folder):
    """Rates of embedding and head, Adam's epsilon and kind of decay, and what decays."""
    asked = {"decoupled_lr": 0.5, "decoupled_min_lr": 0.25, "adam_eps": 0.125, "decoupled_weight_decay": False}
    asked["apply_wd_to_qk_layernorm"] = True
    (plain,) = ranks(1, groups_body, folder, {})
    (asked,) = ranks(1, groups_body, folder, {f"{KWARGS}{name}": value for name, value in asked.items()})
    assert plain[1] == {"AdamW"} and asked[1] == {"Adam"}
    assert {group["eps"] for group in plain[0]} == {reference.ADAM_EPS}
    assert {group["eps"] for group in asked[0]} == {0.125}
    assert {group["lr"] for group in plain[0]} == {reference.LR}
    assert {group["lr"] for group in asked[0]} == {reference.LR, 0.5}
    assert {group["min_lr"] for group in asked[0]} - {group["min_lr"] for group in plain[0]} == {0.25}
    for groups, decays in ((plain[0], 0.0), (asked[0], 1.0)):
        assert {group["wd_mult"] for group in groups if group["norms of q and k"]} == {decays}
