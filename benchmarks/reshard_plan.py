"""Joining the plan of a sync by the reshard plan, for as many tensors and workers as a large run has; nothing travels.

    python benchmarks/run.py reshard_plan [--tensors 50000] [--workers 64]

A mixture-of-experts model whose experts are matrices of their own, held by a trainer of tp 4, ep 8 and two pipeline
stages (64 ranks; every expert on four of them, each quarter of another matrix on eight), and needed by workers in two
ways: engines of tp 8, and one engine of tp 64.
Tables are made beforehand, as ranks and workers bring them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HIDDEN, FFN, EXPERTS, DENSE = 4096, 1536, 256, 8
BUCKET_BYTES = 16 << 20


def tables(count: int, workers: int, degree: int):  # type: ignore[no-untyped-def]
    """(tensors, source maps of all ranks, target maps of all workers)."""
    from skyrl_megatron.weight_sync.buckets import TensorMeta
    from skyrl_megatron.weight_sync.slices import SourceMap, TargetMap

    per_layer = 3 * EXPERTS + DENSE
    tensors, tiles = [], [[] for _ in range(64)]  # type: ignore[var-annotated]
    copies: list[list[tuple[int, ...]]] = [[] for _ in range(degree)]
    targets = []
    for number in range(count):
        layer, place = divmod(number, per_layer)
        expert, kind = divmod(place - DENSE, 3)
        down = place >= DENSE and kind == 2
        rows, columns = (HIDDEN, FFN) if down else (FFN, HIDDEN) if place >= DENSE else (HIDDEN, HIDDEN)
        tensors.append(TensorMeta(f"{layer}.{place}", "bfloat16", (rows, columns), position=number))
        for rank in range(64):  # stage, replica, ep, tp: experts are whole on one ep rank, others split over tp
            stage, ep, tp = rank // 32, rank // 4 % 8, rank % 4
            if stage != layer % 2 or (place >= DENSE and ep != expert % 8):
                continue
            if place >= DENSE:
                tiles[rank].append((number, 0, rows, 0, columns, number, 0, 1))
            else:
                tiles[rank].append((number, tp * rows // 4, rows // 4, 0, columns, number, 0, 1))
        targets.append((f"{layer}.{place}", "weight", "bfloat16", rows * columns // degree, -1))
        for part in range(degree):
            if down:
                each = columns // degree
                copies[part].append((number, number, 0, rows, part * each, each, 0, each, 1))
            else:
                each = rows // degree
                copies[part].append((number, number, part * each, each, 0, columns, 0, columns, 1))
    source_maps = [SourceMap(tensors, np.array(each, np.int64).reshape(-1, 8)) for each in tiles]
    target_maps = [TargetMap(targets, np.array(each, np.int64)) for each in copies]
    return tensors, source_maps, [target_maps[worker % degree] for worker in range(workers)]


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=64)
    args = parse(parser, tensors=500, workers=8)
    from skyrl_megatron.weight_sync.reshard_plan import plan_reshard

    for degree in (8, args.workers):
        tensors, source_maps, target_maps = tables(args.tensors, args.workers, degree)
        began, computing = time.perf_counter(), time.process_time()
        plan = plan_reshard(tensors, source_maps, target_maps, BUCKET_BYTES)
        seconds, computing = time.perf_counter() - began, time.process_time() - computing
        copies = sum(len(transfers.copies) for transfers in plan.workers)
        own = sum(int((r.copies[:, 3] * r.copies[:, 5]).sum()) * 2 for r in target_maps)
        sent = [transfers.nbytes for transfers in plan.ranks if transfers.nbytes]
        received = sum(transfers.nbytes for transfers in plan.workers) / own
        print(f"{args.tensors} tensors × {args.workers} workers of tp {degree}: {copies} copies")
        print(f"  joined in            {seconds:7.2f} s, of which {computing:.2f} computing (wanted: 2)")
        print(f"  bytes received       {received:7.4f} × own (wanted: at most 1.05)")
        print(f"  busiest rank sends   {max(sent) * len(sent) / sum(sent):7.3f} × the average")


if __name__ == "__main__":
    main()
