"""New weights for the engines: pause all, update all, compare what arrived with what was sent, publish, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.workers.role import ADDRESS_TIMEOUT_S, Role


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync cost."""

    version: str
    nbytes: int
    seconds: float
    """From pause to resume."""
    transfer_seconds: float
    """Of that, sending and loading."""

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes per second of transfer, in 10⁹."""
        return self.nbytes / self.transfer_seconds / 1e9


class WeightExchange:
    """Connects the ranks of the policy with the workers of all engines; every rank sends the tensors it puts together.

    ``engines``: actors with the methods of ``inference/protocol.py``; ``ranks_per_engine``: worker ranks of each;
    ``publish``: told of a version when all engines hold it, verified, and before they resume.
    """

    def __init__(
        self,
        policy: Role,
        engines: Sequence[Any],
        ranks_per_engine: int,
        publish: Callable[[str], None] = lambda version: None,
    ) -> None:
        self.policy, self.engines, self.ranks_per_engine = policy, list(engines), ranks_per_engine
        self.publish = publish
        self.names = [f"engine {number}" for number in range(len(self.engines))]
        self.syncs = 0

    def connect(self) -> None:
        """Once, before the first :meth:`sync`: announce the tensors and open a group for each sending rank."""
        group = self.policy.group
        self.metadata = group.call("weight_metadata", phase="connect weights")
        self.nbytes = sum(TensorMeta(*meta).nbytes for sender in self.metadata for meta in sender)
        addresses = ray.get([actor.address.remote() for actor in group.actors], timeout=ADDRESS_TIMEOUT_S)
        receivers = len(self.engines) * self.ranks_per_engine
        pending = group.start(
            "listen_for_engines", phase="connect weights", each=[(address, receivers) for address in addresses]
        )
        joining = [
            engine.connect_weights.remote(addresses, 1 + number * self.ranks_per_engine, receivers + 1)
            for number, engine in enumerate(self.engines)
        ]
        pending.beside(joining, self.names).results()

    def sync(self, version: str) -> SyncReport:
        """Give every engine the policy's weights as ``version``. Requests in flight are frozen meanwhile.

        Raises WeightSyncError, with all engines left paused, when a checksum differs; DistributedError when a rank or
        engine fails or the phase outlives its deadline.
        """
        began = time.perf_counter()
        self._all("pause")
        transfer = time.perf_counter()
        pending = self.policy.group.start("send_weights", phase="sync weights")
        updating = [engine.update_weights.remote(self.metadata, version) for engine in self.engines]
        results = pending.beside(updating, self.names).results()
        transfer_seconds = time.perf_counter() - transfer
        sent = results[: len(self.policy.group)]
        for name, workers in zip(self.names, self._all("weight_checksums"), strict=True):
            for worker, received in enumerate(workers):
                if received != sent:
                    raise WeightSyncError(
                        f"{name}, worker {worker}: checksums {received} are not those sent, {sent}; version {version} "
                        "is not published and no engine generates: start the run again from its last checkpoint"
                    )
        self.publish(version)
        self._all("resume")
        self.syncs += 1
        return SyncReport(version, self.nbytes, time.perf_counter() - began, transfer_seconds)

    def _all(self, method: str) -> list[Any]:
        """A call of every engine."""
        references = [getattr(engine, method).remote() for engine in self.engines]
        return ray.get(references, timeout=self.policy.group.timeout_s)
