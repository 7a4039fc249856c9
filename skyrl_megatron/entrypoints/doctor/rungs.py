"""Bodies of the self-test. Each returns a line about what it measured and raises RuntimeError for a wrong result."""

from __future__ import annotations

import asyncio
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron import device
from skyrl_megatron.entrypoints.doctor.layer_rung import layer
from skyrl_megatron.workers.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from skyrl_megatron.weight_sync.bucket import TensorMeta
    from skyrl_megatron.weight_sync.source import TensorShard

WAIT_S = 60.0
TOKENS = 20


# ---------------------------------------------------------------------- all-reduce
def all_reduce() -> str:
    """Add up over all GPUs of this node, over two processes on CPU."""
    import torch

    world = torch.cuda.device_count() if device.has_cuda() else 2
    spawn: Any = torch.multiprocessing.spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(_all_reduce_rank, (world, free_port(), folder), nprocs=world)
        speed = float((Path(folder) / "speed").read_text())
    return f"{world} ranks, {speed / 1e9:.1f} GB/s each way"


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
    """Weights to send: what a rank has whole."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (4096, 512), "experts": (8, 512, 384), "norm": (512,)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.tensors = {name: tensor.to(device.device(), torch.bfloat16) for name, tensor in made.items()}

    def metadata(self) -> Sequence[TensorMeta]:
        """List what is sent."""
        from skyrl_megatron.weight_sync.bucket import TensorMeta
        from skyrl_megatron.weight_sync.source import dtype_name

        return [TensorMeta(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def shards(self) -> Sequence[TensorShard]:
        """Return each tensor whole."""
        from skyrl_megatron.weight_sync.source import RowRange, TensorShard, as_rows

        rows = [as_rows(name, tensor) for name, tensor in self.tensors.items()]
        return [
            TensorShard(meta, local, (RowRange(0, 0, len(local), 0),))
            for meta, local in zip(self.metadata(), rows, strict=True)
        ]

    def held(self) -> tuple[Sequence[TensorShard], Sequence[int]]:
        """Return each tensor whole, and that it has one owner."""
        shards = self.shards()
        return shards, [0] * len(shards)

    def travels(self, adapter: str) -> bool:
        return True

    def refresh(self) -> None:
        """Do nothing: what is sent does not change."""

    def addresses(self) -> list[int]:
        """Return where the tensors lie."""
        return [tensor.data_ptr() for tensor in self.tensors.values()]


def transports() -> list[tuple[str, int]]:
    """Return (transport, GPU of the receiver) of the syncs to try: IPC on one GPU, NCCL between two, gloo on CPU."""
    if not device.has_cuda():
        return [(device.GLOO, 0)]
    import torch

    return [("ipc", 0)] + ([(device.NCCL, 1)] if torch.cuda.device_count() > 1 else [])


def weight_sync() -> str:
    """Send weights from one process to another by every transport, twice, and compare each with what was sent."""
    import torch

    spawn: Any = torch.multiprocessing.spawn
    tried = transports()
    for name, receiver in tried:
        spawn(_sync_end, (name, receiver, free_port()), nprocs=2)
    text = ", ".join(name for name, _ in tried)
    return text if not device.has_cuda() or len(tried) > 1 else f"{text}; NCCL needs two GPUs"


def _sync_end(end: int, transport: str, receiver_gpu: int, port: int) -> None:
    """Be the sender (0) or the receiver (1)."""
    import torch

    from skyrl_megatron.weight_sync.receiver import WeightReceiver
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
                raise RuntimeError(f"weight sync over {transport}: {name} is not what was sent")
        receiver.finish()
    receiver.close()


def _opened(open_transport: Callable[..., Any], name: str, port: int) -> Any:
    """Join as soon as the sender listens."""
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
    from skyrl_megatron.entrypoints.embedded_model import VOCAB_SIZE, write_embedded_model
    from skyrl_megatron.inference.vllm.engine import VLLMEngine
    from skyrl_megatron.inference.vllm.settings import EngineSettings

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
        raise RuntimeError(f"engine: asked for {TOKENS} tokens below {VOCAB_SIZE}, got {tokens}")
    return f"{len(tokens)} tokens"


BODIES: dict[str, Callable[[], str]] = {
    "all-reduce": all_reduce,
    "layer": layer,
    "weight sync": weight_sync,
    "engine": engine,
}
"""Rung → body."""
