"""One rank's part of a save and of a load: weights, optimizer ranges, learning-rate schedule, random states.

Writing does not communicate, so a background thread can do it while the ranks train. The rank's note
(``<role>/parts/<rank>.json``) appears atomically after all its files are durable.

Random states belong to a rank. At another layout no saved state fits, so new states are derived from (seed, step):
reproducible, but not a continuation of the saved ones.
"""

from __future__ import annotations

import json
import random
import time
import traceback
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from safetensors import torch as safetensors_torch

from bridges.torch_dist import COMMON_STATE, ChunkFile
from skyrl_megatron import device
from skyrl_megatron.errors import CheckpointError, SkyRLMegatronWarning
from skyrl_megatron.runtime.checkpoint.manifest import (
    PARTS,
    STATE,
    HashedFile,
    hash_bytes,
    read_manifest,
    read_verified,
)
from skyrl_megatron.runtime.checkpoint.rank_state import (
    CONTENT,
    MOMENTUM,
    OPTIMIZER_PREFIX,
    Block,
    blocks_to_load,
    blocks_to_save,
    finish_load,
    owned_ranges,
    set_step_count,
    step_count,
    unwrapped,
)
from skyrl_megatron.runtime.checkpoint.reader import RoleReader, as_bytes
from skyrl_megatron.runtime.checkpoint.storage import BackgroundTask, Storage, open_storage
from skyrl_megatron.runtime.model.expert_placement import placement_of
from skyrl_megatron.runtime.offload import HostMemory

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


_TRACKER = "tracker/"


def capture_rng() -> bytes:
    """Return all random states of this rank as the content of a safetensors file."""
    # JSON and raw tensors instead of pickle: loading a checkpoint must not run code.
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    tensors = {"torch": torch.get_rng_state().clone()}
    if device.has_cuda():
        tensors["device"] = torch.cuda.get_rng_state().cpu()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[_TRACKER + name] = (state if torch.is_tensor(state) else state.get_state()).cpu().clone()
    return safetensors_torch.save(tensors, metadata={"states": json.dumps(plain)})


def restore_rng(data: bytes) -> None:
    """Restore all random states from :func:`capture_rng` of the same rank at the same layout."""
    length = int.from_bytes(data[:8], "little")
    plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["states"])
    tensors = safetensors_torch.load(data)
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "device" in tensors:
        torch.cuda.set_rng_state(tensors["device"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in tensors.items():
        if name.startswith(_TRACKER):
            current = states.get(name.removeprefix(_TRACKER))
            if current is not None and not torch.is_tensor(current):
                current.set_state(state)  # graph-safe generators are restored in place
            else:
                states[name.removeprefix(_TRACKER)] = state
    tracker.set_states(states)
    torch.set_rng_state(tensors["torch"])


def derive_rng(seed: int, step: int, data_parallel_rank: int, pipeline_rank: int) -> None:
    """Derive new random states from (seed, step). States that ranks of one replica must share are equal; replicas
    differ."""
    # Below 2**30, so that the offsets of stages and replicas stay within the seeds that numpy takes.
    base = zlib.crc32(f"{seed}/{step}".encode()) & 0x3FFFFFFF
    # Steps of 100 leave room for the tensor-parallel rank, which Megatron adds.
    model_parallel_cuda_manual_seed(base + 100 * pipeline_rank, force_reset_rng=True)
    of_replica = base + 100 * pipeline_rank + 1_000_003 * data_parallel_rank
    random.seed(of_replica)
    np.random.seed(of_replica & 0xFFFFFFFF)
    torch.manual_seed(of_replica)


ALIGNMENT = 64  # bytes: sufficient for every dtype


@dataclass(slots=True)
class RankState:
    """The objects of a rank that a checkpoint saves and loads. ``optimizer`` and ``lr_schedule`` may be None (a model
    without training state). All ranks of the default process group have the same role."""

    model_chunks: list[Any]
    groups: ProcessGroups
    optimizer: MegatronOptimizer | None = None
    lr_schedule: OptimizerParamScheduler | None = None
    base: str | None = None
    """Fingerprint of the base weights of the adapters; None if the weights themselves are saved."""

    @property
    def experts(self) -> ExpertPlacement | None:
        """The slots of the model's experts; None for a model that :func:`build_model` did not make."""
        return placement_of(unwrapped(self.model_chunks[0])) if self.model_chunks else None

    @property
    def rank(self) -> int:
        """Number of this rank in its role."""
        return dist.get_rank()

    def layout(self) -> dict[str, int]:
        """Degrees of the layout, by their names, and ``world_size``."""
        parallel = self.groups.parallel
        degrees = {name: int(getattr(parallel, name)) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        return degrees | {"dp": self.groups.dp.size(), "world_size": dist.get_world_size()}


class RankWriter:
    """Writes this rank's part, directly or from a copy in the background. One save at a time."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._background = BackgroundTask("a background write")
        self.stall_s = 0.0
        """Seconds that the last save blocked the caller."""

    def write(self, folder: str, role: str, step: int, state: RankState, *, background: bool = False) -> None:
        """Write to ``folder/role`` (an existing folder, or an address of an object store).

        With ``background`` the call returns after copying the rank's state; then the weights may change. Raises
        CheckpointError if the storage fails, or if a background write is still in progress.
        """
        self._background.check_idle()
        began = time.perf_counter()
        note = {"rank": state.rank, "step": step, "layout": state.layout(), "base": state.base}
        blocks = list(blocks_to_save(state.model_chunks, state.optimizer, state.groups))
        # Before the copy: the note and the blocks must be of one moment, whatever trains afterwards.
        note["experts"] = dict(state.experts.moved) if state.experts is not None else {}
        note["optimizer_step"] = step_count(state.optimizer)
        note["lr_schedule"] = state.lr_schedule.state_dict() if state.lr_schedule is not None else None
        random_states = capture_rng()
        if background:
            blocks = self.copy(blocks)
            self._background.start(_write_rank, folder, role, note, blocks, random_states)
        else:
            _write_rank(folder, role, note, blocks, random_states)
        self.stall_s = time.perf_counter() - began

    def wait(self, timeout_s: float) -> None:
        """Wait for the background write. Raises CheckpointError if it failed or takes longer than ``timeout_s``."""
        self._background.wait(timeout_s)

    def copy(self, blocks: list[Block]) -> list[Block]:
        """Return the blocks with all data copied to host memory, also data that is on the host already.

        The copy is valid until the next call.
        """
        # The same host memory for each save, which bounds it and saves its allocation.
        self._memory.rewind()
        copies = []
        for block in blocks:
            size = block.data.numel() * block.data.element_size()
            data = self._memory.take(-(-size // ALIGNMENT) * ALIGNMENT)[:size].view(block.data.dtype)
            data.copy_(block.data, non_blocking=True)
            copies.append(replace(block, data=data))
        # The copies are asynchronous; after return the weights may change.
        device.synchronize()
        return copies


def _write_rank(folder: str, role: str, note: dict[str, Any], blocks: list[Block], random_states: bytes) -> None:
    storage = open_storage(folder)
    target, rank = storage.path(role), note["rank"]
    try:
        _write_files(storage, target, note, blocks, random_states)
    except OSError as error:
        reason = f"rank {rank} cannot write {error.filename or target} ({error.strerror or error})"
        _note_failure(storage, target, rank, reason)
        raise CheckpointError(f"{reason}; free disk space or check trainer.ckpt_path") from error
    except BaseException:
        _note_failure(storage, target, rank, f"rank {rank} failed:\n{traceback.format_exc()}")
        raise


def _write_files(
    storage: Storage, target: str, note: dict[str, Any], blocks: list[Block], random_states: bytes
) -> None:
    rank = note["rank"]
    name = f"__{rank}_0.distcp"
    hashed = HashedFile(storage.create(f"{target}/{name}"))
    file = ChunkFile(name, hashed)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        for block in blocks:
            file.append(block.key, block.offsets, block.sizes, block.data.dtype, [as_bytes(block.data)])
            tensors[block.key] = (str(block.data.dtype).removeprefix("torch."), block.global_shape)
        if rank == 0:
            common = {"iteration": note["step"], "checkpoint_version": 3.0, "content_metadata": dict(CONTENT)}
            file.append_object(COMMON_STATE, common)
        file.finish()
    finally:
        file.abandon()
    random_file = f"rng_{rank:05d}.safetensors"
    storage.write(f"{target}/{random_file}", random_states)
    entries = {name: hashed.entry(), random_file: hash_bytes(random_states)}
    note["files"] = {name: asdict(entry) for name, entry in entries.items()}
    note["tensors"] = tensors
    note["chunks"] = [[key, *astuple(chunk)] for key, chunk in file.written]
    storage.write(f"{target}/{PARTS}/{rank}.json", json.dumps(note).encode())


def _note_failure(storage: Storage, target: str, rank: int, reason: str) -> None:
    """Leave a note that this rank failed, if the storage still allows it, so that nobody waits for its files."""
    try:
        storage.write(f"{target}/{PARTS}/{rank}.failed", reason.encode())
    except OSError:
        pass


def run_on_all_ranks[T](work: Callable[[], T]) -> list[T]:
    """Run ``work()`` on every rank and return the results by rank. If it fails on any rank, raise CheckpointError on
    all, so that no rank waits for another. Collective over the default process group."""
    try:
        outcome: tuple[Any, str | None] = (work(), None)
    except (CheckpointError, OSError) as error:
        outcome = (None, str(error))
    except Exception as error:
        outcome = (None, f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    # As text: not every error can be pickled, and one rank's traceback means nothing on another.
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for _, failure in outcomes:
        if failure is not None:
            raise CheckpointError(failure)
    return [value for value, _ in outcomes]


def read_rank(folder: str, role: str, state: RankState, *, seed: int) -> int:
    """Load ``state`` from a checkpoint folder and return the checkpoint's step. Every rank of the role calls it.

    If ``state.optimizer`` is None, the saved optimizer is ignored. At another layout than the saved one, random states
    are derived from (``seed``, step), with a warning. All bytes are verified against the manifest before use. Raises
    CheckpointError on all ranks if anything is missing, damaged or unexpected; some weights may be overwritten by
    then.
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
        _place_experts(state, json.loads(read_verified(storage, storage.root, manifest, f"{role}/{STATE}")), folder)
        ranges = list(owned_ranges(state.optimizer))
        blocks = list(blocks_to_load(state.model_chunks, ranges, state.groups))
        return {block.key for block in blocks}, set(reader.tensors)

    # No rank overwrites a weight before all have found what they need.
    keys = run_on_all_ranks(prepare)
    wanted, stored = set().union(*(of_rank for of_rank, _ in keys)), keys[0][1]
    fresh, replaced = fresh_moments(wanted, stored)
    _refuse_unread(wanted, stored - replaced, folder, state)
    if fresh:
        _warn_once(
            f"{folder} was saved with another optimizer: master weights and schedule are loaded, and the moments of "
            f"{len(fresh)} tensors start at zero ({', '.join(sorted({key.split('.')[2] for key in fresh}))})"
        )

    def fill() -> int:
        with torch.no_grad():
            for block in blocks:
                if block.key in fresh:
                    block.data.zero_()
            reader.load([block for block in blocks if block.key not in fresh])
            # Scaled and split states are not the optimizer's memory: what was read goes back through its own code.
            for owned in ranges:
                if owned.write_back is not None:
                    owned.write_back(owned.tensors)
        restart = any(key.startswith(f"{OPTIMIZER_PREFIX}exp_avg.") for key in fresh)
        return _restore_counters(storage, storage.root, role, state, seed, restart)

    return run_on_all_ranks(fill)[0]


def _place_experts(state: RankState, saved: dict[str, Any], folder: str) -> None:
    """Use the saved slots of the experts, so that the run continues bit for bit, if this model's experts move and are
    spread over as many ranks; else the initial ones. Raises CheckpointError for slots of another model."""
    if (placement := state.experts) is None:
        return
    fits = placement.movable and saved["layout"]["ep"] == placement.ranks
    try:
        placement.place({int(layer): slots for layer, slots in saved.get("experts", {}).items()} if fits else {})
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def fresh_moments(wanted: set[str], stored: set[str]) -> tuple[set[str], set[str]]:
    """Return the wanted moments that start at zero because Adam or Muon saved others for a weight, and those others.

    Adam's bias correction counts the steps of all its parameters together. If it takes over matrices from Muon, all of
    its moments start at zero.
    """
    moments: defaultdict[str, set[str]] = defaultdict(set)
    weights: defaultdict[str, set[str]] = defaultdict(set)
    for keys, names_of in ((wanted, moments), (stored, weights)):
        for key in keys:
            if key.startswith(OPTIMIZER_PREFIX):
                name, weight = key.removeprefix(OPTIMIZER_PREFIX).split(".", 1)
                names_of[weight].add(name)
    changed = {
        weight
        for weight, names in moments.items()
        if "param" in weights[weight] and MOMENTUM in names ^ weights[weight]
    }
    fresh = {f"{OPTIMIZER_PREFIX}{name}.{weight}" for weight in changed for name in moments[weight] - {"param"}}
    replaced = {f"{OPTIMIZER_PREFIX}{name}.{weight}" for weight in changed for name in weights[weight] - {"param"}}
    # torch's Adam has one step count for all: moments of many steps and of none cannot share its bias correction.
    if any("exp_avg" in moments[weight] for weight in changed):
        adams = (f"{OPTIMIZER_PREFIX}exp_avg.", f"{OPTIMIZER_PREFIX}exp_avg_sq.")
        fresh |= {key for key in wanted if key.startswith(adams)}
    return fresh, replaced


def _refuse_other_base(folder: str, saved: str | None, ours: str | None) -> None:
    """Raise CheckpointError if the saved adapters have another base, or only one side has adapters."""
    if saved == ours:
        return
    if saved is None:
        reason = "holds weights, not adapters: set trainer.policy.model.lora.rank=0"
    elif ours is None:
        reason = "holds adapters: set trainer.policy.model.lora.rank to their rank"
    else:
        reason = "holds adapters of another base model: set trainer.policy.model.path to the one they were trained on"
    raise CheckpointError(f"{folder} {reason}, or trainer.resume_mode=none to start anew")


def _refuse_unread(wanted: set[str], stored: set[str], folder: str, state: RankState) -> None:
    """Raise CheckpointError if no rank loads a stored tensor: the checkpoint is of another model."""
    unread = stored - wanted
    # An evaluation or a reference loads weights only.
    if state.optimizer is None:
        unread = {key for key in unread if not key.startswith(OPTIMIZER_PREFIX)}
    if unread:
        some = ", ".join(sorted(unread)[:3])
        raise CheckpointError(
            f"{folder} has {len(unread)} tensors that the model does not have ({some}, …): set model and layers to "
            "those of the run that saved it, or trainer.resume_mode=none to start anew"
        )


def _restore_counters(
    storage: Storage, folder: str, role: str, state: RankState, seed: int, restart: bool = False
) -> int:
    manifest = read_manifest(storage, folder)
    saved = json.loads(read_verified(storage, folder, manifest, f"{role}/{STATE}"))
    if state.optimizer is not None:
        if saved["optimizer_step"] is None:
            raise CheckpointError(
                f"{folder}/{role} was saved without an optimizer, so that no training continues from it: set "
                "trainer.resume_mode=none to start anew"
            )
        # Bias correction of moments that start at zero must start too.
        set_step_count(state.optimizer, 0 if restart else saved["optimizer_step"])
        finish_load(state.optimizer)
    if state.lr_schedule is not None and saved["lr_schedule"] is not None:
        _restore_schedule(state.lr_schedule, saved["lr_schedule"])
    if saved["layout"] == state.layout():
        restore_rng(read_verified(storage, folder, manifest, f"{role}/rng_{state.rank:05d}.safetensors"))
    else:
        _warn_once(
            f"{folder} was saved at {_degrees(saved['layout'])} and is loaded at {_degrees(state.layout())}: new "
            f"random states are derived from seed {seed} and step {saved['step']}"
        )
        derive_rng(seed, saved["step"], state.groups.dp.rank(), state.groups.pp.rank())
    return int(saved["step"])


def _restore_schedule(schedule: Any, saved: dict[str, Any]) -> None:
    """Continue at the saved step. The other values of the schedule come from the current configuration."""
    changed = {
        name: (value, now)
        for name, value in saved.items()
        if name != "num_steps" and (now := schedule.state_dict().get(name)) != value
    }
    if changed:
        text = ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
        _warn_once(f"the learning-rate schedule differs from the saved one and is used as configured now: {text}")
    # Megatron's load_state_dict would take the saved values, or fail where they differ.
    schedule.num_steps = 0
    schedule.step(increment=saved["num_steps"])


def _degrees(layout: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items() if value != 1) or "1 rank"


def _warn_once(message: str) -> None:
    """Warn on rank 0 only."""
    if dist.get_rank() == 0:
        warnings.warn(message, SkyRLMegatronWarning, stacklevel=3)
