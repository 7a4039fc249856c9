"""What a step on a GPU costs, counted on CPU tensors: copies, waits, emptied caches. ``benchmarks/gpu_costs.py`` says
what each is worth on paper, ``tests/gpu`` measures it."""

import contextlib
from types import SimpleNamespace

import pytest

from tests.bridges.tiny_models import save_tiny
from tests.training import bodies, reference


@contextlib.contextmanager
def noted():
    """Note copies, marks, waits and emptied caches in their order."""
    from unittest import mock

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from skyrl_megatron import device

    notes = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                notes.append("copy")
            return func(*args, **(kwargs or {}))

    def mark():
        notes.append("mark")
        return lambda: notes.append("wait")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "mark", mark))
        for name in ("synchronize", "empty_cache"):
            stack.enter_context(mock.patch.object(device, name, lambda name=name: notes.append(name)))
        stack.enter_context(Copies())
        yield notes


def state():
    """A layer whose Adam has taken a step, and what moves both."""
    import torch

    from skyrl_megatron.runtime.offload import Offload

    layer = torch.nn.Linear(8, 8)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    adam.step()
    return layer, adam, Offload([layer], [SimpleNamespace(optimizer=adam)])


def test_an_offload_waits_for_its_copies_alone():
    """It waited for the whole device, once for each part: three times."""
    from skyrl_megatron.types import PARTS

    _, _, memory = state()
    with noted() as notes:
        memory.start(("optimizer",))
        assert notes == ["copy"] * 6 + ["mark"], "two moments and a step counter of two parameters; nothing waits"
        notes.clear()
        memory.offload(PARTS)
    assert notes.count("copy") == 2, "the weights; the optimizer is under way"
    assert notes.count("wait") == 3 and "synchronize" not in notes and notes[-1] == "empty_cache"
    assert notes.count("empty_cache") == 1 and notes.index("wait") > notes.index("mark")


def test_state_that_changes_while_it_leaves_is_copied_again():
    """A step that comes before the offload; without it, the copies are what comes back."""
    import torch

    layer, adam, memory = state()
    for changes in (True, False):
        memory.start(("optimizer", "weights"))
        memory.onload(("optimizer", "weights"))
        if changes:
            adam.step()
        expected = [each.clone() for each in (*layer.parameters(), *adam.state[layer.weight].values())]
        memory.offload(("optimizer", "weights"))
        assert not layer.weight.untyped_storage().nbytes()
        memory.onload(("optimizer", "weights"))
        memory.wait("optimizer", "weights")
        found = (*layer.parameters(), *adam.state[layer.weight].values())
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def emptied(folder, batch, overrides):
    """Emptied caches of three optimizer steps, and of the offload after them."""
    from unittest import mock

    from skyrl_megatron import device
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine, calls = MegatronEngine(bodies.config(folder, overrides=overrides)), []
    batch.old_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
    with mock.patch.object(device, "empty_cache", lambda: calls.append(1)):
        for _ in range(3):
            engine.forward_backward(batch)
            engine.optim_step()
        steps = len(calls)
        engine.offload("gradients", "optimizer")
    return steps, len(calls) - steps


@pytest.mark.process
def test_the_cache_is_emptied_when_others_need_the_memory(ranks, tmp_path):
    folder, batch = save_tiny("qwen3_moe", tmp_path / "hf"), reference.make_batch(vocab_size=1003)
    assert ranks(1, emptied, folder, batch, {})[0] == (0, 1)
    asked = {f"{bodies.MEGATRON}empty_cuda_cache": True}
    assert ranks(1, emptied, folder, batch, asked)[0] == (3, 1), "as it was by default"


def order_of_updates(overlap, fp32_gradients=True):
    """What a hybrid optimizer of four parameters, half of them on the host, does in a step, in order."""
    from unittest import mock

    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from skyrl_megatron.runtime import cpu_patches, optimizer
    from tests.support.fake_gpu import fake_gpu

    notes = []

    def note(adam, *_):
        ours = [parameter for group in adam.param_groups for parameter in group["params"]]
        notes.append(f"{'host' if ours[0] in hybrid.cpu_copys_map_gpu_param else 'GPU'} Adam of {len(ours)}")

    class Stream(cpu_patches.Stream):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.name = kwargs.get("name", "copies")

        def wait_stream(self, other):
            notes.append(f"{self.name} waits for {getattr(other, 'name', '?')}")

    compute = Stream(name="compute")
    with cpu_patches.installed(), fake_gpu(), mock.patch.object(torch.cuda, "Stream", Stream), mock.patch.object(
        torch.cuda, "current_stream", lambda *_: compute
    ):  # fmt: skip
        parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(4)]
        hybrid = HybridDeviceOptimizer(
            [{"params": parameters}],
            offload_fraction=0.5,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            pin_cpu_grads=False,
        )
        if not fp32_gradients:
            optimizer._wait_for_gradients(SimpleNamespace(optimizer=hybrid))
        for each in hybrid.sub_optimizers:
            each.register_step_pre_hook(note)
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        notes.clear()
        hybrid.step()
    return notes


def test_the_host_optimizer_updates_while_it_copies():
    """A parameter's way back begins after its own update. It began after the last one's."""
    before, after = order_of_updates(False), order_of_updates(True)
    assert [note for note in before if "host" in note] == ["host Adam of 2"]
    updates = [note for note in after if "host" in note or note == "copies waits for compute"]
    assert updates == ["copies waits for compute", *["host Adam of 1", "copies waits for compute"] * 2]
    assert "compute waits for copies" not in after


def test_adam_on_the_gpu_waits_for_gradients_that_are_converted():
    """bf16 gradients become fp32 on the stream of the copies, which Megatron does not wait for."""
    converted = order_of_updates(True, fp32_gradients=False)
    assert converted.index("compute waits for copies") < converted.index("GPU Adam of 2")


def added_gradients(fused):
    """Additions to gradient buffers in two calls of two micro-batches, and the gradient; the layer does with it what
    ``transformer_engine/pytorch/module/linear.py`` does, inside real gradient buffers of Megatron's."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from torch.utils._python_dispatch import TorchDispatchMode

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches, parallel_state
    from skyrl_megatron.runtime.optimizer import fuse_gradients

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, fuse):
            ctx.save_for_backward(x)
            ctx.weight, ctx.fuse = weight, fuse
            return x @ weight.T

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            if not ctx.fuse:
                return dy @ ctx.weight, dy.T @ x, None
            ctx.weight.main_grad.addmm_(dy.T.float(), x.float())
            ctx.weight.grad_added_to_main_grad = True
            return dy @ ctx.weight, torch.full_like(ctx.weight, torch.nan), None

    class Linear(torch.nn.Module):
        def __init__(self, trained=True):
            super().__init__()
            self.fuse_wgrad_accumulation = False
            self.weight = torch.nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16), requires_grad=trained)

        def forward(self, x):
            return Product.apply(x, self.weight, self.fuse_wgrad_accumulation)

    class Additions(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add_.Tensor and args[0].dtype == torch.float32:
                additions.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    cpu_patches.install()
    groups = parallel_state.initialize(ParallelConfig(world_size=1), seed=0, timeout_s=60)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    layers = torch.nn.Sequential(Linear(), Linear(trained=False), Linear())
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, buffers, layers, pg_collection=groups.collection)
    additions, generator = [], torch.Generator().manual_seed(0)
    if fused:
        assert fuse_gradients([chunk]) == 2 and not layers[1].fuse_wgrad_accumulation, "frozen weights have no buffer"
    with Additions():
        for call in range(2):
            for _ in range(2):
                x = torch.randn(8, 16, generator=generator).bfloat16().requires_grad_()
                chunk(x).float().sum().backward()
            if call == 0:
                chunk.scale_gradients(0.5)
    return len(additions), [layer.weight.main_grad.clone() for layer in (layers[0], layers[2])]


@pytest.mark.process
def test_gradients_are_added_within_the_product(ranks):
    """No gradient is written in bf16, read, and added to its buffer; the sum is the same but for that rounding."""
    import torch

    ((before, rounded),), ((after, exact),) = (ranks(1, added_gradients, fused) for fused in (False, True))
    assert (before, after) == (2 * 4, 0), "two layers, four micro-batches"
    for one, other in zip(rounded, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
        assert not torch.equal(one, other)


def passes(folder, batch, kwargs):
    """Forward passes of all layers in an update, and the gradient."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from skyrl_megatron.runtime.engine import MegatronEngine

    keys = {f"{bodies.MEGATRON}transformer_config_kwargs.recompute_{name}": value for name, value in kwargs.items()}
    checkpointing = {"trainer.gradient_checkpointing": bool(kwargs)}
    engine, seen = MegatronEngine(bodies.config(folder, overrides=keys | checkpointing)), []
    for chunk in engine.model.chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(lambda *_: seen.append(1))
    batch.old_logprobs = batch.ref_logprobs = batch.response_mask * -6.0
    engine.forward_backward(batch)
    engine.reduce_gradients()
    return len(seen), [buffer.grad_data.clone() for chunk in engine.chunks for buffer in chunk.buffers]


@pytest.mark.process
def test_layers_that_fit_are_not_computed_again(ranks, tmp_path):
    """All were: twice the forward passes."""
    import torch

    folder = save_tiny("qwen3_moe", tmp_path / "hf", num_hidden_layers=4)
    batch = reference.make_batch(vocab_size=1003)
    none, exact = ranks(1, passes, folder, batch, {})[0]
    every, _ = ranks(1, passes, folder, batch, {"granularity": "auto"})[0]
    some, found = ranks(1, passes, folder, batch, {"granularity": "full", "method": "block", "num_layers": 1})[0]
    assert every == 2 * none and some == none + none // 4
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
