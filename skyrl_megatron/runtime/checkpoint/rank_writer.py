"""One rank's share of a save: its shard file, its random states, and a note of both for whoever completes the folder.

Nothing here communicates, so a background thread may do it while the ranks train. The note
(``<role>/parts/<rank>.json``) appears, at once, when everything of this rank is durable.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bridges.torch_dist import COMMON_STATE, ChunkFile
from skyrl_megatron import device
from skyrl_megatron.errors import CheckpointError
from skyrl_megatron.runtime.checkpoint import rng
from skyrl_megatron.runtime.checkpoint.background import Background
from skyrl_megatron.runtime.checkpoint.hashed_file import HashedFile
from skyrl_megatron.runtime.checkpoint.host_memory import as_bytes
from skyrl_megatron.runtime.checkpoint.local_state import CONTENT, Block, blocks_to_save
from skyrl_megatron.runtime.checkpoint.manifest import PARTS, hash_bytes
from skyrl_megatron.runtime.checkpoint.optimizer_state import step_count
from skyrl_megatron.runtime.checkpoint.storage import Storage, open_storage
from skyrl_megatron.runtime.host_memory import HostMemory

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from skyrl_megatron.runtime.parallel_state import ProcessGroups

ALIGNMENT = 64  # bytes: where any dtype may be viewed


@dataclass(slots=True)
class RankState:
    """The objects of a rank that a checkpoint saves and a load fills. ``optimizer`` and ``lr_schedule`` may be None
    (a model without training state). All ranks of the default process group belong to the same role."""

    model_chunks: list[Any]
    groups: ProcessGroups
    optimizer: MegatronOptimizer | None = None
    lr_schedule: OptimizerParamScheduler | None = None
    base: str | None = None
    """Fingerprint of the weights that adapters are added to; None where the weights themselves are saved."""

    @property
    def rank(self) -> int:
        """This rank among those of the role."""
        return dist.get_rank()

    def layout(self) -> dict[str, int]:
        """Degrees of the layout, by their names, and ``world_size``."""
        parallel = self.groups.parallel
        degrees = {name: int(getattr(parallel, name)) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
        return degrees | {"dp": self.groups.dp.size(), "world_size": dist.get_world_size()}


class RankWriter:
    """Writes this rank's share, in the foreground or from a copy in the background. One save at a time."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._background = Background("a background write")
        self.stall_s = 0.0
        """Seconds that the last save kept the caller."""

    def write(self, folder: str, role: str, step: int, state: RankState, *, background: bool = False) -> None:
        """Write to ``folder/role`` (an existing folder, or an address of an object store).

        With ``background`` the call returns when a copy of the rank's own state was made; the weights may change
        from then on. Raises CheckpointError when the disk refuses, or when a background write is still under way.
        """
        self._background.check_idle()
        began = time.perf_counter()
        note = {"rank": state.rank, "step": step, "layout": state.layout(), "base": state.base}
        blocks = list(blocks_to_save(state.model_chunks, state.optimizer, state.groups))
        note["optimizer_step"] = step_count(state.optimizer)
        note["lr_schedule"] = state.lr_schedule.state_dict() if state.lr_schedule is not None else None
        random_states = rng.capture()
        if background:
            blocks = self.copy(blocks)
            self._background.start(_write_rank, folder, role, note, blocks, random_states)
        else:
            _write_rank(folder, role, note, blocks, random_states)
        self.stall_s = time.perf_counter() - began

    def wait(self, timeout_s: float) -> None:
        """Wait until the background write has ended. Raises CheckpointError when it failed or takes longer."""
        self._background.wait(timeout_s)

    def copy(self, blocks: list[Block]) -> list[Block]:
        """Return the same blocks with a copy of all data on the host, where ``.to("cpu")`` would return live tensors.

        The copy is valid until the next one is made.
        """
        self._memory.rewind()
        copies = []
        for block in blocks:
            size = block.data.numel() * block.data.element_size()
            data = self._memory.take(-(-size // ALIGNMENT) * ALIGNMENT)[:size].view(block.data.dtype)
            data.copy_(block.data, non_blocking=True)
            copies.append(replace(block, data=data))
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
        raise CheckpointError(f"{reason}; make room or check trainer.ckpt_path") from error
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
    """Tell whoever waits for this rank that nothing will come, where the storage still lets us."""
    try:
        storage.write(f"{target}/{PARTS}/{rank}.failed", reason.encode())
    except OSError:
        pass
