"""Sync of an adapter alone into a live engine: as many tensors as expert adapters of Qwen3-30B-A3B have.

    python benchmarks/run.py adapter_sync [--rounds 5] [--layers 48] [--experts 128] [--tensor-parallel 1]

A Megatron rank sends, one vLLM engine receives, on this machine; 48 layers of 128 experts of small sizes, so that the
number of tensors is what costs. In one run, in turns: the median of syncs without their probe, by buckets that every
worker gets and by the plan, where each gets its own bytes alone; and the fastest of as many raw broadcasts of the
bytes of buckets. Wanted: at most 20 ms + the bytes at the rate of the raw broadcast + 2 µs a tensor, as engines count
them (A and B of every projection of every expert); by the plan at most 1.05 times a worker's own bytes. On a machine
that is busy with other work the processor time of all processes, counted in ticks of 10 ms and averaged over the
rounds, says what a sync costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from benchmarks.weight_sync import Rank, broadcast  # noqa: E402  # after the environment

RANK = 16
SIZES = dict(hidden_size=64, moe_intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
FIXED_S, PER_TENSOR_S = 0.020, 2e-6


@dataclass(frozen=True)
class Way:
    """Syncs by buckets or by the plan: medians over the rounds."""

    phases: dict[str, float]
    """From the first pause to the last resume, probe apart."""
    fastest: float
    """Seconds of the fastest round."""
    processor: dict[str, float]
    """Processor seconds of a round, by process; means."""
    received: int
    """Bytes that each worker receives, at most."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class AdapterSync:
    buckets: Way
    planned: Way
    own: int
    """Bytes of factors that the worker of ``planned.received`` has a place for, each once."""
    sent: int
    """Tensors that travel."""
    tensors: int
    """Tensors as engines count them: two for each projection of each expert."""
    raw_seconds: float
    """The fastest raw broadcast of the bytes of buckets."""

    @property
    def wanted(self) -> float:
        """Seconds that a sync may take."""
        return FIXED_S + self.raw_seconds + PER_TENSOR_S * self.tensors


def trainer(pipe: Any, bucket_bytes: int) -> None:
    """Answer the calls of ``workers/sync_calls.py`` with the adapters of a folder's model in one Megatron rank."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.weight_sync.sender import WeightSender
    from skyrl_megatron.weight_sync.transport import open_transport
    from skyrl_megatron_lora.attach import attach
    from skyrl_megatron_lora.layers import AdapterSettings
    from skyrl_megatron_lora.source import AdapterSource
    from skyrl_megatron_lora.targets import select

    torch.set_num_threads(1)
    megatron_patches.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = parallel_state.initialize(ParallelConfig(world_size=1))
    address: tuple[str, int] = ("", 0)
    sender: Any = None
    while (job := pipe.recv()) is not None:
        method, *arguments = job
        answer: Any = None
        if method == "load":
            model = build_model(arguments[0], groups, dtype=torch.bfloat16)
            selection = select(model.hf.plan, "all-linear")
            adapters = attach(model, groups, selection, AdapterSettings(RANK, 2 * RANK, 0.0, "kaiming"))
            sender = WeightSender(AdapterSource({"": adapters}, groups), bucket_bytes=bucket_bytes)
        elif method == "metadata":
            answer = list(sender.metadata())
        elif method == "holdings":
            answer = sender.source_map()
        elif method == "route":
            sender.set_transfers(*arguments)
        elif method == "listen":
            answer = address = sender.listen("127.0.0.1")
        elif method == "connect":
            sender.connect(*address, *arguments)
        elif method == "join":
            answer = sender.join(*arguments)
        elif method == "send":
            answer = sender.send()
        elif method == "broadcast":
            host, port, nbytes = arguments
            transport = open_transport(sender.transport_name, host, port, 1, 2, 60.0, None)
            answer = broadcast(transport, nbytes, bucket_bytes)
        pipe.send(answer)


def _processor_seconds(trainer: int) -> dict[str, float]:
    """Return the processor seconds of this process, the trainer's and the engine's so far."""
    import psutil

    found: dict[str, float] = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            name = {os.getpid(): "driver", trainer: "trainer"}.get(process.pid, "engine")
            found[name] = found.get(name, 0.0) + times.user + times.system
    return found


async def _syncs(
    folder: Path, rank: Rank, trainer: int, rounds: int, bucket_bytes: int, workers: int
) -> tuple[dict[bool, Way], int, int]:
    """Return what syncs cost, by whether they go by the plan, the own bytes of a worker, and tensors of engines."""
    from bridges.plan import Plan
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.workers import weight_synchronizer
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer
    from skyrl_megatron_lora.targets import select
    from skyrl_megatron_lora.tensors import SentPairs, adapter_pairs, adapter_slots

    weight_synchronizer.is_due = lambda *_: False  # type: ignore[attr-defined]  # the probe is measured apart
    hf = json.loads((folder / "config.json").read_text())
    of_model = Plan.of(hf)
    pairs = {"": adapter_pairs(of_model, select(of_model, "all-linear"), RANK, RANK)}
    settings = EngineSettings(
        str(folder),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_bytes=64 << 20,
        tensor_parallel_size=workers,
        adapters=adapter_slots(pairs),
    )
    pool = EnginePool([lambda: VLLMEngine(settings)])
    await pool.start()
    for slot in pool.slots:
        slot.verified = True  # a probe is due for what was never verified
    try:
        rank.ask("load", str(folder))
        ranks: list[Any] = [rank]
        options: dict[str, Any] = dict(
            hf_config=hf, dtype="bfloat16", bucket_sizes=(bucket_bytes,), adapters=SentPairs(pairs)
        )
        ways = {}
        for planned in (False, True):
            synchronizer = WeightSynchronizer(pool, ranks, reshard=planned, **options)
            await synchronizer.sync(f"first {planned}")
            before, found = _processor_seconds(trainer), []
            for number in range(rounds):
                report = await synchronizer.sync(f"{number} {planned}")
                found.append(dict(report.seconds))
            after = _processor_seconds(trainer)
            phases = {phase: statistics.median(each[phase] for each in found) for phase in found[0]}
            fastest = min(sum(each.values()) for each in found)
            spent = {name: (after[name] - before[name]) / rounds for name in after}
            plan = synchronizer.plan
            assert (plan is not None) == planned
            received = report.nbytes if plan is None else max(each.nbytes for each in plan.reshard.workers)
            ways[planned] = Way(phases, fastest, spent, received)
        assert plan is not None
        (needed,) = synchronizer.planner._recorded.values()
        itemsize = [meta.torch_dtype.itemsize for meta in plan.tensors]
        own = max(
            sum(rows * columns * itemsize[tensor] for tensor, _, _, rows, _, columns, *_ in route.copies.tolist())
            for route in needed
        )
    finally:
        await pool.shutdown()
    return ways, own, sum(2 * (pair.experts or 1) for pair in pairs[""].values())


def measure(*, layers: int = 48, experts: int = 128, rounds: int = 5, workers: int = 1) -> AdapterSync:
    """Sync the adapter of a model of so many layers and experts to an engine of ``workers`` (tensor parallel), each
    way ``rounds`` times after a first one."""
    from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES
    from skyrl_megatron.weight_sync.transport import default_transport, listen, open_transport
    from tests.support.tiny_models import write_tiny_model

    bucket_bytes = DEFAULT_BUCKET_BYTES
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=trainer, args=(theirs, bucket_bytes))
    process.start()
    rank = Rank(pipe)
    try:
        with tempfile.TemporaryDirectory() as root:
            sizes = SIZES | dict(num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=2)
            folder = write_tiny_model("qwen3_moe", Path(root) / "model", dtype="bfloat16", **sizes)
            assert process.pid is not None
            work = _syncs(folder, rank, process.pid, rounds, bucket_bytes, workers)
            ways, own, tensors = asyncio.run(work)
            nbytes = ways[False].received
            sent = len(rank.ask("metadata"))
        raw = []
        for _ in range(rounds):
            listener = listen("127.0.0.1")
            port = listener.getsockname()[1]
            pipe.send(("broadcast", "127.0.0.1", port, nbytes))
            ours = open_transport(default_transport(), "127.0.0.1", port, 0, 2, 60.0, listener)
            raw.append(broadcast(ours, nbytes, bucket_bytes))
            pipe.recv()
    finally:
        pipe.send(None)
        process.join(10)
    return AdapterSync(ways[False], ways[True], own, sent, tensors, min(raw))  # the fastest, as the stricter limit


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="workers of the engine")
    args = parse(parser, rounds=1, layers=2, experts=8)
    found = measure(layers=args.layers, experts=args.experts, rounds=args.rounds, workers=args.tensor_parallel)
    print(f"{found.tensors:,} tensors of engines, sent as {found.sent:,}")
    print(f"raw broadcast       {found.raw_seconds * 1e3:7.1f} ms")
    for name, way in (("buckets", found.buckets), ("planned", found.planned)):
        print(f"by {name}: {way.received / 1e6:.1f} MB to a worker")
        print(f"  sync, probe apart {way.seconds * 1e3:7.1f} ms (wanted: at most {found.wanted * 1e3:.1f})")
        print("    " + ", ".join(f"{phase} {value * 1e3:.1f}" for phase, value in way.phases.items()))
        print(f"  fastest round     {way.fastest * 1e3:7.1f} ms")
        spent = ", ".join(f"{process} {value * 1e3:.0f}" for process, value in way.processor.items())
        print(f"  processor time    {sum(way.processor.values()) * 1e3:7.1f} ms a sync ({spent})")
    planned, buckets, own = found.planned, found.buckets, found.own
    print(f"planned / buckets: {planned.seconds / buckets.seconds:.2f} of the time")
    print(f"by the plan a worker receives {planned.received / own:.3f}x its own bytes (wanted: at most 1.05)")


if __name__ == "__main__":
    main()
