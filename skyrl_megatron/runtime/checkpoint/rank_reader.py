"""One rank's share of a load: weights, its ranges of the optimizer, schedule and random states, at any layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from skyrl_megatron.runtime.checkpoint import rng
from skyrl_megatron.runtime.checkpoint.local_state import OPTIMIZER_PREFIX, Block, blocks_to_load
from skyrl_megatron.runtime.checkpoint.manifest import read_manifest, read_verified
from skyrl_megatron.runtime.checkpoint.merge import STATE
from skyrl_megatron.runtime.checkpoint.optimizer_state import finish_load, owned_ranges, set_step_count
from skyrl_megatron.runtime.checkpoint.rank_writer import RankState
from skyrl_megatron.runtime.checkpoint.reader import RoleReader
from skyrl_megatron.runtime.checkpoint.storage import Storage, open_storage


def agree[T](work: Callable[[], T]) -> list[T]:
    """Return the results of ``work()``, by rank. When it fails anywhere, raises CheckpointError on every rank,
    so that none is left waiting for another."""
    try:
        mine: tuple[Any, str | None] = (work(), None)
    except (CheckpointError, OSError) as error:
        mine = (None, str(error))
    except Exception as error:
        mine = (None, f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for _, failure in everyone:
        if failure is not None:
            raise CheckpointError(failure)
    return [value for value, _ in everyone]


def read_rank(folder: str, role: str, state: RankState, *, seed: int) -> int:
    """Fill ``state`` from a checkpoint folder; every rank of the role calls it. Returns the checkpoint's step.

    With an optimizer of None the stored optimizer is passed over. At another layout than the one that saved, random
    states are derived from (``seed``, step), with a warning. Every byte is compared with the manifest before it is
    used. Raises CheckpointError, on all ranks, when anything is missing, damaged or unexpected; weights may have been
    overwritten in part by then.
    """
    storage = open_storage(folder)
    reader: RoleReader
    blocks: list[Block]
    ranges: list[Any]

    def prepare() -> tuple[set[str], set[str]]:
        nonlocal reader, blocks, ranges
        manifest = read_manifest(storage, storage.root)
        reader = RoleReader(storage, storage.root, manifest, role)
        _refuse_other_base(folder, manifest.bases.get(role), state.base)
        reader.common_state()
        ranges = list(owned_ranges(state.optimizer))
        blocks = list(blocks_to_load(state.model_chunks, ranges, state.groups))
        return {block.key for block in blocks}, set(reader.tensors)

    keys = agree(prepare)
    _refuse_unread(set().union(*(wanted for wanted, _ in keys)), keys[0][1], folder, state)

    def fill() -> int:
        with torch.no_grad():
            reader.load(blocks)
            for each in ranges:
                if each.put_back is not None:
                    each.put_back(each.tensors)
        return _restore_counters(storage, storage.root, role, state, seed)

    return agree(fill)[0]


def _refuse_other_base(folder: str, saved: str | None, ours: str | None) -> None:
    """Raise CheckpointError where adapters would be added to other weights, or are none."""
    if saved == ours:
        return
    if saved is None:
        reason = "holds weights, not adapters: set trainer.policy.model.lora.rank=0"
    elif ours is None:
        reason = "holds adapters: set trainer.policy.model.lora.rank to theirs"
    else:
        reason = "holds adapters of another base model: set trainer.policy.model.path to the one they were trained on"
    raise CheckpointError(f"{folder} {reason}, or trainer.resume_mode=none to start anew")


def _refuse_unread(wanted: set[str], stored: set[str], folder: str, state: RankState) -> None:
    """Raise CheckpointError when a stored tensor is asked for by no rank: it belongs to another model."""
    unread = stored - wanted
    if state.optimizer is None:
        unread = {key for key in unread if not key.startswith(OPTIMIZER_PREFIX)}
    if unread:
        some = ", ".join(sorted(unread)[:3])
        raise CheckpointError(f"{folder} has {len(unread)} tensors that the model does not have ({some}, …)")


def _restore_counters(storage: Storage, folder: str, role: str, state: RankState, seed: int) -> int:
    manifest = read_manifest(storage, folder)
    saved = json.loads(read_verified(storage, folder, manifest, f"{role}/{STATE}"))
    if state.optimizer is not None:
        if saved["optimizer_step"] is None:
            raise CheckpointError(f"{folder}/{role} was saved without an optimizer")
        set_step_count(state.optimizer, saved["optimizer_step"])
        finish_load(state.optimizer)
    if state.lr_schedule is not None and saved["lr_schedule"] is not None:
        _restore_schedule(state.lr_schedule, saved["lr_schedule"])
    if saved["layout"] == state.layout():
        rng.restore(read_verified(storage, folder, manifest, f"{role}/rng_{state.rank:05d}.safetensors"))
    else:
        _warn_once(
            f"{folder} was saved at {_degrees(saved['layout'])} and is loaded at {_degrees(state.layout())}: random "
            f"states start anew from seed {seed} and step {saved['step']}"
        )
        rng.derive(seed, saved["step"], state.groups.dp.rank(), state.groups.pp.rank())
    return int(saved["step"])


def _restore_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    """Continue at the saved step. The rest of the schedule is what the configuration says now."""
    changed = {
        name: (value, now)
        for name, value in saved.items()
        if name != "num_steps" and (now := schedule.state_dict().get(name)) != value
    }
    if changed:
        text = ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
        _warn_once(f"the learning-rate schedule differs from the saved one and is used as configured now: {text}")
    schedule.num_steps = 0
    schedule.step(increment=saved["num_steps"])


def _degrees(layout: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items() if value != 1) or "1 rank"


def _warn_once(message: str) -> None:
    """Warn on one rank, for all."""
    if dist.get_rank() == 0:
        warnings.warn(message, SkyRLMegatronWarning, stacklevel=3)
