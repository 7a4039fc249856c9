"""In-memory checkpoints: each rank also holds the state of a peer, from which a lost rank is recovered.

A checkpoint is a byte copy of the storages of trained tensors. An engine that is rebuilt with the same configuration
at the same rank has the same storages in the same order, so a restore copies bytes and does not depend on layers or
optimizer. Base weights that are frozen under an adapter are not copied; they are loaded from their folder again.
Gradients are zero between steps.

Each rank sends its checkpoint to a peer (:func:`exchange`). When a rank is restarted, the peer sends it back
(:func:`hand_over`).
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
from skyrl_megatron.runtime.checkpoint.rank_state import inner_optimizers, set_step_count, step_count, unwrapped
from skyrl_megatron.runtime.checkpoint.rank_state import make_optimizer_state as make_state
from skyrl_megatron.runtime.offload import HostMemory, memory_of, optimizer_tensors

if TYPE_CHECKING:
    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron.runtime.optimizer import TrainingState


_SCALARS = (bool, int, float, str, tuple, type(None))


class StateSnapshot:
    """A copy of one rank's training state in host memory, which each :meth:`take` reuses."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._slices: list[Tensor] = []
        self.nbytes = 0
        """Bytes of the copied storages."""
        self.metadata = b""
        """Pickled state outside of tensors: step counts, schedules, random states."""

    @torch.no_grad()
    def take(self, engine: MegatronEngine) -> None:
        """Copy the current state of ``engine``."""
        # both must be on the device: storages that are offloaded have no bytes to copy
        engine.onload("weights", "optimizer")
        storages = list(_storages(engine))
        self.reserve(sum(storage.nbytes() for storage in storages))
        self._copy(storages, lambda storage, host: host.copy_(storage, non_blocking=True))
        self.metadata = pickle.dumps(_metadata(engine))

    @torch.no_grad()
    def restore(self, engine: MegatronEngine) -> None:
        """Copy this state into ``engine``. Raises DistributedError if the sizes of both differ."""
        engine.onload("weights", "optimizer")
        storages = list(_storages(engine))
        if (held := sum(storage.nbytes() for storage in storages)) != self.nbytes:
            raise DistributedError(
                f"the peer checkpoint of a rank has {self.nbytes} bytes, the rank itself {held}: resume the last "
                "checkpoint on disk"
            )
        self._copy(storages, lambda storage, host: storage.copy_(host, non_blocking=True))
        _restore_metadata(engine, pickle.loads(self.metadata))

    def reserve(self, nbytes: int) -> None:
        """Reserve ``nbytes``; the previous contents are lost."""
        self.nbytes = nbytes
        self._memory.rewind()
        self._slices = self._memory.pieces(nbytes)

    def slices(self) -> list[Tensor]:
        """Return the memory of the copy, [n] uint8 each, in order."""
        return list(self._slices)

    @property
    def host_bytes(self) -> int:
        """Allocated bytes of host memory."""
        return self._memory.nbytes

    def _copy(self, storages: Sequence[torch.UntypedStorage], move: Callable[[Tensor, Tensor], object]) -> None:
        """Call ``move`` with every run of bytes of a storage and the matching host memory."""
        slices, used = iter(self._slices), 0
        host = next(slices, None)
        for storage in storages:
            left = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(left):
                assert host is not None
                # blocks of host memory end elsewhere than storages
                if used == len(host):
                    host, used = next(slices), 0
                size = min(len(left), len(host) - used)
                move(left[:size], host[used : used + size])
                left, used = left[size:], used + size
        # the copies were queued, and the caller goes on to change the source
        device.synchronize()


class PeerCheckpoints:
    """The checkpoints that a rank holds: its own, and that of its peer."""

    def __init__(self) -> None:
        self.own, self.peer = StateSnapshot(), StateSnapshot()

    def keep(self, engine: MegatronEngine, distance: int) -> int:
        """Copy the state of ``engine``; return the bytes of host memory that both checkpoints take.

        If ``distance`` is not 0, the copy is also sent to the rank ``distance`` after this one. Every rank calls it.
        """
        self.own.take(engine)
        if distance:
            exchange(self.own, self.peer, distance)
        return self.own.host_bytes + self.peer.host_bytes

    def roll_back(self, engine: MegatronEngine, holders: Mapping[int, int]) -> None:
        """Restore ``engine`` to the last :meth:`keep`. Every rank calls it.

        ``holders``: restarted rank → rank that holds its checkpoint.
        """
        hand_over(self.own, self.peer, holders)
        self.own.restore(engine)


def exchange(own: StateSnapshot, peer: StateSnapshot, distance: int) -> None:
    """Send ``own`` to the rank ``distance`` after this one; receive ``peer`` from the rank ``distance`` before it.

    Every rank calls it. It uses gloo, also between ranks on GPUs.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    target, source = (rank + distance) % world, (rank - distance) % world
    sizes, own_sizes = torch.zeros(2, dtype=torch.int64), _sizes(own)
    # both posted before either is waited for: in a ring where each rank first waits for its send, all would
    # wait
    _wait([dist.irecv(sizes, source), dist.isend(own_sizes, target)])
    peer.reserve(int(sizes[0]))
    metadata = torch.zeros(int(sizes[1]), dtype=torch.uint8)
    # all at once: a peer's bytes arrive in order, and waiting for each would add a round trip per slice
    receives = [dist.irecv(piece, source) for piece in (*peer.slices(), metadata)]
    sends = [dist.isend(piece, target) for piece in (*own.slices(), _as_tensor(own.metadata))]
    _wait(receives + sends)
    peer.metadata = metadata.numpy().tobytes()


def hand_over(own: StateSnapshot, peer: StateSnapshot, holders: Mapping[int, int]) -> None:
    """Send each restarted rank its checkpoint. Every rank calls it.

    ``holders``: restarted rank → rank that holds its checkpoint.
    """
    rank = dist.get_rank()
    # sorted: every rank must take the pairs in one order
    for restarted, holder in sorted(holders.items()):
        if rank == holder:
            dist.send(_sizes(peer), restarted)
            for piece in (*peer.slices(), _as_tensor(peer.metadata)):
                dist.send(piece, restarted)
        if rank == restarted:
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.recv(sizes, holder)
            own.reserve(int(sizes[0]))
            metadata = torch.zeros(int(sizes[1]), dtype=torch.uint8)
            for piece in (*own.slices(), metadata):
                dist.recv(piece, holder)
            own.metadata = metadata.numpy().tobytes()


def _sizes(copy: StateSnapshot) -> Tensor:
    """Return [2] int64: bytes of the storages and of the metadata."""
    return torch.tensor([copy.nbytes, len(copy.metadata)], dtype=torch.int64)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _storages(engine: MegatronEngine) -> Iterator[torch.UntypedStorage]:
    """Yield each storage of the state once, in an order that depends only on configuration and rank."""
    seen: set[int] = set()
    for trained in engine.trained.values():
        # moments exist only after the first step; a rebuilt engine must have the same storages
        make_state(trained.optimizer)
        for tensor in _tensors(trained, adapters_only=engine.is_adapted):
            for memory in memory_of(tensor):
                storage = memory.untyped_storage()
                if storage._cdata not in seen and storage.nbytes():
                    seen.add(storage._cdata)
                    yield storage


def _tensors(trained: TrainingState, *, adapters_only: bool) -> Iterator[Tensor]:
    """Yield the tensors that training changes. ``adapters_only``: those of adapters, without the base model."""
    for chunk in trained.chunks:
        if adapters_only:
            yield from chunk.params_with_grad
            continue
        yield from chunk.parameters()
        yield from unwrapped(chunk).buffers()  # for example the expert bias of a router
    yield from optimizer_tensors(trained.optimizer)


def _metadata(engine: MegatronEngine) -> dict[str, Any]:
    return {
        "adapter": engine.adapter,
        "random states": rng.capture_rng(),
        "experts": dict(engine.model.experts.moved),
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


def _restore_metadata(engine: MegatronEngine, metadata: Mapping[str, Any]) -> None:
    # the adapter first: it decides which factors are in the tree of modules
    engine.set_adapter(metadata["adapter"])
    engine.model.experts.place(metadata["experts"])
    for name, values in metadata["trained"].items():
        trained = engine.trained[name]
        trained.steps, trained.skipped_steps = values["steps"]
        trained.random_states = values["random states"]
        if values["optimizer steps"] is not None:
            set_step_count(trained.optimizer, values["optimizer steps"])
        for group, scalars in zip(_groups(trained), values["groups"], strict=True):
            group.update(scalars)
        if trained.lr_schedule is not None:
            vars(trained.lr_schedule).update(values["schedule"])
    # last, so that nothing above can advance the random states
    rng.restore_rng(metadata["random states"])


def _groups(trained: TrainingState) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    optimizers = [part.optimizer for part in inner_optimizers(trained.optimizer)]
    inner = [each for optimizer in optimizers for each in getattr(optimizer, "sub_optimizers", ())]
    return [group for optimizer in (*optimizers, *inner) for group in optimizer.param_groups]


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, _SCALARS)}
