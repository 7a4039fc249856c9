"""Bodies of the multi-process tests of the training step, and the checks of what they return."""

from dataclasses import dataclass

import pytest

from tests.training import reference

MEGATRON = "trainer.policy.megatron_config."
NO_DISTRIBUTED = {f"{MEGATRON}optimizer_config_kwargs.use_distributed_optimizer": False}
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of each parameter's gradient
WEIGHT_TOLERANCE = 2e-5  # after three steps of at most 1e-2 each


@dataclass
class Outcome:
    """What one rank saw."""

    metrics: dict
    grad_norm: float
    gradients: dict
    """HF name → error of the gradient over the largest entry; {} when they are not looked at."""
    weights: dict
    """HF name → largest error of a weight after three steps."""


def config(folder, *, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1, world=1, overrides=None):
    from skyrl_megatron.config import SkyRLTrainConfig

    keys = {
        "trainer.policy.model.path": str(folder),
        f"{MEGATRON}tensor_model_parallel_size": tp,
        f"{MEGATRON}pipeline_model_parallel_size": pp,
        f"{MEGATRON}context_parallel_size": cp,
        f"{MEGATRON}expert_model_parallel_size": ep,
        f"{MEGATRON}expert_tensor_parallel_size": etp,
        f"{MEGATRON}optimizer_config_kwargs.adam_eps": reference.ADAM_EPS,
        "trainer.placement.policy_num_gpus_per_node": world,
        "trainer.algorithm.use_kl_loss": True,
        "trainer.algorithm.kl_loss_coef": reference.KL,
        "trainer.algorithm.use_entropy_loss": True,
        "trainer.algorithm.entropy_loss_coef": reference.ENTROPY,
        "trainer.algorithm.eps_clip_low": reference.CLIP_LOW,
        "trainer.algorithm.eps_clip_high": reference.CLIP_HIGH,
        "trainer.algorithm.temperature": reference.TEMPERATURE,
        "trainer.policy.optimizer_config.lr": reference.LR,
        "trainer.policy.optimizer_config.max_grad_norm": reference.MAX_GRAD_NORM,
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.gradient_checkpointing": False,
        "trainer.micro_train_batch_size_per_gpu": reference.MICRO_BATCH,
        "trainer.micro_forward_batch_size_per_gpu": reference.MICRO_BATCH,
        **({f"{MEGATRON}virtual_pipeline_model_parallel_size": vpp} if vpp else {}),
        **(overrides or {}),
    }
    return SkyRLTrainConfig.from_cli_overrides(keys)


def three_steps(folder, batch, expected, layout, overrides, fault=None):
    """Three steps on this rank's share of the batch; errors against the reference."""
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from tests.training.faults import planted

    engine = MegatronEngine(config(folder, **layout, overrides=overrides))
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    gradients = {}
    with planted(fault, engine):
        for step in range(reference.STEPS):
            measured = engine.forward_backward(part)
            if step == 0:
                metrics = measured
            if step == 0 and not engine.optimizer.config.use_distributed_optimizer:
                engine.reduce_gradients()
                for piece in stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad):
                    want = expected.grads[piece.name]
                    gradients[piece.name] = float((piece.tensor.cpu() - want).abs().max() / want.abs().max())
            result = engine.optim_step(more_follow=step < reference.STEPS - 1)
            if step == 0:
                grad_norm = result.grad_norm
    weights = {
        piece.name: float((piece.tensor.cpu() - expected.weights[piece.name]).abs().max())
        for piece in stream_hf(engine.model, engine.groups)
    }
    return Outcome(metrics, grad_norm, gradients, weights)


def check(outcomes, expected):
    """Assert that loss terms, gradient norm, gradients and weights are those of the reference."""
    for outcome in outcomes:
        assert outcome.metrics["policy_loss"] == pytest.approx(expected.policy_loss, rel=1e-5, abs=1e-6)
        assert outcome.metrics["policy_kl"] == pytest.approx(expected.kl, rel=1e-5)
        assert outcome.metrics["policy_entropy"] == pytest.approx(expected.entropy, rel=1e-5)
        assert outcome.metrics["final_loss"] == pytest.approx(expected.final_loss, rel=1e-5, abs=1e-6)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for field, tolerance in (("gradients", GRADIENT_TOLERANCE), ("weights", WEIGHT_TOLERANCE)):
        errors = {name: error for outcome in outcomes for name, error in getattr(outcome, field).items()}
        if errors:
            assert set(errors) == set(expected.weights), f"{field}: some parameters were not looked at"
            worst = max(errors, key=errors.get)
            print(f"largest error of {field}: {errors[worst]:.1e} ({worst})")
            assert errors[worst] <= tolerance, f"{field} of {worst} are off by {errors[worst]:.1e}"


def one_backward(folder, batch, layers, overrides, fault=None):
    """Log-probs [R] and the gradient of every parameter by HF name, with ``layers`` of Transformer Engine's or
    ours (``transformer_impl``); ``fault``: one of ``tests/runtime/faults.py``."""
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import stream_hf
    from tests.runtime.faults import FAULTS

    asked = {f"{MEGATRON}transformer_config_kwargs.transformer_impl": layers}
    engine = MegatronEngine(config(folder, overrides=NO_DISTRIBUTED | asked | overrides))
    assert engine.model.config.transformer_impl == layers
    if fault:
        FAULTS[fault](engine.model)
    batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
    logprobs = engine.compute_logprobs(batch)
    engine.forward_backward(batch)
    engine.reduce_gradients()
    pieces = stream_hf(engine.model, engine.groups, of=lambda parameter: parameter.main_grad)
    return {"log-probs": logprobs.numpy()} | {
        f"{piece.name}[{piece.index}]": piece.tensor.detach().float().cpu().numpy() for piece in pieces
    }


def check_as_near(found, ours, exact):
    """Assert that every array of ``found`` is about as near to ``exact`` as that of ``ours``: within twice its
    relative L2 distance and one part in a hundred, more than bf16's rounding adds and less than a mistake leaves."""
    import numpy as np

    assert found.keys() == exact.keys() and len(exact) > 20
    wrong = {}
    for name, value in exact.items():
        size = np.linalg.norm(value)
        error, usual = (np.linalg.norm(other[name] - value) / size if size else 0.0 for other in (found, ours))
        if not error <= 2 * usual + 0.01:
            wrong[name] = f"{error:.2g} (ours: {usual:.2g})"
    assert not wrong, f"{len(wrong)} of {len(exact)} are off: {dict(list(wrong.items())[:8])}"


def leaves_and_comes_back(folder, batch, overrides, fault=None):
    """A step, then everything leaves the device and comes back as it was; the next step moves what the model reads."""
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.offload import memory_of, optimizer_tensors

    engine = MegatronEngine(config(folder, overrides=overrides))
    batch.old_logprobs = batch.rollout_logprobs = batch.ref_logprobs = batch.response_mask * -6.0

    def tensors():
        found = [*(p for chunk in engine.chunks for p in chunk.parameters()), *optimizer_tensors(engine.optimizer)]
        return [each.detach() for tensor in found for each in memory_of(tensor)]

    def step():
        engine.forward_backward(batch)
        assert not engine.optim_step().skipped

    step()
    before = [tensor.clone() for tensor in tensors()]
    engine.offload()
    left = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors() if t.device == device.device()}
    assert len(left) > 10 and not any(left.values()), f"{sum(left.values())} bytes are still on the device"
    engine.onload()
    if fault == "replaced weights":
        for parameter in (p for chunk in engine.chunks for p in chunk.parameters()):
            parameter.data = parameter.data.clone()
    if fault == "lost moments":
        for tensor in optimizer_tensors(engine.optimizer):
            tensor.detach().zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True)), "what came back is not what left"
    scores = engine.compute_logprobs(batch)
    engine.offload()
    assert torch.equal(engine.compute_logprobs(batch), scores)
    step()
    moved = (engine.compute_logprobs(batch) - scores).abs().max()
    assert moved > 1e-3, "the optimizer steps, and the model computes with the weights of before"
