"""What a machine reaches of its published peaks, with the uncertainty of each share.

A share is (low, likely, high). They are fitted to this project's measurements on an H200 (``benchmarks/RESULTS.md``,
"One GPU") and to the published steps of ``benchmarks/published_steps.yaml``; those of several GPUs to those alone.
A CPU has no published peak: :meth:`Machine.of_cpu` measures one core for a few milliseconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from skyrl_megatron.config.hardware import GPU_TYPES


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration with its uncertainty: ``low`` ≤ ``likely`` ≤ ``high``, in seconds."""

    low: float = 0.0
    likely: float = 0.0
    high: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, factor: float) -> Seconds:
        """Multiply by a factor of at least 0."""
        return Seconds(self.low * factor, self.likely * factor, self.high * factor)

    def or_longer(self, other: Seconds) -> Seconds:
        """Return the longer of two durations that overlap."""
        return Seconds(max(self.low, other.low), max(self.likely, other.likely), max(self.high, other.high))

    def minus(self, other: Seconds) -> Seconds:
        """Subtract a part of this, bound by bound."""
        return Seconds(self.low - other.low, self.likely - other.likely, self.high - other.high)

    def excess(self, other: Seconds) -> Seconds:
        """Return what this lasts longer than ``other``, which overlaps it; at least 0."""
        most = self.or_longer(other)
        return Seconds(most.low - other.low, most.likely - other.likely, most.high - other.high)

    def shorter(self, other: Seconds) -> Seconds:
        """Return the shorter of two durations."""
        return Seconds(min(self.low, other.low), min(self.likely, other.likely), min(self.high, other.high))


NONE = Seconds()
Share = tuple[float, float, float]

TRAINING: Share = (0.36, 0.50, 0.62)
"""Of the FLOP/s, products of a trainer. Published splits of dense models: 42 % with what passes between them."""
ELEMENTWISE: Share = (0.40, 0.60, 0.80)
"""Of the memory's bandwidth, what passes between products: norms, activations, permutation of tokens, residuals."""
PREFILL: Share = (0.25, 0.40, 0.55)
"""Of the FLOP/s, prompts in an engine."""
DECODE: Share = (0.20, 0.40, 0.60)
"""Of the FLOP/s, products of a decode step."""
MEMORY: Share = (0.60, 0.80, 0.90)
"""Of the memory's bandwidth, weights and KV cache of a decode step."""
OPTIMIZER: Share = (0.20, 0.30, 0.60)
"""Of the memory's bandwidth, Adam with gradient norm. Measured: 27 and 35 %."""
NVLINK: Share = (0.50, 0.70, 0.85)
NETWORK: Share = (0.40, 0.65, 0.85)
HOST_LINK: Share = (0.40, 0.70, 0.85)
PARAMETER_BYTES = 34
"""Memory traffic of Adam per parameter: fp32 gradient twice, master and two moments read and written, bf16 weight."""


def _seconds(work: float, peak: float, share: Share) -> Seconds:
    low, likely, high = share
    return Seconds(work / peak / high, work / peak / likely, work / peak / low)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of a GPU, or of the process of a CPU run, and of its links. Bytes/s are of one direction."""

    name: str
    flops: float
    """bf16 FLOP/s; of a CPU: fp32."""
    fp32: float
    memory: float
    nvlink: float
    network: float
    host: float
    per_node: int
    """Ranks that NVLink connects: of a node, or of a rack."""
    host_adam: Seconds = Seconds(1 / 3.0e9, 1 / 1.35e9, 1 / 0.6e9)
    """Seconds per parameter that a rank updates on the host. Measured with one thread: 1.35 G/s."""
    launch: Seconds = Seconds(0.5e-3, 1.0e-3, 1.7e-3)
    """Kernel launches of a layer's forward pass from Python, about a hundred of 10 µs."""
    exchange_launch: Seconds = Seconds(4e-3, 7e-3, 10e-3)
    """The same of a layer whose ranks exchange experts' tokens: sizes go to the host before the exchange. Published:
    6.5 to 7 ms in two splits, with micro-batches of 4,096 tokens."""
    fused_exchange_launch: Seconds = Seconds(1.2e-3, 2.2e-3, 7e-3)
    """The same with ``moe_token_dispatcher_type=flex``. Published: below 2 ms in tuned training, 6.5 ms in a step."""
    layer_step: Seconds = Seconds(50e-6, 80e-6, 130e-6)
    """Kernels of a layer in a decode step that take no shorter, however small the batch."""
    step_overhead: Seconds = Seconds(0.7e-3, 1.5e-3, 3e-3)
    """Scheduling and sampling of a decode step."""
    token_overhead: Seconds = Seconds(3e-6, 8e-6, 2e-5)
    """Work of the engine's process on a sampled token."""
    request_overhead: Seconds = Seconds(0.1e-3, 0.3e-3, 1.0e-3)
    """Work of the engine's process on a request. Measured on a CPU: 1.1 ms."""
    switch: Seconds = Seconds(1.0, 3.0, 6.0)
    """Engines sleep and wake, ranks return cached memory: a step with ``colocate_all``."""

    sync_copies: Share = (30e9, 83e9, 200e9)
    """Bytes/s of a weight sync from a rank into the worker on its GPU. Measured: 83 GB/s without the calls."""

    @classmethod
    def of_gpu(cls, kind: str, per_node: int) -> Machine:
        """Return the machine of a key of ``GPU_TYPES``."""
        gpu = GPU_TYPES[kind]
        return cls(kind, gpu.flops, gpu.fp32, gpu.memory, gpu.nvlink, gpu.network, gpu.host, max(per_node, gpu.linked))

    @classmethod
    def of_cpu(cls) -> Machine:
        """Measure a core of this machine: a product of matrices and a copy, for about 20 ms."""
        import torch

        threads = max(torch.get_num_threads(), 1)
        a, b = torch.ones(384, 384), torch.empty(1 << 22)
        flops = 2 * 384**3 / _fastest(lambda: a @ a) / threads
        copied = 2 * b.nbytes / _fastest(lambda: b.clone()) / threads
        slow = Seconds(0.5e-3, 1.5e-3, 5e-3)
        return cls(
            "one core of this CPU",
            flops,
            flops,
            copied,
            copied / 2,
            copied / 2,
            copied / 2,
            per_node=1 << 30,
            host_adam=Seconds(1 / 1.5e9, 1 / 1.0e9, 1 / 0.3e9),
            launch=slow,
            exchange_launch=slow,
            fused_exchange_launch=slow,
            layer_step=Seconds(20e-6, 0.2e-3, 0.5e-3),
            step_overhead=Seconds(2e-3, 6e-3, 2e-2),
            token_overhead=Seconds(2e-5, 1e-4, 5e-4),
            request_overhead=Seconds(0.5e-3, 1.1e-3, 3e-3),
            switch=Seconds(0.0, 0.1, 1.0),
            sync_copies=(0.4e9, 1.4e9, 3e9),
        )

    # ------------------------------------------------------------------ work of a rank
    def train(self, flops: float, width: int) -> Seconds:
        """Return the seconds of a pass of a trainer. ``width``: bytes per element."""
        return _seconds(flops, self._peak(width), TRAINING)

    def elementwise(self, nbytes: float) -> Seconds:
        """Return the seconds of what a trainer's pass reads and writes between its products."""
        return _seconds(nbytes, self.memory, ELEMENTWISE)

    def prefill(self, flops: float, width: int) -> Seconds:
        """Return the seconds of prompts in an engine."""
        return _seconds(flops, self._peak(width), PREFILL)

    def decode(self, flops: float, width: int) -> Seconds:
        """Return the seconds of a decode step's products."""
        return _seconds(flops, self._peak(width), DECODE)

    def _peak(self, width: int) -> float:
        return self.flops if width == 2 else self.fp32

    def read(self, nbytes: float) -> Seconds:
        """Return the seconds of reading weights and KV cache."""
        return _seconds(nbytes, self.memory, MEMORY)

    def adam(self, parameters: float) -> Seconds:
        """Return the seconds of updating parameters in device memory."""
        return _seconds(parameters * PARAMETER_BYTES, self.memory, OPTIMIZER)

    def to_host(self, nbytes: float) -> Seconds:
        """Return the seconds of a copy between device and host memory."""
        return _seconds(nbytes, self.host, HOST_LINK)

    # ------------------------------------------------------------------ links
    def across(self, extent: int, nbytes: float) -> Seconds:
        """Return the seconds in which a rank sends ``nbytes`` around a group of ``extent`` consecutive ranks: the
        slowest link of a ring is the network if the group is on several nodes."""
        if extent <= 1:
            return NONE
        if extent <= self.per_node:
            return _seconds(nbytes, self.nvlink, NVLINK)
        return _seconds(nbytes, self.network, NETWORK)

    def exchanged(self, extent: int, size: int, nbytes: float) -> Seconds:
        """Return the seconds in which a rank sends ``nbytes`` to all ``size`` ranks of a group in equal parts; the
        group is spread over ``extent`` consecutive ranks."""
        if size <= 1:
            return NONE
        inside = min(self.per_node * size // extent or 1, size) if extent > self.per_node else size
        near = _seconds(nbytes * (inside - 1) / size, self.nvlink, NVLINK)
        return near.or_longer(_seconds(nbytes * (size - inside) / size, self.network, NETWORK))

    def sent_once(self, extent: int, size: int, nbytes: float, chosen: int) -> Seconds:
        """Return the seconds in which a rank sends its tokens, ``nbytes`` in all, to the ranks of ``chosen`` experts
        each: once to a rank, and over the network once to a node. See :meth:`exchanged`."""

        def met(places: int) -> float:  # other places that a token reaches
            return (places - 1) * (1 - (1 - 1 / places) ** chosen)

        nodes = max(extent // self.per_node, 1)
        near = _seconds(nbytes * met(max(size // nodes, 1)), self.nvlink, NVLINK)
        return near.or_longer(_seconds(nbytes * met(nodes), self.network, NETWORK))

    def latency(self, size: int) -> Seconds:
        """Return the seconds of a small collective of consecutive ranks."""
        if size <= 1:
            return NONE
        return Seconds(7e-6, 1.5e-5, 3e-5) if size <= self.per_node else Seconds(4e-5, 8e-5, 1.5e-4)


def _fastest(call: object) -> float:
    assert callable(call)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)
