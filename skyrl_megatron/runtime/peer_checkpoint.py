"""In-memory checkpoints: each rank keeps a copy of a peer's state, from which a lost rank is recovered.

Copied are the storages of what is trained, as they are in memory, and not the tensors that a checkpoint names: an
engine that is built anew by the same configuration at the same place of the layout has the same storages in the same
order, so that filling them is a copy of bytes, whatever the layers and the optimizer make of them. Weights that are
frozen under an adapter are left out: they come from their folder again. Gradients are zero between steps.

A neighbour may keep the copy of a rank beside its own (:func:`exchange`), and gives it to the one that is started in
its place (:func:`hand_over`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.errors import DistributedError
from skyrl_megatron.runtime.checkpoint import rank_files as rng
from skyrl_megatron.runtime.checkpoint.rank_state import make_optimizer_state as make_state
from skyrl_megatron.runtime.checkpoint.rank_state import parts, set_step_count, step_count, unwrapped
from skyrl_megatron.runtime.offload import HostMemory, memory_of, optimizer_tensors

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.optimizer import Trained


_SCALARS = (bool, int, float, str, tuple, type(None))


class StateCopy:
    """One rank's state. The memory is taken by the first :meth:`take`, and used again by the next."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._pieces: list[Tensor] = []
        self.nbytes = 0
        """Bytes of the storages that were copied."""
        self.note = b""
        """All that is no tensor: counts, schedules, random states."""

    @torch.no_grad()
    def take(self, engine: MegatronEngine) -> None:
        """Copy what ``engine`` holds now."""
        engine.onload("weights", "optimizer")
        storages = list(_storages(engine))
        self.reserve(sum(storage.nbytes() for storage in storages))
        self._copy(storages, lambda storage, piece: piece.copy_(storage, non_blocking=True))
        self.note = pickle.dumps(_noted(engine))

    @torch.no_grad()
    def restore(self, engine: MegatronEngine) -> None:
        """Make ``engine``, which was built as the one that was copied, what that one was. Raises DistributedError when
        it is not of the same size."""
        engine.onload("weights", "optimizer")
        storages = list(_storages(engine))
        if (held := sum(storage.nbytes() for storage in storages)) != self.nbytes:
            raise DistributedError(f"the copy of a rank's state has {self.nbytes} bytes, the rank itself {held}")
        self._copy(storages, lambda storage, piece: storage.copy_(piece, non_blocking=True))
        _take_on(engine, pickle.loads(self.note))

    def reserve(self, nbytes: int) -> None:
        """Have room for ``nbytes``; what was held before is lost."""
        self.nbytes = nbytes
        self._memory.rewind()
        self._pieces = self._memory.pieces(nbytes)

    def pieces(self) -> list[Tensor]:
        """Return the memory of the copy, uint8, in order."""
        return list(self._pieces)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are held."""
        return self._memory.nbytes

    def _copy(self, storages: Sequence[torch.UntypedStorage], move: Callable[[Tensor, Tensor], object]) -> None:
        """Call ``move`` with every run of bytes of a storage and its place in the copy."""
        pieces, used = iter(self._pieces), 0
        piece = next(pieces, None)
        for storage in storages:
            left = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(left):
                assert piece is not None
                if used == len(piece):
                    piece, used = next(pieces), 0
                size = min(len(left), len(piece) - used)
                move(left[:size], piece[used : used + size])
                left, used = left[size:], used + size
        device.synchronize()


class RankCopies:
    """What a rank keeps: the copy of its own state, and that of the rank whose neighbour it is."""

    def __init__(self) -> None:
        self.own, self.kept = StateCopy(), StateCopy()

    def keep(self, engine: MegatronEngine, distance: int) -> int:
        """Copy the state of ``engine`` and give it to the rank ``distance`` behind, if that is above 0; returns the
        bytes of host memory that are held. Every rank calls it."""
        self.own.take(engine)
        if distance:
            exchange(self.own, self.kept, distance)
        return self.own.host_bytes + self.kept.host_bytes

    def roll_back(self, engine: MegatronEngine, holders: Mapping[int, int]) -> None:
        """Make ``engine`` what it was at the last :meth:`keep`. ``holders``: rank that was started anew → the rank
        that has its copy. Every rank calls it."""
        hand_over(self.own, self.kept, holders)
        self.own.restore(engine)


def exchange(own: StateCopy, kept: StateCopy, distance: int) -> None:
    """Give the copy of this rank's state to the rank ``distance`` behind it, and take that of the one as far before it
    into ``kept``. Every rank calls it; gloo carries it, also between ranks on GPUs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    target, source = (rank + distance) % world, (rank - distance) % world
    sizes = torch.zeros(2, dtype=torch.int64)
    _wait(
        [dist.irecv(sizes, source), dist.isend(torch.tensor([own.nbytes, len(own.note)], dtype=torch.int64), target)]
    )
    kept.reserve(int(sizes[0]))
    note = torch.zeros(int(sizes[1]), dtype=torch.uint8)
    receives = [dist.irecv(piece, source) for piece in (*kept.pieces(), note)]
    sends = [dist.isend(piece, target) for piece in (*own.pieces(), _as_tensor(own.note))]
    _wait(receives + sends)
    kept.note = note.numpy().tobytes()


def hand_over(own: StateCopy, kept: StateCopy, holders: Mapping[int, int]) -> None:
    """Let ranks that were started anew have their copies from those who kept them: ``holders``, rank → who has its
    state. Every rank calls it."""
    rank = dist.get_rank()
    for new, holder in sorted(holders.items()):
        if rank == holder:
            dist.send(torch.tensor([kept.nbytes, len(kept.note)], dtype=torch.int64), new)
            for piece in (*kept.pieces(), _as_tensor(kept.note)):
                dist.send(piece, new)
        if rank == new:
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.recv(sizes, holder)
            own.reserve(int(sizes[0]))
            note = torch.zeros(int(sizes[1]), dtype=torch.uint8)
            for piece in (*own.pieces(), note):
                dist.recv(piece, holder)
            own.note = note.numpy().tobytes()


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _storages(engine: MegatronEngine) -> Iterator[torch.UntypedStorage]:
    """Yield each storage of the state once, in an order that an engine built alike has too."""
    seen: set[int] = set()
    for trained in engine.trained.values():
        make_state(trained.optimizer)
        for tensor in _tensors(trained, alone=engine.is_adapted):
            for each in memory_of(tensor):
                storage = each.untyped_storage()
                if storage._cdata not in seen and storage.nbytes():
                    seen.add(storage._cdata)
                    yield storage


def _tensors(trained: Trained, *, alone: bool) -> Iterator[Tensor]:
    """Yield what a training changes. ``alone``: of adapters, without the model that they are added to."""
    for chunk in trained.chunks:
        if alone:
            yield from chunk.params_with_grad
            continue
        yield from chunk.parameters()
        yield from unwrapped(chunk).buffers()  # a router's balance, where it learns one
    yield from optimizer_tensors(trained.optimizer)


def _noted(engine: MegatronEngine) -> dict[str, Any]:
    return {
        "adapter": engine.adapter,
        "random states": rng.capture_rng(),
        "trained": {
            name: {
                "steps": (trained.steps, trained.skipped_steps),
                "random states": trained.random_states,
                "optimizer steps": step_count(trained.optimizer),
                "groups": [_scalars(group) for group in _groups(trained)],
                "schedule": _scalars(vars(trained.lr_schedule)) if trained.lr_schedule else None,
            }
            for name, trained in engine.trained.items()
        },
    }


def _take_on(engine: MegatronEngine, noted: Mapping[str, Any]) -> None:
    engine.set_adapter(noted["adapter"])
    for name, values in noted["trained"].items():
        trained = engine.trained[name]
        trained.steps, trained.skipped_steps = values["steps"]
        trained.random_states = values["random states"]
        if values["optimizer steps"] is not None:
            set_step_count(trained.optimizer, values["optimizer steps"])
        for group, scalars in zip(_groups(trained), values["groups"], strict=True):
            group.update(scalars)
        if trained.lr_schedule is not None:
            vars(trained.lr_schedule).update(values["schedule"])
    rng.restore_rng(noted["random states"])


def _groups(trained: Trained) -> list[dict[str, Any]]:
    """Return the parameter groups of a training's optimizers."""
    optimizers = [part.optimizer for part in parts(trained.optimizer)]
    inner = [each for optimizer in optimizers for each in getattr(optimizer, "sub_optimizers", ())]
    return [group for optimizer in (*optimizers, *inner) for group in optimizer.param_groups]


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, _SCALARS)}
