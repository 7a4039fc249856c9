"""Ray actors around MegatronEngine: one process a rank."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

import ray

from skyrl_megatron.workers.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import Role
    from skyrl_megatron.types import TrainingBatch


@ray.remote(num_cpus=1)
class RankWorker:
    """One rank of a role's model. Every method is called on all ranks of the role at once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def rendezvous(self) -> tuple[str, int]:
        """An address for rank 0 of the process group."""
        return LOOPBACK, free_port()

    def build(self, cfg: SkyRLTrainConfig, role: Role, address: tuple[str, int]) -> None:
        """Join the process group, build the model and load its weights.

        Megatron is imported here, so that a driver that only handles actors does not pay for it.
        """
        import torch
        import torch.distributed as dist

        from skyrl_megatron import device
        from skyrl_megatron.runtime.engine import MegatronEngine
        from skyrl_megatron.runtime.hf_export import stream_hf
        from skyrl_megatron.weight_sync.sender import WeightSender

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(self.rank)}
        device.set_local_device(self.rank)
        timeout = datetime.timedelta(seconds=cfg.trainer.phase_timeout_s)
        store = dist.TCPStore(*address, self.world_size, self.rank == 0, timeout)
        dist.init_process_group(
            device.collective_backend(), store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )
        self.engine = MegatronEngine(cfg, role)
        engine = self.engine
        self.sender = WeightSender(lambda: ((p.name, p.tensor) for p in stream_hf(engine.model, engine.groups)))

    def _mine(self, batch: TrainingBatch) -> tuple[Any, TrainingBatch]:
        from skyrl_megatron.runtime.micro_batches import split_for_dp

        rows = split_for_dp(batch.lengths, self.engine.dp_size, self.engine.flops)[self.engine.dp_rank]
        return rows, batch.select(rows)

    def compute_logprobs(self, batch: TrainingBatch) -> tuple[list[int], Tensor] | None:
        """(rows, their log-probs) on the ranks whose results are collected, None on the others."""
        rows, part = self._mine(batch)
        logprobs = self.engine.compute_logprobs(part)
        return (rows.tolist(), logprobs) if self.engine.is_collection_rank else None

    def step(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step over the whole batch; the same metrics on every rank."""
        metrics = self.engine.forward_backward(self._mine(batch)[1])
        result = self.engine.optim_step()
        return metrics | {"grad_norm": result.grad_norm, "lr": result.learning_rate, "skipped": float(result.skipped)}

    def weight_metadata(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """What this rank sends to the engines. Collective."""
        return [(meta.name, meta.dtype, meta.shape) for meta in self.sender.metadata()]

    def connect_weights(self, port: int, receivers: int) -> None:
        """Open this rank's group for the engines' workers."""
        self.sender.connect(LOOPBACK, port, receivers)

    def send_weights(self) -> list[int]:
        """Send this rank's tensors; returns the checksum of each bucket. Collective."""
        return self.sender.send()
