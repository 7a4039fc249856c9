"""Micro-batches whose routes load all EP ranks alike: the collective part of ``experts/levelling.py``.

An EP group spans the ranks of one or several replicas, of one pipeline stage. All of its ranks gather the rows, plans
and loads of these replicas and compute the same plan; so do the groups of the other stages, which have the same rows.
Where a group spans a part of a replica only, as with tp·cp above ep·etp, it sees a part of each sequence; the plan
then levels the sum over the groups of the replica.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.config.roles import balances_experts
from skyrl_megatron.data.splitting import aligned
from skyrl_megatron.runtime.flops import expert_flops
from skyrl_megatron.runtime.packed_inputs import find_route_problem
from skyrl_megatron.runtime.parallel_state import raise_on_all_ranks
from skyrl_megatron.runtime.parts import PartSetup, RankPart
from skyrl_megatron_parts.experts.levelling import ReplicaRows, balance_experts, planned_layers, rank_loads

if TYPE_CHECKING:
    from skyrl_megatron.data.prefixes import SharedPrefixes
    from skyrl_megatron.types import TrainingBatch


class ExpertBalance(RankPart):
    """Regroups the rows of micro-batches for ``moe_balance_experts``."""

    name = "expert_balance"

    @classmethod
    def acts(cls, setup: PartSetup) -> bool:
        """Return whether the role balances experts, and its model has some."""
        return balances_experts(setup.cfg, setup.role) and bool(setup.model.config.num_moe_experts)

    def __init__(self, setup: PartSetup) -> None:
        super().__init__(setup)
        self.model, self.groups, flops = setup.model, setup.groups, setup.flops
        self.max_tokens = max(setup.cfg.trainer.max_tokens_per_microbatch, 0)
        """Of a micro-batch; 0: its number of rows is fixed."""
        config, parallel = self.model.config, self.groups.parallel
        experts = [layer for layer, is_moe in enumerate(self.model.hf.plan.shape.moe) if is_moe]
        self.route_layers = self.layers = planned_layers(experts, parallel.ep)
        self._flops, (self._unit, layers) = flops, expert_flops(config)
        self._routes = config.moe_router_topk * layers
        """Experts that a token visits."""
        shards, share = parallel.tp * parallel.cp, parallel.ep * parallel.etp
        self._scale = len(self.layers) / layers * parallel.etp * max(shards // share, 1) / shards
        self._measured: list[list[float]] = []

    def plan(
        self,
        batch: TrainingBatch,
        units: Sequence[np.ndarray],
        plan: list[np.ndarray],
        rows: int,
        prefixes: SharedPrefixes | None,
    ) -> list[np.ndarray]:
        """Return the units of each micro-batch of this replica, ``plan`` if no row of the EP group has routes.

        Raises the same ValueError on all ranks for routes that the model cannot replay.
        """
        started = time.perf_counter()
        own_rows, problem = None, None
        try:
            own_rows = self._rows(batch, units, plan, prefixes)
        except (IndexError, ValueError) as error:
            problem = find_route_problem(batch, self.model, "natural") or ValueError(f"routes of the batch: {error}")
        raise_on_all_ranks(problem)
        gathered: list[Any] = [None] * self.groups.ep.size()
        dist.all_gather_object(gathered, (self.groups.dp.rank(), own_rows), group=self.groups.ep)
        by_replica: dict[int, ReplicaRows] = dict(gathered)  # ranks of one replica sent the same
        order = sorted(by_replica)
        replicas = [by_replica[number] for number in order]
        if not any(replica.loads.any() for replica in replicas):
            return plan
        largest = max(int(replica.tokens[micro_batch].sum()) for replica in replicas for micro_batch in replica.plan)
        plans, imbalance = balance_experts(
            replicas, max_tokens=self.max_tokens or largest, max_rows=None if self.max_tokens else rows
        )
        self._measured.append(
            [1.0, imbalance.plain, imbalance.balanced, imbalance.bound, time.perf_counter() - started]
        )
        return plans[order.index(self.groups.dp.rank())]

    def _rows(
        self,
        batch: TrainingBatch,
        parts: Sequence[np.ndarray],
        plain: list[np.ndarray],
        prefixes: SharedPrefixes | None,
    ) -> ReplicaRows:
        lengths, alignment = batch.lengths, self.groups.parallel.alignment
        # a row counts from the first token that no row of its part before it has
        begins = np.zeros(len(lengths), np.int64)
        if prefixes is not None:
            for part in parts:
                chosen, shared = prefixes.among(part)
                begins[chosen] = shared
        computed, routes = lengths - begins, batch.rollout_routes or [None] * len(batch)
        routes = [None if route is None else route[begin:] for route, begin in zip(routes, begins, strict=True)]
        ranks = np.array([self.model.experts.ranks_of(layer) for layer in self.layers])
        flops = self._flops.forward(lengths) - self._flops.forward(begins)
        other = flops / self._unit - computed * self._routes
        rows = (
            aligned(computed, alignment),
            np.rint(np.maximum(other, 0.0) * self._scale).astype(np.int64),
            rank_loads(routes, computed, self.layers, ranks),
        )
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        order = np.concatenate([*parts, np.zeros(0, np.int64)])
        sums = [np.add.reduceat(quantity[order], starts, dtype=np.int64) for quantity in rows]
        if prefixes is not None:  # a branch may cut a segment in two, and both are padded
            sums[0] = np.array([prefixes.tokens(part, lengths, alignment) for part in parts], np.int64)
        return ReplicaRows(plain, *sums)

    def begin_pass(self) -> None:
        """Drop the measurements of passes without gradients."""
        self._measured.clear()

    def end_pass(self, loads: Mapping[int, Tensor]) -> dict[str, float]:
        """Return the metrics of the plans of the pass, as means over them and over all replicas; {} without a plan."""
        sums = torch.tensor(self._measured, dtype=torch.float64).reshape(-1, 5).sum(0).to(device.device())
        self._measured.clear()
        dist.all_reduce(sums)
        count, *values = sums.tolist()
        names = (
            "moe_microbatch_imbalance_plain",
            "moe_microbatch_imbalance",
            "moe_microbatch_imbalance_bound",
            "moe_balance_s",
        )
        return {name: value / count for name, value in zip(names, values, strict=True)} if count else {}
