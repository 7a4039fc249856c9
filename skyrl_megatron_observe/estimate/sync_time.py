"""Seconds of a weight sync on paper, for each way that weights take to the engines.

The bytes are those of the reshard plan (``reshard_plan.py``): each worker receives the elements that it needs once,
and replicas share the sending. Without a plan every worker receives all weights. Receiving and packing overlap; the
first bucket is filled, and the last one loaded, alone.
"""

from __future__ import annotations

from dataclasses import dataclass

BUSIEST = 1.008
"""Bytes that the busiest rank sends, over the average (``benchmarks/reshard_plan.py``)."""
FIXED_S = 0.02
"""Calls, checksums' comparison and version of a sync, in seconds, whatever its size."""
ROUND_S = 0.2e-3
"""Seconds of a round of the exchange, in which ranks swap one half of a bucket."""
PER_TENSOR_S = 18.5e-6
"""Kernel launches of both sides per tensor, in seconds, as measured on an H200."""
WITHIN_GPU = 83e9
"""Bytes/s from a rank into the worker on its GPU: packing, checksums and loading, as measured on an H200 without the
cost per tensor."""


@dataclass(frozen=True, slots=True)
class SyncSizes:
    """What a sync moves."""

    received: float
    """Bytes that a worker receives."""
    sent: float
    """Bytes that the busiest rank sends."""
    tensors: int
    """Tensors, or parts of them, that a worker receives."""
    bucket: int
    """Bytes of a bucket."""
    away: float = 0.0
    """Share of ``received`` that comes from other nodes. What all nodes hold is a small part, and counted with it."""


@dataclass(frozen=True, slots=True)
class SyncTime:
    """Seconds of a sync by what limits them. They add up to :attr:`total`."""

    network: float
    copies: float
    fixed: float

    @property
    def total(self) -> float:
        """Return the seconds of the sync."""
        return self.network + self.copies + self.fixed


def share_away(nodes: int, replicas: int) -> float:
    """Return the share of its experts that a worker gets from other nodes, if ranks exchange them.

    A worker takes what a rank of its node holds from there. Each of ``nodes`` nodes holds an equal share; with
    ``replicas`` of every expert in different nodes, that many times as much.
    """
    return max(1.0 - replicas / nodes, 0.0)


def over_network(sizes: SyncSizes, rate: float, packing: float, fixed: float = FIXED_S) -> SyncTime:
    """Return the seconds between ranks and workers on different GPUs. ``rate``: bytes/s of a rank or worker;
    ``packing``: bytes/s into and out of buckets; ``fixed``: seconds whatever the size."""
    wire, packed = max(sizes.received, sizes.sent) / rate, sizes.received / packing
    return SyncTime(
        wire,
        max(packed - wire, 0.0),
        fixed + sizes.tensors * PER_TENSOR_S + 2 * sizes.bucket / rate,
    )


def on_shared_gpus(sizes: SyncSizes, rate: float, copies: float = WITHIN_GPU) -> SyncTime:
    """Return the seconds on GPUs that ranks and workers share: ranks exchange over the network what comes from other
    nodes, at ``rate`` bytes/s, and pass it on in shared memory, at ``copies`` bytes/s."""
    far = sizes.received * sizes.away
    rounds = far / (sizes.bucket / 2)
    fixed = FIXED_S + sizes.tensors * PER_TENSOR_S + rounds * ROUND_S + 2 * sizes.bucket / rate
    return SyncTime(far / rate, sizes.received / copies, fixed)
