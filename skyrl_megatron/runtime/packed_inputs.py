"""Packed input tensors of micro-batches, and checks of a mini-batch before a training step.

A packed micro-batch is one row of P tokens. Each sequence is padded at its end to the layout's alignment
(``ParallelConfig.alignment``) and attends only to itself. With ``padded=True`` all sequences are padded to the longest
and run as a [b, S] batch. This is slower; it is for debugging and for models that do not support packing.

With a :class:`PrefixTree` the pack has each segment of the rows once. A position may then predict several tokens: the
first tokens of the segments after it. Each such pair of position and token is an edge. Every position has one edge,
and the further ones follow after the positions, so that log-probs are [p + x] for p positions and x further edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.data.prefixes import PrefixTree
from skyrl_megatron.runtime.model.attention import UnfoldedRows, gather_tokens, local_positions
from skyrl_megatron.runtime.model.moe import routers_of
from skyrl_megatron.runtime.model.pass_inputs import SequenceNumbers
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.runtime.softmax import Support
from skyrl_megatron.types import OWN_LOGPROBS, PaddedBatch, TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.runtime.model.build import ModelChunks


POLICY_READS: tuple[str, ...] = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
CRITIC_READS: tuple[str, ...] = ("values", "returns")
CHECKED_ROUTES = 1 << 20
"""Maximum tokens × layers of a mini-batch whose routes are checked. A larger batch is sampled at an even stride."""


def too_long(batch: TrainingBatch, max_positions: int | None) -> Exception | None:
    """Return an error if a sequence exceeds the model's positions, else None."""
    longest = int(batch.lengths.max(initial=0))
    if max_positions and longest > max_positions:
        return ValueError(f"a sequence of {longest} tokens exceeds the model's {max_positions} positions")
    return None


def find_problem(batch: TrainingBatch, objective: Objective) -> Exception | None:
    """Return an error if a field that ``objective`` reads is missing or not finite, else None."""
    read = CRITIC_READS
    if isinstance(objective, PolicyObjective):
        read = POLICY_READS
        if batch.advantages is None:
            return ValueError("the batch has no advantages: compute them before the training step")
        if objective.needs_old_log_probs and batch.old_logprobs is None and not batch.metadata.get(OWN_LOGPROBS):
            return ValueError(f"the policy loss {objective.name!r} reads old log-probs: the batch has none")
    elif batch.values is None or batch.returns is None:
        missing = "values" if batch.values is None else "returns"
        return ValueError(f"the batch has no {missing}: the critic's step reads values before the update and returns")
    for name in read:
        values = getattr(batch, name)
        if values is not None:
            bad = ~torch.isfinite(values) & batch.loss_mask
            if bad.any():
                position = int(bad.nonzero()[0])
                row, token = batch.responses.row_of(position)
                uid = f" (uid {batch.uids[row]})" if batch.uids else ""
                return ValueError(f"{name} is {values[position]} at row {row}{uid}, response token {token}")
    return None


def find_route_problem(batch: TrainingBatch, model: ModelChunks, missing: str) -> Exception | None:
    """Return an error if the layers of ``model`` on this rank cannot replay the routes of ``batch``, else None.

    With ``missing="error"`` tokens without routes are an error too.
    """
    shape, config = model.hf.plan.shape, model.config
    layers = [router.layer_number - 1 for router in routers_of(model.chunks)]
    absent = _missing_routes(batch) if missing == "error" else None
    return absent or _bad_routes(batch, layers, len(shape.moe), config.num_moe_experts, config.moe_router_topk)


def _bad_routes(
    batch: TrainingBatch, replayed: Sequence[int], layers: int, experts: int, topk: int
) -> Exception | None:
    """Return an error, with uid, token and layer, if a route is not valid, else None.

    A valid route is ``topk`` different experts below ``experts``, in each of the ``replayed`` layers; ``layers``: the
    number of all layers.
    """
    recorded = [(row, routes) for row, routes in enumerate(batch.rollout_routes) if routes is not None]
    # Sorting all routes of a long batch takes long; an engine of another model shows in any sample.
    stride = max(-(-sum(len(routes) for _, routes in recorded) * len(replayed) // CHECKED_ROUTES), 1)
    for row, routes in recorded:
        uid = batch.uids[row] if batch.uids else row
        if routes.shape[1:] != (layers, topk):
            return ValueError(
                f"uid {uid}: the engine's routes have {routes.shape[1]} layers and {routes.shape[2]} experts per "
                f"token, the model has {layers} layers and {topk} experts per token: use one model for engine and "
                "trainer"
            )
        checked = np.sort(routes[::stride, list(replayed)], axis=-1)
        wrong = (checked >= experts).any(-1) | (checked[..., 1:] == checked[..., :-1]).any(-1)
        if wrong.any():
            token, index = (int(position) for position in np.argwhere(wrong)[0])
            token, layer = token * stride, replayed[index]
            return ValueError(
                f"uid {uid}, token {token}, layer {layer}: the engine's route {routes[token, layer].tolist()} does "
                f"not have {topk} different experts from 0 to {experts - 1}"
            )
    return None


def _missing_routes(batch: TrainingBatch) -> Exception | None:
    """Return an error if a token before a trained token has no route, else None."""
    mask, responses = batch.loss_mask.numpy(), batch.responses
    for row, (length, of_response) in enumerate(zip(batch.lengths.tolist(), responses.lengths.tolist(), strict=True)):
        trained = np.flatnonzero(mask[responses.of(row)])
        needed = length - (of_response - int(trained[-1])) if len(trained) else 0
        routes = batch.rollout_routes[row] if batch.rollout_routes else None
        if (routed := 0 if routes is None else len(routes)) < needed:
            return ValueError(
                f"uid {batch.uids[row] if batch.uids else row}: the engine returned no experts for token {routed} of "
                f"{needed} before the last trained token: look for the cause in the engine's log, or set "
                "moe_routing_replay_missing=natural"
            )
    return None


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One micro-batch on this rank: b rows in s segments (without shared prefixes the rows themselves), P packed
    tokens over all cp ranks, p = P / cp tokens on this rank."""

    tokens: Tensor
    """[1, p] int64 (padded: [b, S])."""
    position_ids: Tensor
    """[1, p] int64 (padded: [b, S]): position of each token in its row."""
    targets: Tensor
    """[p + x] int64 (padded: [b·S]): the token of each edge; 0 after the last of a row."""
    further_targets: Tensor
    """[p] int64 (padded: [b·S]): the token after the next; 0 if there is none. Not with shared prefixes."""
    padding_mask: Tensor
    """[1, p] bool (padded: [b, S]): True on padding. Routers must not count it."""
    params: PackedSeqParams | None
    """Boundaries of segments for attention; None when padded."""
    padded_lengths: tuple[int, ...]
    """Length of each segment in the pack, padding included."""
    response_columns: Tensor
    """[b, T] int64: the edge that predicts response token (row, t), in the order of :meth:`_whole`; 0 if the row has
    no token t."""
    source_columns: Tensor
    """[b, T] int64: the position before response token (row, t), in the packed global order; 0 if there is none."""
    response_valid: Tensor
    """[b, T] bool: whether the row has a response token t."""
    groups: ProcessGroups
    further_sources: Tensor | None = None
    """[x] int64: the position, of p, of each further edge; those that fill up the ranks are of position 0. None: x is
    0 on every cp rank."""
    row_positions: tuple[Tensor, ...] | None = None
    """[n] int64 of each row: where its tokens are in the packed global order. None: the rows are the segments."""
    support: Support | None = None
    """The tokens that the token of each edge was sampled from; None: the whole vocabulary."""
    routes: Mapping[int, Tensor] | None = None
    """Layer of the model → [t, K] int16, experts of the t tokens that the layer's router sees on this rank (with tp, a
    part of p); -1 for tokens without a route. None: the model routes."""
    sequences: SequenceNumbers | None = None
    """The sequences of these t tokens. None: no router asks for them."""
    copies: Tensor | None = None
    """[t] float32: rows that have each of these t tokens. None: one, for all of them."""

    def model_arguments(self) -> dict[str, object]:
        """Return the keyword arguments of ``GPTModel.forward``."""
        arguments: dict[str, object] = {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "packed_seq_params": self.params,
            "padding_mask": self.padding_mask,
        }
        for name in ("routes", "sequences", "copies"):  # the model takes them if its routers read them
            if (value := getattr(self, name)) is not None:
                arguments[name] = value
        return arguments

    def at_edges(self, per_token: Tensor) -> Tensor:
        """Map values at this rank's positions, [p, …] → [p + x, …] at its edges; differentiable."""
        if self.further_sources is None:
            return per_token
        return torch.cat([per_token, per_token.index_select(0, self.further_sources)])

    def to_responses(self, per_edge: Tensor) -> Tensor:
        """Map values at edges, [p + x, …] per cp rank → [b, T, …] on every rank, 0 without a token.

        Differentiable, if all cp ranks compute the same loss from the result.
        """
        return self._picked(self._whole(per_edge), self.response_columns)

    def sources_to_responses(self, per_token: Tensor) -> Tensor:
        """Map values at predicting positions, [p, …] per cp rank → [b, T, …], as :meth:`to_responses`."""
        whole = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        return self._picked(whole, self.source_columns)

    def _whole(self, per_edge: Tensor) -> Tensor:
        """Gather [p + x, …] per cp rank → [P + x · cp, …]: positions in the packed global order, further edges."""
        local = self.targets.shape[0] - (0 if self.further_sources is None else len(self.further_sources))
        cp = self.groups.cp
        whole = gather_tokens(per_edge[:local], self.padded_lengths, cp, shared_loss=True)
        if self.further_sources is None:
            return whole
        further = (len(self.further_sources) * cp.size(),)
        return torch.cat([whole, gather_tokens(per_edge[local:], further, cp, shared_loss=True)])

    def _picked(self, whole: Tensor, columns: Tensor) -> Tensor:
        valid = self.response_valid.view(*self.response_valid.shape, *[1] * (whole.dim() - 1))
        return torch.where(valid, whole[columns], 0.0)

    def further_responses(self, per_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return (values two positions before each response token, valid), [b, T] each.

        Valid is False for the second token of a sequence, which has no such position. Not with shared prefixes.
        """
        assert self.row_positions is None
        pack = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        lengths = torch.tensor(self.padded_lengths, device=pack.device)
        begins = (lengths.cumsum(0) - lengths)[:, None]
        valid = self.response_valid & (self.response_columns > begins)
        return torch.where(valid, pack[torch.where(valid, self.response_columns - 1, 0)], 0.0), valid

    def to_rows(self, seen: Tensor) -> list[Tensor]:
        """Map values of this rank's layers, [s, b, …] → one [n, …] per row, with padding, on every tp and cp rank."""
        if self.groups.parallel.sequence_parallel:
            parts = [torch.empty_like(seen) for _ in range(self.groups.tp.size())]
            dist.all_gather(parts, seen.contiguous(), group=self.groups.tp)
            seen = torch.cat(parts)
        tokens = seen.transpose(0, 1).flatten(0, 1)
        pack = gather_tokens(tokens, self.padded_lengths, self.groups.cp, shared_loss=True)
        if self.row_positions is None:
            return list(pack.split(self.padded_lengths))
        return [pack.index_select(0, positions) for positions in self.row_positions]

    def to_edges(self, per_response: Tensor) -> Tensor:
        """Map [b, T, …] → [p + x, …]: each value at the edge that predicts its token; 0 elsewhere."""
        cp, positions = self.groups.cp, sum(self.padded_lengths)
        further = 0 if self.further_sources is None else len(self.further_sources)
        whole = per_response.new_zeros(positions + further * cp.size(), *per_response.shape[2:])
        whole[self.response_columns[self.response_valid]] = per_response[self.response_valid]
        local = _local_edges(self.padded_lengths, further, cp.size(), cp.rank())
        return whole[local.to(whole.device)]


def _local_edges(padded_lengths: tuple[int, ...], further: int, cp: int, rank: int) -> Tensor:
    """Return where the edges of a rank are in the order of :meth:`PackedInputs._whole`, [p + further] int64."""
    positions = local_positions(padded_lengths, cp, rank)
    if not further:
        return positions
    return torch.cat([positions, sum(padded_lengths) + local_positions((further * cp,), cp, rank)])


@dataclass(frozen=True, slots=True)
class _Edges:
    """Which edge predicts each response token, and the edges beyond one for each position."""

    columns: Tensor
    """[b, T] int64, as ``PackedInputs.response_columns``."""
    sources: Tensor
    """[b, T] int64, as ``PackedInputs.source_columns``."""
    valid: Tensor
    """[b, T] bool."""
    targets: Tensor
    """[P + x · cp] int64: the token of each edge, in the order of ``PackedInputs._whole``."""
    further: Tensor | None = None
    """[x · cp] int64: position of each further edge in the pack; -1 for those that fill up the ranks."""
    here: Tensor | slice = field(default=slice(None))
    """[p + x] int64: this rank's edges in that order."""


def pack(
    batch: PaddedBatch,
    groups: ProcessGroups,
    device: torch.device,
    *,
    padded: bool = False,
    replayed: Sequence[int] = (),
    by_sequence: bool = False,
    tree: PrefixTree | None = None,
) -> PackedInputs:
    """Pack the rows of ``batch`` as one micro-batch. A batch without rows becomes one sequence of padding.

    ``replayed``: layers of this rank whose routers replay the routes of the batch. ``by_sequence``: routers read which
    sequence a token is in. ``tree``: the segments of the rows, which must have the same routes where they share
    tokens; None: they share nothing.
    """
    lengths = [int(length) for length in batch.lengths]
    if tree is None or tree.is_flat or not len(tree):
        tree = PrefixTree.separate(lengths)
    # A collective runs for a pack without rows too, so it becomes a sequence of padding.
    sizes = tree.lengths.tolist() or [0]
    alignment = groups.parallel.alignment
    width = max(-(-max(sizes) // alignment) * alignment, alignment)
    padded_lengths = tuple(width if padded else max(-(-n // alignment) * alignment, alignment) for n in sizes)
    total = sum(padded_lengths)
    starts = np.cumsum(padded_lengths) - padded_lengths

    tokens = torch.zeros(total, dtype=torch.int64)
    padding = torch.ones(total, dtype=torch.bool)
    begins = torch.from_numpy(starts)
    depths = torch.from_numpy(tree.begins) if len(tree) else torch.zeros(1, dtype=torch.int64)
    positions = torch.arange(total) - (begins - depths).repeat_interleave(torch.tensor(padded_lengths))
    rows_tokens = [line[len(line) - n :] for line, n in zip(batch.sequences.cpu(), lengths, strict=True)]
    for start, begin, size, row in zip(starts.tolist(), tree.begins, tree.lengths, tree.rows, strict=False):
        tokens[start : start + size] = rows_tokens[row][begin : begin + size]
        padding[start : start + size] = False
    row_positions = _row_positions(tree, starts)

    cp = groups.cp
    edges = _edges(batch, tree, tokens, padding, begins, row_positions, padded_lengths, groups)
    # The next position belongs to another sequence, or to padding: 0 is a valid token whose loss nobody reads.
    targets = edges.targets[:total]
    further = targets.roll(-1).masked_fill(_nothing_follows(padding, begins), 0)
    local: Tensor | slice = slice(None)
    if padded:
        # The split over cp follows the boundaries of the pack, which a padded batch does not have.
        assert cp.size() == 1, "padded inputs cannot be split over context-parallel ranks"
        assert tree.is_flat, "shared prefixes need packed inputs"
        shape, params = (len(padded_lengths), width), None
    else:
        local = local_positions(padded_lengths, cp.size(), cp.rank())
        tokens, further, positions, padding = (values[local] for values in (tokens, further, positions, padding))
        shape = (1, len(tokens))
        params = _sequence_params(padded_lengths, tree, row_positions, positions, padding, device)
    here = local if isinstance(edges.here, slice) else edges.here
    further_sources = None
    if edges.further is not None:
        local_of = torch.zeros(total, dtype=torch.int64)
        local_of[local] = torch.arange(len(tokens.flatten()))
        of_rank = edges.further[local_positions((len(edges.further),), cp.size(), cp.rank())]
        further_sources = local_of[of_rank.clamp(min=0)].masked_fill(of_rank < 0, 0).to(device)
    is_flat = tree.is_flat
    return PackedInputs(
        tokens=tokens.view(shape).to(device),
        position_ids=positions.view(shape).to(device),
        targets=edges.targets[here].to(device),
        further_targets=further.to(device),
        padding_mask=padding.view(shape).to(device),
        params=params,
        padded_lengths=padded_lengths,
        response_columns=edges.columns.to(device),
        source_columns=edges.sources.to(device),
        response_valid=edges.valid.to(device),
        groups=groups,
        further_sources=further_sources,
        row_positions=None if is_flat else tuple(index.to(device) for index in row_positions),
        support=_support(batch, edges, here, device),
        routes=_routes(batch, tree, starts, total, local, shape, replayed, groups, device),
        sequences=_sequences(tree, padded_lengths, local, shape, groups, device) if by_sequence else None,
        copies=None if is_flat else _copies(tree, padded_lengths, local, shape, groups, device),
    )


def _row_positions(tree: PrefixTree, starts: np.ndarray) -> list[Tensor]:
    """Return where the tokens of each row are in the pack, [n] int64 each. ``starts``: [s] of the segments."""
    whole: list[np.ndarray] = []
    for segment in range(len(tree)):
        own = np.arange(starts[segment], starts[segment] + tree.lengths[segment])
        parent = int(tree.parents[segment])
        whole.append(own if parent < 0 else np.concatenate([whole[parent], own]))
    none = np.zeros(0, np.int64)
    return [torch.from_numpy(whole[last] if last >= 0 else none) for last in tree.last.tolist()]


def _nothing_follows(padding: Tensor, begins: Tensor) -> Tensor:
    """Return [P] bool: whether the next position is padding, or begins a segment."""
    starts = torch.zeros_like(padding)
    starts[begins] = True
    return torch.cat([(padding | starts)[1:], padding.new_ones(1)])


def _edges(
    batch: PaddedBatch,
    tree: PrefixTree,
    tokens: Tensor,
    padding: Tensor,
    begins: Tensor,
    row_positions: Sequence[Tensor],
    padded_lengths: tuple[int, ...],
    groups: ProcessGroups,
) -> _Edges:
    """Return the edges of the response tokens. Rows share an edge if it predicts the same token and nothing else that
    its log-probs are computed with (sampling support, a teacher's top-k) differs.

    Response token t of a row is T − t positions before the row's end, and the position before it predicts it. No
    position predicts the first token of a row, so a response never includes it.
    """
    targets = tokens.roll(-1).masked_fill(_nothing_follows(padding, begins), 0)
    rows, width = len(batch), batch.response_mask.shape[1]
    if not rows:
        none = torch.zeros(1, width, dtype=torch.int64)
        return _Edges(none, none, none.bool(), targets)
    sources, predicted = torch.zeros(2, rows, width, dtype=torch.int64)
    valid = torch.zeros(rows, width, dtype=torch.bool)
    shown = batch.response_mask.cpu() > 0
    for row, where in enumerate(row_positions):
        count = min(width, len(where) - 1)
        if count > 0:
            of_row = slice(width - count, width)
            sources[row, of_row], predicted[row, of_row] = where[-count - 1 : -1], tokens[where[-count:]]
            valid[row, of_row] = shown[row, of_row]
    sources = torch.where(valid, sources, 0)
    if tree.is_flat:
        return _Edges(sources, sources, valid, targets)
    by_row = bool(batch.rollout_support) or batch.teacher_top_ids is not None
    numbers = torch.arange(rows)[:, None].expand_as(sources) if by_row else predicted
    needed = torch.stack([sources[valid], numbers[valid], predicted[valid]], 1)
    # sorted by position: the first edge of each has the place of the position
    unique, edge_of = needed.unique(dim=0, return_inverse=True)
    is_first = torch.ones(len(unique), dtype=torch.bool)
    is_first[1:] = unique[1:, 0] != unique[:-1, 0]
    targets[unique[is_first, 0]] = unique[is_first, 2]
    others = unique[~is_first]
    if not len(others):
        columns = torch.where(valid, sources, 0)
        return _Edges(columns, sources, valid, targets)
    cp, total = groups.cp, len(tokens)
    owners = torch.zeros(total, dtype=torch.int64)
    for rank in range(cp.size()):
        owners[local_positions(padded_lengths, cp.size(), rank)] = rank
    owner = owners[others[:, 0]]
    most = int(torch.bincount(owner, minlength=cp.size()).max())
    most += most % 2 if cp.size() > 1 else 0  # a rank has two equal chunks
    further = torch.full((most * cp.size(),), -1, dtype=torch.int64)
    further_targets, number = torch.zeros_like(further), torch.zeros(len(others), dtype=torch.int64)
    for rank in range(cp.size()):
        of_rank = (owner == rank).nonzero().squeeze(1)
        taken = local_positions((most * cp.size(),), cp.size(), rank)[: len(of_rank)]
        further[taken], further_targets[taken] = others[of_rank, 0], others[of_rank, 2]
        number[of_rank] = taken
    column = unique[:, 0].clone()
    column[~is_first] = total + number
    columns = torch.zeros_like(sources)
    columns[valid] = column[edge_of]
    here = _local_edges(padded_lengths, most, cp.size(), cp.rank())
    return _Edges(columns, sources, valid, torch.cat([targets, further_targets]), further, here)


def _support(batch: PaddedBatch, edges: _Edges, here: Tensor | slice, device: torch.device) -> Support | None:
    """Return the sampling support of the tokens of this rank's edges."""
    if not batch.rollout_support:
        return None
    # of each edge: its entries, and the first of them among all
    counts, first = np.zeros((2, len(edges.targets)), np.int64)
    columns, valid, before, pieces = edges.columns.numpy(), edges.valid.numpy(), 0, [np.zeros(0, np.uint16)]
    for support, of_row, shown in zip(batch.rollout_support, columns, valid, strict=True):
        predicted = support.last(min(len(support), len(of_row)))
        of_row, shown = (values[len(values) - len(predicted) :] for values in (of_row, shown))
        starts = before + np.cumsum(predicted.counts, dtype=np.int64) - predicted.counts
        counts[of_row[shown]], first[of_row[shown]] = predicted.counts[shown], starts[shown]
        before += len(predicted.ids)
        pieces.append(predicted.ids)
    chosen = here.numpy() if isinstance(here, Tensor) else here
    counts, first = counts[chosen], first[chosen]
    # the entries of an edge follow one another, from its first one on
    index = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return Support.of(np.concatenate(pieces)[index], counts, device)


def _routes(
    batch: PaddedBatch,
    tree: PrefixTree,
    starts: np.ndarray,
    total: int,
    local: Tensor | slice,
    shape: tuple[int, int],
    layers: Sequence[int],
    groups: ProcessGroups,
    device: torch.device,
) -> Mapping[int, Tensor] | None:
    """Return the experts of the tokens that this rank routes, by replayed layer."""
    recorded = [routes for routes in batch.rollout_routes if routes is not None]
    if not layers or not recorded:
        return None
    placed = np.full((total, len(layers), recorded[0].shape[2]), -1, np.int16)
    for start, begin, size, row in zip(starts.tolist(), tree.begins, tree.lengths, tree.rows, strict=True):
        if (routes := batch.rollout_routes[row]) is not None:
            of_segment = routes[begin : begin + size, list(layers)]
            placed[start : start + len(of_segment)] = of_segment
    here = _for_routers(torch.from_numpy(placed)[local], shape, groups).transpose(0, 1).contiguous().to(device)
    return dict(zip(layers, here, strict=True))


def _copies(
    tree: PrefixTree,
    padded_lengths: tuple[int, ...],
    local: Tensor | slice,
    shape: tuple[int, int],
    groups: ProcessGroups,
    device: torch.device,
) -> Tensor:
    """Return how many rows have each token that this rank routes."""
    users = torch.from_numpy(tree.users).float().repeat_interleave(torch.tensor(padded_lengths))[local]
    return _for_routers(users, shape, groups).to(device)


def _sequences(
    tree: PrefixTree,
    padded_lengths: tuple[int, ...],
    local: Tensor | slice,
    shape: tuple[int, int],
    groups: ProcessGroups,
    device: torch.device,
) -> SequenceNumbers:
    count = len(padded_lengths)
    numbers = torch.arange(count).repeat_interleave(torch.tensor(padded_lengths))[local]
    of_rows = torch.zeros(len(tree.last), count)
    for row, last in enumerate(tree.last.tolist()):
        of_rows[row, tree.path(last)] = 1.0
    numbers = _for_routers(numbers, shape, groups).to(device)
    return SequenceNumbers(numbers, count, None if tree.is_flat else of_rows.to(device))


def _for_routers(tokens: Tensor, shape: tuple[int, int], groups: ProcessGroups) -> Tensor:
    """Map values of a cp rank's tokens [p, …] (padded: [b·S, …]) to those that its routers see, in their order."""
    tokens = tokens.unflatten(0, shape).transpose(0, 1)  # [S, b, …], as layers see them
    if groups.parallel.sequence_parallel:
        tokens = tokens.chunk(groups.tp.size())[groups.tp.rank()]
    return tokens.flatten(0, 1)


def _sequence_params(
    padded_lengths: tuple[int, ...],
    tree: PrefixTree,
    row_positions: Sequence[Tensor],
    positions: Tensor,
    padding: Tensor,
    device: torch.device,
) -> PackedSeqParams:
    """Return the boundaries of segments of the global pack; Megatron divides them by cp for local tokens."""
    boundaries = torch.zeros(len(padded_lengths) + 1, dtype=torch.int32)
    boundaries[1:] = torch.tensor(padded_lengths).cumsum(0)
    boundaries = boundaries.to(device)
    longest = max(padded_lengths)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest if tree.is_flat else int((tree.begins + padded_lengths).max()),
    )
    params.padded_lengths = padded_lengths  # read by PackedAttention: host numbers, no device synchronisation
    # read by PackedAttention: (parent, tokens without padding) of each segment
    params.segments = None if tree.is_flat else tuple(zip(tree.parents.tolist(), tree.lengths.tolist(), strict=True))
    params.rows = None if tree.is_flat else UnfoldedRows.of(row_positions, sum(padded_lengths), device)  # by DeltaNet
    params.positions = positions.to(device)  # read by PackedRotary: [p], of this rank's tokens
    params.padding = padding.to(device)  # read by SelectedAttention: [p] bool
    return params
