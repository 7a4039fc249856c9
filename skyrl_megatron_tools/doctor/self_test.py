"""The self-test: small checks of the parts of a run, each compared with a known result.

    python -m skyrl_megatron_tools.doctor.self_test NAME

runs one of :data:`CHECKS` in this process. The doctor runs each in a subprocess with a deadline. On CPU, the same
checks run over gloo and with the local layers.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.errors import set_up
from skyrl_megatron.workers.runtime_env import LOOPBACK, free_port
from skyrl_megatron_tools.doctor import Finding

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.tensors import TensorShard


VOCABULARY = 512
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # all experts, so that rounding cannot change the routing
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LENGTHS = (37, 64, 27)
LARGEST_ERROR = 0.03
"""Relative error in the Euclidean norm. bf16 has 8 bits; 0.01 is usual."""


def layer() -> str:
    """Compare logits and all gradients of one bf16 layer with those of an fp32 layer."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model

    megatron_patches.install()
    device.set_local_device(0)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(LOOPBACK, free_port(), 1, True, timeout)
    dist.init_process_group(device.collective_backend(), store=store, rank=0, world_size=1, timeout=timeout)
    groups = parallel_state.initialize(ParallelConfig(1), seed=0, timeout_s=60)
    ours = {"transformer_impl": "local"}
    exact = build_model(CONFIG, groups, dtype=torch.float32, transformer_config_kwargs=ours)
    tested = build_model(CONFIG, groups, dtype=torch.bfloat16)
    _same_weights(exact, tested, groups)
    (logits, gradients), (other_logits, other_gradients) = (_step(model, groups) for model in (exact, tested))
    errors = {"logits": _relative(other_logits, logits)}
    errors |= {name: _relative(other_gradients[name], gradient) for name, gradient in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    dist.destroy_process_group()
    if not errors[worst] <= LARGEST_ERROR:  # NaN too
        raise RuntimeError(
            f"{tested.layer_kind}: the relative error of {worst} in bf16 is {errors[worst]:.2g}, above {LARGEST_ERROR}"
        )
    return f"{tested.layer_kind}, forward and backward within {errors[worst]:.1%} of fp32"


def _same_weights(exact: ModelChunks, tested: ModelChunks, groups: ProcessGroups) -> None:
    """Give both models the same weights, which bf16 represents exactly."""
    import torch

    from skyrl_megatron.runtime.model.local_weights import local_weights

    generator = torch.Generator().manual_seed(0)
    tested_weights = {weight.name: weight.tensor for weight in local_weights(tested, groups)}
    for weight in local_weights(exact, groups):
        scale, offset = (0.1, 1.0) if weight.name.endswith("norm.weight") else (0.05, 0.0)
        values = offset + scale * torch.randn(weight.tensor.shape, generator=generator)
        values = values.to(torch.bfloat16)
        weight.tensor.copy_(values)
        tested_weights[weight.name].copy_(values)


def _step(model: ModelChunks, groups: ProcessGroups) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of a weighted sum of the logits by weight name."""
    import torch

    from skyrl_megatron.runtime.model.local_weights import local_weights
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import rows_without_response

    generator = torch.Generator().manual_seed(1)
    batch = rows_without_response([torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS])
    chunk: Any = model.chunks[0]
    logits = chunk(**pack(batch.padded(), groups, device.device()).model_arguments())
    factors = torch.randn(logits.shape, generator=generator).to(logits.device)
    (logits.float() * factors).sum().backward()
    gradients = local_weights(model, groups, of=_gradient)
    return logits.detach().float(), {weight.name: weight.tensor.float() for weight in gradients}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


WAIT_S = 60.0
TOKENS = 20


# ---------------------------------------------------------------------- all-reduce
def all_reduce() -> str:
    """All-reduce over all GPUs of this node, or over two processes on CPU."""
    import torch

    world = torch.cuda.device_count() if device.has_cuda() else 2
    spawn: Any = torch.multiprocessing.spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(_all_reduce_rank, (world, free_port(), folder), nprocs=world)
        speed = float((Path(folder) / "speed").read_text())
    return f"{world} ranks, {speed / 1e9:.1f} GB/s per direction"


def _all_reduce_rank(rank: int, world: int, port: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device.set_local_device(rank)
    timeout = datetime.timedelta(seconds=WAIT_S)
    store = dist.TCPStore(LOOPBACK, port, world, rank == 0, timeout)
    dist.init_process_group(device.collective_backend(), store=store, rank=rank, world_size=world, timeout=timeout)
    size = (64 << 20) if device.has_cuda() else (1 << 18)
    values = torch.arange(size, dtype=torch.float32, device=device.device()) % 7 + rank
    expected = (torch.arange(size, device=device.device()) % 7) * world + world * (world - 1) // 2
    dist.all_reduce(values)
    if not torch.equal(values, expected.float()):
        raise RuntimeError(f"all-reduce over {world} ranks: rank {rank} has a wrong sum")
    device.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(values)
    device.synchronize()
    seconds = (time.perf_counter() - started) / 5
    if rank == 0:
        (Path(folder) / "speed").write_text(str(2 * (world - 1) / world * values.nbytes / seconds))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- weights
class Tensors:
    """A source of weights to send: one rank has every tensor in full."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (4096, 512), "experts": (8, 512, 384), "norm": (512,)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.tensors = {name: tensor.to(device.device(), torch.bfloat16) for name, tensor in made.items()}

    def metadata(self) -> Sequence[TensorMeta]:
        """List the tensors to send."""
        from skyrl_megatron.weight_sync.buckets import TensorMeta
        from skyrl_megatron.weight_sync.tensors import dtype_name

        return [TensorMeta(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def shards(self) -> Sequence[TensorShard]:
        """Return each tensor as one shard."""
        from skyrl_megatron.weight_sync.tensors import RowRange, TensorShard, as_rows

        rows = [as_rows(name, tensor) for name, tensor in self.tensors.items()]
        return [
            TensorShard(meta, local, (RowRange(0, 0, len(local), 0),))
            for meta, local in zip(self.metadata(), rows, strict=True)
        ]

    def local_shards(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """Return each tensor as one shard, and its number of further owners."""
        shards = self.shards()
        return shards, [0] * len(shards)

    def sends_adapter(self, adapter: str) -> bool:
        return True

    def refresh(self) -> None:
        """Do nothing: the tensors do not change."""

    def addresses(self) -> list[int]:
        """Return the memory addresses of the tensors."""
        return [tensor.data_ptr() for tensor in self.tensors.values()]


def transports() -> list[tuple[str, int]]:
    """Return (transport, GPU of the receiver) of the syncs to try: IPC on one GPU, NCCL between two, gloo on CPU."""
    if not device.has_cuda():
        return [(device.GLOO, 0)]
    import torch

    return [("ipc", 0)] + ([(device.NCCL, 1)] if torch.cuda.device_count() > 1 else [])


def weight_sync() -> str:
    """Send weights twice to another process over each transport, and compare them with the original."""
    import torch

    spawn: Any = torch.multiprocessing.spawn
    tried = transports()
    for name, receiver in tried:
        spawn(_sync_end, (name, receiver, free_port()), nprocs=2)
    text = ", ".join(name for name, _ in tried)
    return text if not device.has_cuda() or len(tried) > 1 else f"{text}; NCCL needs two GPUs"


def _sync_end(end: int, transport: str, receiver_gpu: int, port: int) -> None:
    """Run the sender (``end`` 0) or the receiver (``end`` 1)."""
    import torch

    from skyrl_megatron.weight_sync.buckets import WeightReceiver
    from skyrl_megatron.weight_sync.sender import WeightSender
    from skyrl_megatron.weight_sync.transport import open_transport

    device.set_local_device(receiver_gpu if end else 0)
    bucket_bytes = 1 << 20
    source = Tensors(seed=0)
    if end == 0:
        sender = WeightSender(source, bucket_bytes=bucket_bytes, transport=transport)
        sender.connect(LOOPBACK, port, 1, WAIT_S)
        for _ in range(2):
            sender.send()
        return
    receiver = WeightReceiver([_opened(open_transport, transport, port)], bucket_bytes, device.device())
    receiver.set_metadata([source.metadata()])
    for _ in range(2):
        for name, tensor in receiver.tensors():
            if not torch.equal(tensor, source.tensors[name]):
                raise RuntimeError(f"weight sync over {transport}: the received {name} differs from the sent one")
        receiver.finish()
    receiver.close()


def _opened(open_transport: Callable[..., Any], name: str, port: int) -> Any:
    """Open the transport, with retries until the sender listens."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return open_transport(name, LOOPBACK, port, 1, 2, WAIT_S)
        except (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# ---------------------------------------------------------------------- engine
def engine() -> str:
    """Start vLLM on the embedded model and sample :data:`TOKENS` tokens."""
    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.tiny_model import VOCAB_SIZE, write_embedded_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    async def sample(folder: Path) -> Sequence[int]:
        settings = EngineSettings(
            str(write_embedded_model(folder / "model")),
            dtype=str(device.default_dtype()).removeprefix("torch."),
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_bytes=32 << 20,
            start_timeout_s=280.0,
            log_file=folder / "engine.log",
        )
        started = VLLMEngine(settings)
        await started.start()
        try:
            sampling = {"max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 0}
            return (await started.generate("doctor", [10, 11, 12, 13], sampling)).token_ids
        finally:
            await started.shutdown()

    with tempfile.TemporaryDirectory() as folder:
        tokens = asyncio.run(sample(Path(folder)))
    if len(tokens) != TOKENS or not all(0 <= token < VOCAB_SIZE for token in tokens):
        raise RuntimeError(f"engine: expected {TOKENS} tokens below {VOCAB_SIZE}, got {tokens}")
    return f"{len(tokens)} tokens"


CHECKS: dict[str, Callable[[], str]] = {
    "all-reduce": all_reduce,
    "layer": layer,
    "weight sync": weight_sync,
    "engine": engine,
}
"""Name → check. It returns what it measured, or raises."""


DEADLINES = {"all-reduce": 90.0, "layer": 90.0, "weight sync": 90.0, "engine": 300.0}
"""Name → deadline in seconds. The first start of an engine on a machine compiles kernels."""
ADVICE = {
    "all-reduce": "find where it stops with NCCL_DEBUG=INFO skyrl-megatron doctor, and the broken link with "
    "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1",
    "layer": f"rebuild Transformer Engine: remove its environment and run {set_up('gpu')}",
    "weight sync": "for CUDA IPC, docker run --ipc=host; for NCCL, look at the output with NCCL_DEBUG=INFO",
    "engine": f"read the lines above; run {set_up('gpu')} on this machine",
}


def self_test(*, gpu: bool) -> Iterator[Finding]:
    """Run each check in its own subprocess, one after another."""
    for name, deadline in DEADLINES.items():
        yield run_check(name, deadline, gpu=gpu)


def run_check(name: str, deadline_s: float, *, gpu: bool) -> Finding:
    """Run one check in a subprocess, and kill all its processes afterwards."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, name]
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        process.communicate()
        return Finding(name, "FAIL", f"did not finish within {deadline_s:g} s", ADVICE[name])
    _end(process.pid)
    if process.returncode:
        lines = [line for line in err.strip().splitlines() if line.strip() and not line.startswith(" ")]
        reason = lines[-1][:300] if lines else f"exit code {process.returncode}"
        return Finding(name, "FAIL", reason, ADVICE[name])
    result = out.strip().splitlines()[-1]
    return Finding(name, "ok", f"{result} ({time.monotonic() - started:.0f} s)")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(name: str) -> None:
    """Run one check in this process and print what it measured. It raises if something is wrong."""
    print(CHECKS[name]())


if __name__ == "__main__":
    main(sys.argv[1])
