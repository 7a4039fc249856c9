"""Ranks of trainers of any layout, one after the other in one process: Megatron models with a folder's weights, in
process groups that nothing travels in. What each holds is kept.

    python -m tests.weight_sync.trainer_ranks JOB

JOB is a pickle of (HF folder, {name: (ranks, layout)}); in its place comes {name: what each rank holds}.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any


def held(folder: Path, world: int, layout: dict[str, Any], rank: int) -> tuple[Any, list[Any]] | str:
    """What a rank holds: (SourceMap, memory of its shards), or why a reshard plan is unsupported."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.weight_sync.megatron_source import MegatronWeightSource
    from skyrl_megatron.weight_sync.slices import ReshardUnsupported, SourceMap
    from tests.training.bodies import config

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group, changed = dist.new_group, dist
    changed.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")  # type: ignore[assignment]
    try:
        engine = MegatronEngine(config(folder, world=world, **layout))
        load_hf(engine.model, folder, engine.groups)
        shards, own = MegatronWeightSource(engine.model, engine.groups).local_shards()
        return SourceMap.of(shards, own), [shard.local.detach().clone() for shard in shards]
    except ReshardUnsupported as error:
        return str(error)
    finally:
        from megatron.core import parallel_state

        changed.new_group = new_group  # type: ignore[assignment]
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(job: str) -> None:
    import torch

    torch.set_num_threads(1)
    folder, layouts = pickle.loads(Path(job).read_bytes())
    found = {
        name: [held(folder, world, layout, rank) for rank in range(world)] for name, (world, layout) in layouts.items()
    }
    Path(job).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
