"""Megatron's overlap of expert exchange with another micro-batch: the step of the usual schedule, in another order."""

import contextlib

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.training import bodies, reference

LAYOUTS = {"ep2": dict(world=2, ep=2), "tp2·ep2": dict(world=2, tp=2, ep=2)}


def update(folder, batch, layout, overlap, fault=False):
    """Metrics, gradients, and the passes of experts (F and B) of an update in their order.

    Megatron overlaps in 16 bits alone. Its config checks that when it is made, and computes the same in fp32. Streams
    are those of ``cpu_patches.py``. ``fault``: routers do not know which tokens are padding.
    """
    from unittest import mock

    import torch

    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.model.moe import GroupedExperts, TokenWeightedRouter

    keys = {"trainer.micro_train_batch_size_per_gpu": 1, "trainer.share_prefixes": "never"}
    engine, order = MegatronEngine(bodies.config(folder, **layout, overrides=keys)), []
    engine.model.config.overlap_moe_expert_parallel_comm = overlap
    engine._speed = lambda *_: {}
    part = batch.select(split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank])
    part.old_logprobs = part.ref_logprobs = part.response_mask * -6.0

    def note(module, _, output):
        order.append("F")
        output[0].register_hook(lambda _: order.append("B"))

    for module in (module for chunk in engine.model.chunks for module in chunk.modules()):
        if isinstance(module, GroupedExperts):
            module.register_forward_hook(note)
    unaware = mock.patch.object(TokenWeightedRouter, "planned_padding", property(lambda self: None, lambda *_: None))
    streams = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)
    with streams, unaware if fault else contextlib.nullcontext():
        metrics = engine.forward_backward(part)
        engine.reduce_gradients()
    buffers = [b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return metrics, [buffer.grad_data.clone() for buffer in buffers], "".join(order)


def compare(ranks, tmp_path, family, layout, **fault):
    import torch

    folder = save_tiny(family, tmp_path / "hf", num_hidden_layers=4, num_key_value_heads=2)
    batch = reference.make_batch(vocab_size=1003)
    plain = ranks(layout["world"], update, folder, batch, layout, False)
    found = ranks(layout["world"], update, folder, batch, layout, True, **fault)
    for (numbers, gradients, before), (mine, own, after) in zip(plain, found, strict=True):
        assert mine == pytest.approx(numbers, rel=1e-5, abs=1e-6)
        for one, other in zip(own, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
        micro_batches = before.count("FB")  # where a backward pass follows its forward pass
        assert sorted(before) == sorted(after) and micro_batches > 1
        layers = len(before) // 2 // micro_batches
        assert after.count("BF") == layers * (micro_batches - 1), "exchanges beside another micro-batch's experts"
        assert before.count("BF") == micro_batches - 1


@pytest.mark.process
@pytest.mark.parametrize("layout", ["ep2", pytest.param("tp2·ep2", marks=pytest.mark.full_matrix)])
def test_the_step_is_the_same(ranks, tmp_path, layout):
    compare(ranks, tmp_path, "qwen3_moe", LAYOUTS[layout])


@pytest.mark.process
def test_routers_that_count_padding_are_seen(ranks, tmp_path):
    with pytest.raises(AssertionError, match="comparison failed"):
        compare(ranks, tmp_path, "qwen3_moe", LAYOUTS["tp2·ep2"], fault=True)
