"""Seconds of a weight sync by the plan on machines that are not at hand: 400 Gb/s of network for each GPU.

    python benchmarks/weight_sync_on_paper.py [--gbits 400] [--efficiency 0.8]

What is counted: the bytes that each engine worker needs (experts by expert or tensor parallelism, attention,
embeddings and the output layer by tensor parallelism, routers, norms and what MLA keeps whole on each), the bytes that
the busiest trainer rank sends, packing, and a fixed cost (``estimate/sync_time.py``). What is assumed:
``--efficiency`` of the line rate, copies of 1 TB/s on a GPU and of 83 GB/s through shared memory, 20 ms.
``weight_sync.py`` prints what the same formula says of its own machine beside what it measured there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from skyrl_megatron_observe.estimate.sync_time import BUSIEST, SyncSizes, on_shared_gpus, over_network, share_away

BF16 = 2
PACKING = 1e12
"""Bytes/s of copies into and out of buckets."""


@dataclass(frozen=True)
class Shape:
    """A mixture-of-experts model, by its parameters."""

    layers: int
    dense_layers: int
    hidden: int
    experts: int
    ffn: int
    shared_ffn: int
    dense_ffn: int
    vocabulary: int
    split_attention: int
    """Of a layer, what tensor parallelism splits."""
    whole_attention: int = 0

    def of_worker(self, tensor: int, expert: int) -> float:
        """Parameters that a worker needs; experts are split ``expert`` ways, the rest ``tensor`` ways."""
        sparse = self.layers - self.dense_layers
        experts = sparse * self.experts * 3 * self.hidden * self.ffn / expert
        mlp = 3 * self.hidden * (sparse * self.shared_ffn + self.dense_layers * self.dense_ffn) / tensor
        attention = self.layers * (self.split_attention / tensor + self.whole_attention)
        rest = self.layers * 2 * self.hidden + sparse * self.experts * self.hidden
        return experts + mlp + attention + rest + 2 * self.vocabulary * self.hidden / tensor


def grouped(hidden: int, heads: int, groups: int, size: int) -> int:
    """Parameters of attention with grouped queries."""
    return 2 * hidden * heads * size + 2 * hidden * groups * size


def latent(heads: int) -> tuple[int, int]:
    """Parameters of multi-head latent attention as in DeepSeek-V3, (split, whole)."""
    return 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * 7168, 7168 * 1536 + 7168 * 576


MODELS = {
    "30B  (Qwen3-30B-A3B)": Shape(48, 0, 2048, 128, 768, 0, 0, 151936, grouped(2048, 32, 4, 128)),
    "235B (Qwen3-235B-A22B)": Shape(94, 0, 4096, 128, 1536, 0, 0, 151936, grouped(4096, 64, 4, 128)),
    "671B (DeepSeek-V3)": Shape(61, 3, 7168, 256, 2048, 2048, 18432, 129280, *latent(128)),
    "1T   (Kimi K2)": Shape(61, 1, 7168, 384, 2048, 2048, 18432, 163840, *latent(64)),
}
RUNS = {  # trainer GPUs, engines, tensor parallelism, expert parallelism of an engine
    "30B  (Qwen3-30B-A3B)": (16, 2, 8, 8),
    "235B (Qwen3-235B-A22B)": (64, 8, 8, 8),
    "671B (DeepSeek-V3)": (256, 4, 8, 32),
    "1T   (Kimi K2)": (256, 4, 8, 32),
}


COLOCATED = {  # GPUs, nodes, tensor parallelism, pipeline stages of an engine, replicas of a rank's experts, wanted
    "30B  (Qwen3-30B-A3B)": (16, 2, 2, 1, 2, 0.5),
    "235B (Qwen3-235B-A22B)": (64, 8, 16, 1, 1, 2.7),
    "671B (DeepSeek-V3)": (128, 16, 16, 4, 1, 7.7),
    "1T   (Kimi K2)": (256, 32, 16, 8, 1, 6.0),
}
"""As the recipes have it: trainer and engines on the same GPUs, ranks exchange what is for the engines on theirs."""
SHARED_BUCKET = 64 << 20
"""Bytes of a bucket there (``weight_bucket_sizes`` in ``config/roles.py``)."""


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbits", type=float, default=400.0, help="of network for each GPU")
    parser.add_argument("--efficiency", type=float, default=0.8, help="of the line rate that transfers reach")
    args = parse(
        parser,
    )
    rate, bucket_bytes = args.gbits / 8 * 1e9 * args.efficiency, 256 << 20
    reached, size = f"{args.efficiency:.0%} of it reached", f"buckets of {bucket_bytes >> 20} MiB"
    print(f"{args.gbits:g} Gb/s for each GPU, {reached}, {size}, bfloat16")
    print(f"{'':24s}parameters  trainer  workers  received     sent  by the plan  buckets for all")
    for name, shape in MODELS.items():
        ranks, engines, tensor, expert = RUNS[name]
        workers = engines * max(tensor, expert)
        received = shape.of_worker(tensor, expert) * BF16
        sent = received * workers / ranks * BUSIEST
        routed = over_network(SyncSizes(received, sent, 0, bucket_bytes), rate, PACKING).total
        whole = shape.of_worker(1, 1) * BF16
        for_all = over_network(SyncSizes(whole, whole / ranks, 0, bucket_bytes), rate, PACKING).total
        print(
            f"{name:24s}{shape.of_worker(1, 1) / 1e9:9.0f} B {ranks:8d} {workers:8d} {received / 1e9:6.1f} GB "
            f"{sent / 1e9:5.1f} GB {routed:8.2f} s {for_all:8.2f} s"
        )
    size = f"buckets of {SHARED_BUCKET >> 20} MiB"
    print(f"\ncolocated, as the recipes have it: ranks exchange, then shared memory, {size}")
    print(f"{'':24s}  GPUs   nodes   received   network   copies    fixed      all   wanted")
    for name, (gpus, nodes, tensor, stages, replicas, wanted) in COLOCATED.items():
        received = MODELS[name].of_worker(tensor, tensor) * BF16 / stages
        sizes = SyncSizes(received, received, 0, SHARED_BUCKET, share_away(nodes, replicas))
        took = on_shared_gpus(sizes, rate)
        terms = "".join(f"{part:7.2f} s" for part in (took.network, took.copies, took.fixed))
        print(f"{name:24s}{gpus:6d} {nodes:7d} {received / 1e9:7.1f} GB {terms} {took.total:6.2f} s  {wanted:g} s")


if __name__ == "__main__":
    main()
