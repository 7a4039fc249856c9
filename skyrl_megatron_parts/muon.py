"""Muon (arXiv:2502.16982): linear weights move along their orthogonalised momentum, all other parameters by AdamW.

Each update is that of the whole matrix, in every layout (with ``muon_tp_mode=blockwise``, of a rank's shard):
:class:`Muon` takes the place of Adam inside of Megatron's optimizers, whose shards, gathers of parameters, masters and
checkpoints stay as they are. A distributed optimizer has flat ranges of weights. The momentum is updated in these
ranges. Then the ranges of a matrix travel to one of the ranks that hold it, which gathers the shards of tensor
parallelism, orthogonalises the matrices of the weight (:class:`bridges.conversions.Blocks`: q, k, v, gate and up are
separate), and sends each range of the update back. Matrices are processed in windows that limit memory, matrices of
one shape in one batched product.

Megatron's own module (``optimizer/emerging_optimizers.py``) is not used: it orthogonalises gate and up as one matrix,
routers too, and q, k, v by one size for the model, and it cannot shard a matrix over data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from bridges.conversions import Blocks
from bridges.errors import BridgeError
from bridges.rows import Split
from bridges.rules import Entry, matrix_blocks, shard, unshard
from skyrl_megatron import device
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.checkpoint.rank_state import (
    MOMENTUM,
    HeldRange,
    held_ranges,
    inner_optimizers,
    is_distributed,
    parameters_of,
)
from skyrl_megatron.runtime.model.local_weights import weight_locations
from skyrl_megatron.runtime.partial_optimizer import RATIO, PartialOptimizer
from skyrl_megatron_lora.attach import adapter_modules
from skyrl_megatron_lora.folder import entry_of
from skyrl_megatron_parts.muon_settings import BLOCKWISE, WINDOW, MuonSettings, muon_problems, muon_settings

if TYPE_CHECKING:
    from skyrl_megatron.config import OptimizerConfig
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups
    from skyrl_megatron_lora.attach import Adapters

GROUP = "muon"
"""Key of the parameter groups of matrices."""
_EPSILON = 1e-7


@torch.no_grad()
def newton_schulz(
    matrices: Tensor, coefficients: Sequence[tuple[float, float, float]], precision: str = "highest"
) -> Tensor:
    """Orthogonalise ``matrices`` ``[…, m, n]``: the singular values become about 1, the singular vectors stay.

    Each step is X ← aX + (bA + cA²)X with A = XXᵀ, after division by the Frobenius norm. ``precision``: ``medium``
    computes in bf16, ``high`` may use TF32, ``highest`` computes in the dtype of ``matrices``.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp_min(_EPSILON)
    x = x.bfloat16() if precision == "medium" else x
    with _products(precision):
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.to(matrices.dtype)
    return orthogonal.mT if wide is not matrices else orthogonal


@contextlib.contextmanager
def _products(precision: str) -> Iterator[None]:
    """Let fp32 products use TF32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def update_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of an orthogonal update of ``[rows, columns]``, by Megatron's name (``muon_scale_mode``)."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    assert mode == "shape_scaling", mode
    return math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """This rank's shard of a linear weight: a parameter, or one expert's slice of it."""

    entry: Entry
    blocks: Blocks
    parameter: torch.nn.Parameter
    first: int
    """Its first element within the flattened parameter."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return math.prod(self.shape)


def matrices_of(model: ModelChunks, groups: ProcessGroups, key: str) -> list[Matrix]:
    """Return the trained linear weights of this rank, in the order that all ranks with shards of them have.

    Raises ConfigError, which names ``key``, for a weight whose matrices the family's table does not tell.
    """
    matrices = []
    for location in weight_locations(model, groups):
        parameter, entries = location.parameter, list(location.weights.values())
        if not parameter.requires_grad:
            continue
        for number, entry in enumerate(entries):
            try:
                blocks = matrix_blocks(entry)
            except BridgeError as error:
                raise ConfigError([Problem(key, "muon", str(error))]) from error
            if blocks is not None:
                shape = tuple(parameter.shape[-2:])
                matrices.append(Matrix(entry, blocks, parameter, number * math.prod(shape), shape))
    return matrices


def factors_of(adapters: Adapters) -> list[Matrix]:
    """Return the trained factors of linear weights' adapters, as :func:`matrices_of` returns weights.

    Each factor, A ``[rank, in]`` or B ``[out, rank]``, is a matrix of its own, as in published runs of Muon with LoRA
    (Qu et al. 2026, "Can Muon Fine-tune Adam-Pretrained Models?"). The rows of a B that serves several projections are
    separate matrices, as those of the weight are. Adapters of embedding and output layer are trained by AdamW.
    """
    matrices = []
    for adapter in (module for chunk in adapters.by_chunk for module in adapter_modules(chunk)):
        weight = entry_of(adapters, adapter, None if adapter.experts is None else adapter.experts[0])
        if (blocks := matrix_blocks(weight)) is None:
            continue
        for factor in adapter.factors():
            over = adapters.groups.etp if factor.experts is not None else adapters.groups.tp
            for number, (expert, matrix) in enumerate(factor.matrices()):
                shape = [*matrix.shape]
                if factor.split is not None:
                    shape[factor.split] *= over.size()
                factor_blocks = blocks if adapter.is_joined and factor.name.endswith(".B") else Blocks(1, (shape[0],))
                bound = replace(weight.bound, shape=tuple(shape), split=Split(factor.split, factor.parts))
                entry = replace(weight, name=factor.name, expert=expert, bound=bound)
                matrices.append(
                    Matrix(entry, factor_blocks, factor.tensor, number * matrix.numel(), tuple(matrix.shape))
                )
    return matrices


@dataclass(slots=True, eq=False)
class _Job:
    """A matrix with the ranks that hold ranges of its shard, and the rank that orthogonalises it."""

    matrix: Matrix
    holders: Mapping[int, tuple[int, int]]
    """Rank of the data-parallel group → range (start, stop) of the shard."""
    owner: int
    mine: HeldRange | None
    shard: Tensor = field(default_factory=lambda: torch.empty(0))
    """On the owner: first the momentum, then the update, flat."""


class Muon(torch.optim.Optimizer):
    """Updates matrices, and all other parameters by the Adam that it replaces in a Megatron optimizer.

    ``param_groups`` are those of ``adam``, whose state it shares; those of matrices have the key ``muon``. ``ranges``:
    what this rank updates. ``matrices``: all of this optimizer's, also those of which this rank holds nothing.
    ``group``: the ranks that share the matrices' elements, None if each holds all of them.
    """

    def __init__(
        self,
        adam: torch.optim.Optimizer,
        settings: MuonSettings,
        matrices: Sequence[Matrix],
        ranges: Sequence[HeldRange],
        groups: ProcessGroups,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups, self.state = adam.param_groups, adam.state
        for main in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[main] = {}  # in this order, whoever fills it first: peer checkpoints copy state by its order
        self.adam, self.settings = adam, settings
        self.own_groups = [param_group for param_group in self.param_groups if param_group.get(GROUP)]
        adam.param_groups = [param_group for param_group in self.param_groups if not param_group.get(GROUP)]
        self._group_of = {id(main): param_group for param_group in self.own_groups for main in param_group["params"]}
        self._groups, self._group = groups, group
        self._precision = settings.fp32_matmul_prec or ("medium" if device.has_cuda() else "highest")
        self._windows = list(_windows(self._jobs(matrices, ranges)))

    def _jobs(self, matrices: Sequence[Matrix], ranges: Sequence[HeldRange]) -> list[_Job]:
        """Agree with the group on who holds and who orthogonalises which matrix. Work is balanced over its ranks."""
        held = {id(held_range.parameter): held_range for held_range in ranges if id(held_range.main) in self._group_of}
        own_spans: dict[int, tuple[int, int]] = {}
        for index, matrix in enumerate(matrices):
            if (held_range := held.get(id(matrix.parameter))) is not None:
                start, stop = (
                    min(max(at - matrix.first, 0), matrix.numel) for at in (held_range.start, held_range.stop)
                )
                if start < stop:
                    own_spans[index] = (start, stop)
        everyone: list[Any] = [own_spans]
        if self._group is not None:
            everyone = [None] * self._group.size()
            dist.all_gather_object(everyone, own_spans, group=self._group)
        work: dict[int, float] = defaultdict(float)
        jobs = []
        for index, matrix in enumerate(matrices):
            holders = {rank: spans[index] for rank, spans in enumerate(everyone) if index in spans}
            owner = min(holders, key=lambda rank: (work[rank], rank))
            work[owner] += math.prod(matrix.entry.shape) * min(matrix.entry.shape)
            jobs.append(_Job(matrix, holders, owner, held.get(id(matrix.parameter))))
        return jobs

    @property
    def scale_invariant(self) -> set[int]:
        """``id`` of every tensor whose update does not depend on the scale of its gradient."""
        return set(self._group_of)

    def make_state(self) -> None:
        """Create missing momentum as zeros."""
        for group in self.own_groups:
            for main in group["params"]:
                if not self.state[main]:
                    self.state[main][MOMENTUM] = torch.zeros_like(main)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. Collective over the ranks that share matrices, and over tensor parallelism."""
        assert closure is None
        if any(group["params"] for group in self.adam.param_groups):
            self.adam.step()
        self.make_state()
        for group in self.own_groups:
            for main in group["params"]:
                self.state[main][MOMENTUM].lerp_(main.grad, 1 - self.settings.momentum)
        for window in self._windows:
            self._to_owners(window)
            self._orthogonalise([job for job in window if job.owner == self._rank])
            self._apply(window)

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def _to_owners(self, window: Sequence[_Job]) -> None:
        """Bring the directions (the momentum, with Nesterov's step) of each matrix to its owner."""
        outgoing: dict[int, list[Tensor]] = defaultdict(list)
        incoming: dict[int, list[Tensor]] = defaultdict(list)
        for job in window:
            if job.owner == self._rank:
                job.shard = torch.empty(job.matrix.numel, dtype=torch.float32, device=device.device())
                for rank, (start, stop) in job.holders.items():
                    if rank == self._rank:
                        job.shard[start:stop] = self._direction(job)
                    else:
                        incoming[rank].append(job.shard[start:stop])
            elif self._rank in job.holders:
                outgoing[job.owner].append(self._direction(job))
        self._exchange(outgoing, incoming)

    def _direction(self, job: _Job) -> Tensor:
        assert job.mine is not None and job.mine.main.grad is not None
        momentum = self._range(job, self.state[job.mine.main][MOMENTUM])
        if not self.settings.nesterov:
            return momentum
        return self._range(job, job.mine.main.grad).lerp(momentum, self.settings.momentum)

    def _range(self, job: _Job, tensor: Tensor) -> Tensor:
        """Return this rank's range of a matrix out of a tensor of the held range, flat."""
        assert job.mine is not None
        start, stop = (job.matrix.first + at - job.mine.start for at in job.holders[self._rank])
        return tensor.view(-1)[start:stop]

    def _exchange(self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[Tensor]]) -> None:
        """Send lists of flat tensors to ranks of the group, and fill those that come from them."""
        buffers = {rank: torch.cat([torch.empty_like(part) for part in parts]) for rank, parts in incoming.items()}
        operations = [
            dist.P2POp(dist.isend, torch.cat(parts), group=self._group, group_peer=rank)
            for rank, parts in sorted(outgoing.items())
        ] + [
            dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=rank)
            for rank, buffer in sorted(buffers.items())
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for rank, buffer in buffers.items():
            for part, arrived in zip(
                incoming[rank], buffer.split([len(part) for part in incoming[rank]]), strict=True
            ):
                part.copy_(arrived)

    def _orthogonalise(self, jobs: Sequence[_Job]) -> None:
        """Replace the directions of matrices by their updates. Collective over tensor parallelism."""
        alone = self.settings.tp_mode == BLOCKWISE
        wholes = [job.shard.view(job.matrix.shape) for job in jobs] if alone else self._gathered(jobs)
        layouts = [self._own_blocks(job.matrix) if alone else job.matrix.blocks for job in jobs]
        blocks = [layout.split(matrix) for layout, matrix in zip(layouts, wholes, strict=True)]
        same: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for index, parts in enumerate(blocks):
            for number, part in enumerate(parts):
                same[tuple(part.shape)].append((index, number))
        for (rows, columns), places in same.items():
            factor = update_scale(rows, columns, self.settings.scale_mode) * self.settings.extra_scale_factor
            stacked = torch.stack([blocks[index][number] for index, number in places])
            updates = newton_schulz(stacked, self.settings.coefficients(), self._precision) * factor
            for (index, number), update in zip(places, updates, strict=True):
                blocks[index][number] = update
        for job, layout, parts in zip(jobs, layouts, blocks, strict=True):
            over, matrix = self._over(job.matrix), layout.join(parts)
            own_part = matrix if alone else shard(matrix, job.matrix.entry, over.size(), over.rank())
            job.shard = own_part.reshape(-1)

    def _own_blocks(self, matrix: Matrix) -> Blocks:
        """Return the linear maps of this rank's shard."""
        return matrix.blocks.shard(self._over(matrix).size()) if matrix.entry.split.dim == 0 else matrix.blocks

    def _over(self, matrix: Matrix) -> dist.ProcessGroup:
        return self._groups.etp if matrix.entry.is_expert else self._groups.tp

    def _gathered(self, jobs: Sequence[_Job]) -> list[Tensor]:
        """Return the whole weights ``[entry.shape]`` of shards, by one gather for each group."""
        shares: dict[int, list[Tensor]] = {}
        for expert in (False, True):
            over = self._groups.etp if expert else self._groups.tp
            split = [
                (index, job)
                for index, job in enumerate(jobs)
                if job.matrix.entry.is_expert == expert and job.matrix.entry.split.dim is not None and over.size() > 1
            ]
            if not split:
                continue
            flat = torch.cat([job.shard for _, job in split])
            everyone = [torch.empty_like(flat) for _ in range(over.size())]
            dist.all_gather(everyone, flat, group=over)
            parts = [gathered.split([job.matrix.numel for _, job in split]) for gathered in everyone]
            for number, (index, _) in enumerate(split):
                shares[index] = [rank_parts[number] for rank_parts in parts]
        weights = []
        for index, job in enumerate(jobs):
            shards = shares.get(index, [job.shard])
            weights.append(unshard([part.view(job.matrix.shape) for part in shards], job.matrix.entry))
        return weights

    def _apply(self, window: Sequence[_Job]) -> None:
        """Send each range of the updates to the rank that holds it, decay the weights and subtract the updates."""
        outgoing: dict[int, list[Tensor]] = defaultdict(list)
        incoming: dict[int, list[Tensor]] = defaultdict(list)
        updates: list[tuple[_Job, Tensor]] = []
        for job in window:
            if job.owner == self._rank:
                for rank, (start, stop) in job.holders.items():
                    if rank != self._rank:
                        outgoing[rank].append(job.shard[start:stop])
            if self._rank in job.holders:
                start, stop = job.holders[self._rank]
                if job.owner == self._rank:
                    updates.append((job, job.shard[start:stop]))
                else:
                    updates.append((job, torch.empty(stop - start, dtype=torch.float32, device=device.device())))
                    incoming[job.owner].append(updates[-1][1])
        self._exchange(outgoing, incoming)
        for job, update in updates:
            assert job.mine is not None
            group, weight = self._group_of[id(job.mine.main)], self._range(job, job.mine.main)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            job.shard = torch.empty(0)


class MuonInAdam(PartialOptimizer):
    """Muon for the matrices of a model, or of its adapters."""

    def __init__(self, model: ModelChunks, groups: ProcessGroups, adapters: Adapters | None, key: str) -> None:
        self.matrices = matrices_of(model, groups, key) if adapters is None else factors_of(adapters)
        self.groups = groups
        self.section = key.replace("optimizer_config.optimizer", "megatron_config.optimizer_config_kwargs.")

    def overrides(self, settings: OptimizerConfig) -> dict[ParamKey, Any]:
        """Give matrices groups of their own, and the other parameters their rate as a ratio of the schedule's."""
        ids = {id(matrix.parameter) for matrix in self.matrices}
        rest: dict[str, float] = {}
        if settings.adam_lr is not None:
            rest[RATIO] = settings.adam_lr / settings.lr if settings.lr else 1.0
        chosen = {
            ParamPredicate(name="matrix", fn=lambda parameter: id(parameter) in ids): {GROUP: 1.0},
            ParamPredicate(name="no matrix", fn=lambda parameter: id(parameter) not in ids): rest,
        }
        return {ParamKey(predicate=which): change for which, change in chosen.items() if change}

    def install(self, optimizer: Any, options: Mapping[str, Any]) -> None:
        """Replace Adam inside of each of Megatron's optimizers of this rank by :class:`Muon`. Raises ConfigError."""
        # the rules of a configuration say it before, but not to a script that builds its engine itself
        if problems := list(muon_problems("muon", options, self.section)):
            raise ConfigError(problems)
        settings = muon_settings(options)
        for part in inner_optimizers(optimizer):
            ranges = list(held_ranges(part))
            group = getattr(part, "data_parallel_group", None) if is_distributed(part) else None
            ids = {id(parameter) for parameter in parameters_of(part)}
            matrices = [matrix for matrix in self.matrices if id(matrix.parameter) in ids]
            part.optimizer = Muon(part.optimizer, settings, matrices, ranges, self.groups, group)


def _windows(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Cut the list of matrices into runs of at most ``WINDOW`` elements, equal on all ranks."""
    window: list[_Job] = []
    size = 0
    for job in jobs:
        numel = math.prod(job.matrix.entry.shape)
        if window and size + numel > WINDOW:
            yield window
            window, size = [], 0
        window.append(job)
        size += numel
    if window:
        yield window
