"""Packed input tensors of micro-batches, and checks of a mini-batch before a training step.

Without padding a micro-batch is one row of P tokens; every sequence is padded at its end to the layout's alignment
(``ParallelConfig.alignment``) and attends only to itself. ``padded=True`` pads all sequences to the longest instead
and runs them as a [b, S] batch: slower, for models or debugging that cannot pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.runtime.model.attention import gather_tokens, local_positions
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron.runtime.softmax import Support
from skyrl_megatron.types import OWN_LOGPROBS, TrainingBatch

if TYPE_CHECKING:
    from skyrl_megatron.algorithms.objective import Objective
    from skyrl_megatron.runtime.model.build import ModelChunks


POLICY_READS: tuple[str, ...] = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
CRITIC_READS: tuple[str, ...] = ("values", "returns")
CHECKED_ROUTES = 1 << 20
"""Tokens × layers of a mini-batch whose routes are looked at: all of a small one, evenly spread ones of a large."""


def too_long(batch: TrainingBatch, max_positions: int | None) -> Exception | None:
    """Return the error of a sequence that exceeds the model's positions."""
    longest = int(batch.lengths.max(initial=0))
    if max_positions and longest > max_positions:
        return ValueError(f"a sequence of {longest} tokens exceeds the model's {max_positions} positions")
    return None


def find_problem(batch: TrainingBatch, objective: Objective) -> Exception | None:
    """Return the error of rows that cannot be trained on: what ``objective`` reads is missing, or not finite."""
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
            bad = ~torch.isfinite(values) & (batch.loss_mask > 0)
            if bad.any():
                row, token = (int(i) for i in bad.nonzero()[0])
                uid = f" (uid {batch.uids[row]})" if batch.uids else ""
                return ValueError(f"{name} is {values[row, token]} at row {row}{uid}, response token {token}")
    return None


def find_route_problem(batch: TrainingBatch, model: ModelChunks, missing: str) -> Exception | None:
    """Return the error of routes that ``model`` cannot take, or of none where ``missing`` is ``"error"``."""
    shape, config = model.hf.plan.shape, model.config
    layers = [layer for layer, has_experts in enumerate(shape.moe) if has_experts]
    absent = _missing_routes(batch) if missing == "error" else None
    return absent or _bad_routes(batch, layers, len(shape.moe), config.num_moe_experts, config.moe_router_topk)


def _bad_routes(
    batch: TrainingBatch, replayed: Sequence[int], layers: int, experts: int, topk: int
) -> Exception | None:
    """Return the error of routes that are not ``topk`` different ones of ``experts`` experts in each of the
    ``replayed`` ones of ``layers`` layers; it names uid, token and layer."""
    known = [(row, routes) for row, routes in enumerate(batch.rollout_routes) if routes is not None]
    stride = max(-(-sum(len(routes) for _, routes in known) * len(replayed) // CHECKED_ROUTES), 1)
    for row, routes in known:
        uid = batch.uids[row] if batch.uids else row
        if routes.shape[1:] != (layers, topk):
            return ValueError(
                f"uid {uid}: the engine's routes are of {routes.shape[1]} layers and {routes.shape[2]} experts a "
                f"token, the model has {layers} layers and takes {topk}: engine and trainer have different models"
            )
        looked_at = np.sort(routes[::stride, list(replayed)], axis=-1)
        wrong = (looked_at >= experts).any(-1) | (looked_at[..., 1:] == looked_at[..., :-1]).any(-1)
        if wrong.any():
            token, place = (int(each) for each in np.argwhere(wrong)[0])
            token, layer = token * stride, replayed[place]
            return ValueError(
                f"uid {uid}, token {token}, layer {layer}: the engine's route {routes[token, layer].tolist()} is not "
                f"of {topk} different experts from 0 to {experts - 1}"
            )
    return None


def _missing_routes(batch: TrainingBatch) -> Exception | None:
    """Return the error of a token that has no route and counts in the loss: one before a token that is trained on."""
    width = batch.loss_mask.shape[1]
    for row, length in enumerate(batch.lengths.tolist()):
        trained = batch.loss_mask[row].nonzero()
        needed = length - (width - int(trained[-1])) if len(trained) else 0
        routes = batch.rollout_routes[row] if batch.rollout_routes else None
        if (known := 0 if routes is None else len(routes)) < needed:
            return ValueError(
                f"uid {batch.uids[row] if batch.uids else row}: the engine returned no experts for token {known} of "
                f"{needed} before the last one that is trained on: find out why (its log), or set "
                "moe_routing_replay_missing=natural"
            )
    return None


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One micro-batch on this rank. b sequences, P packed tokens over all cp ranks, p = P / cp of them here."""

    tokens: Tensor
    """[1, p] int64 (padded: [b, S])."""
    position_ids: Tensor
    """[1, p] int64 (padded: [b, S]): position of each token in its sequence."""
    targets: Tensor
    """[p] int64 (padded: [b·S]): the token after each token; 0 after the last of a sequence."""
    further_targets: Tensor
    """[p] int64 (padded: [b·S]): the token after the next; 0 where there is none."""
    padding_mask: Tensor
    """[1, p] bool (padded: [b, S]): True on padding, which routers must not count."""
    params: PackedSeqParams | None
    """Sequence boundaries for attention; None when padded."""
    padded_lengths: tuple[int, ...]
    """Tokens that each sequence takes in the pack."""
    response_columns: Tensor
    """[b, T] int64: for response token (row, t), index in the packed global order of the position that predicts it; 0
    where the row has no token t."""
    response_valid: Tensor
    """[b, T] bool: where the row has a response token t."""
    groups: ProcessGroups
    support: Support | None = None
    """What the token after each of the p (padded: b·S) was sampled from; None: all from the whole vocabulary."""
    routes: Mapping[int, Tensor] | None = None
    """Layer of the model → [t, K] int16, experts given to the t tokens that its router sees here (with tp, a part of
    p); -1 for tokens without. None: the model routes."""

    def model_arguments(self) -> dict[str, object]:
        """Return the keyword arguments of ``GPTModel.forward``."""
        arguments: dict[str, object] = {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "packed_seq_params": self.params,
            "padding_mask": self.padding_mask,
        }
        return arguments if self.routes is None else arguments | {"routes": self.routes}

    def to_responses(self, per_token: Tensor) -> Tensor:
        """Map values at predicting positions, [p, …] on each cp rank → [b, T, …] on every rank, 0 where there is no
        token.

        Differentiable; all cp ranks must go on to compute the same loss from the result.
        """
        whole = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        valid = self.response_valid.view(*self.response_valid.shape, *[1] * (whole.dim() - 1))
        return torch.where(valid, whole[self.response_columns], 0.0)

    def further_responses(self, per_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`to_responses` of values at the positions two before each response token, [b, T], and where
        there is such a position, [b, T] bool: a sequence's second token has none."""
        whole = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        lengths = torch.tensor(self.padded_lengths, device=whole.device)
        begins = (lengths.cumsum(0) - lengths)[:, None]
        valid = self.response_valid & (self.response_columns > begins)
        return torch.where(valid, whole[torch.where(valid, self.response_columns - 1, 0)], 0.0), valid

    def to_rows(self, seen: Tensor) -> list[Tensor]:
        """Map values of the tokens as this rank's layers see them, [s, b, …] → [n, …] of each row with its padding, on
        every tp and cp rank."""
        if self.groups.parallel.sequence_parallel:
            parts = [torch.empty_like(seen) for _ in range(self.groups.tp.size())]
            dist.all_gather(parts, seen.contiguous(), group=self.groups.tp)
            seen = torch.cat(parts)
        tokens = seen.transpose(0, 1).flatten(0, 1)
        whole = gather_tokens(tokens, self.padded_lengths, self.groups.cp, shared_loss=True)
        return list(whole.split(self.padded_lengths))

    def to_positions(self, per_response: Tensor) -> Tensor:
        """Map [b, T, …] → [p, …], each at the position of this rank that predicts the token; 0 elsewhere."""
        whole = per_response.new_zeros(sum(self.padded_lengths), *per_response.shape[2:])
        whole[self.response_columns[self.response_valid]] = per_response[self.response_valid]
        mine = local_positions(self.padded_lengths, self.groups.cp.size(), self.groups.cp.rank())
        return whole[mine.to(whole.device)]


def pack(
    batch: TrainingBatch,
    groups: ProcessGroups,
    device: torch.device,
    *,
    padded: bool = False,
    replayed: Sequence[int] = (),
) -> PackedInputs:
    """Pack the rows of ``batch`` as one micro-batch. A batch without rows becomes one sequence of padding alone.

    ``replayed``: layers of the model whose routers here take the routes of the batch.
    """
    lengths = [int(length) for length in batch.lengths] or [0]
    alignment = groups.parallel.alignment
    width = max(-(-max(lengths) // alignment) * alignment, alignment)
    padded_lengths = tuple(width if padded else max(-(-n // alignment) * alignment, alignment) for n in lengths)
    total = sum(padded_lengths)
    starts = [0]
    for length in padded_lengths[:-1]:
        starts.append(starts[-1] + length)

    tokens = torch.zeros(total, dtype=torch.int64)
    padding = torch.ones(total, dtype=torch.bool)
    begins = torch.tensor(starts)
    positions = torch.arange(total) - begins.repeat_interleave(torch.tensor(padded_lengths))
    if len(batch):
        sequences, counts = batch.sequences.cpu(), torch.tensor(lengths)[:, None]
        place = torch.arange(sequences.shape[1]) - (sequences.shape[1] - counts)  # [b, W]: in its sequence; < 0: none
        taken = (begins[:, None] + place)[place >= 0]
        tokens[taken] = sequences[place >= 0]
        padding[taken] = False
    nothing_follows = torch.cat([padding[1:] | (positions[1:] == 0), padding.new_ones(1)])
    targets = tokens.roll(-1).masked_fill(nothing_follows, 0)
    further = targets.roll(-1).masked_fill(nothing_follows, 0)

    columns, valid = _response_index(batch, lengths, starts)
    mine: Tensor | slice = slice(None)
    if padded:
        assert groups.cp.size() == 1, "padded inputs cannot be split over context-parallel ranks"
        shape, params = (len(lengths), width), None
    else:
        mine = local_positions(padded_lengths, groups.cp.size(), groups.cp.rank())
        tokens, targets, further, positions, padding = (
            each[mine] for each in (tokens, targets, further, positions, padding)
        )
        shape, params = (1, len(tokens)), _sequence_params(padded_lengths, positions, padding, device)
    return PackedInputs(
        tokens=tokens.view(shape).to(device),
        position_ids=positions.view(shape).to(device),
        targets=targets.to(device),
        further_targets=further.to(device),
        padding_mask=padding.view(shape).to(device),
        params=params,
        padded_lengths=padded_lengths,
        response_columns=columns.to(device),
        response_valid=valid.to(device),
        groups=groups,
        support=_support(batch, lengths, starts, total, mine, device),
        routes=_routes(batch, lengths, starts, total, mine, shape, replayed, groups, device),
    )


def _response_index(batch: TrainingBatch, lengths: list[int], starts: list[int]) -> tuple[Tensor, Tensor]:
    """Return (columns [b, T], valid [b, T]): response token t of a row stands T − t from its end; the position before
    predicts it. A sequence's first token has no predictor, so a response never includes it."""
    rows, width = len(batch), batch.response_mask.shape[1]
    if not rows:
        return torch.zeros(1, width, dtype=torch.int64), torch.zeros(1, width, dtype=torch.bool)
    ends = torch.tensor([start + length for start, length in zip(starts, lengths, strict=True)])
    columns = ends[:, None] - width + torch.arange(width)[None, :] - 1
    valid = (columns >= torch.tensor(starts)[:, None]) & (batch.response_mask.cpu() > 0)
    return torch.where(valid, columns, 0), valid


def _support(
    batch: TrainingBatch, lengths: list[int], starts: list[int], total: int, mine: Tensor | slice, device: torch.device
) -> Support | None:
    """Place what response tokens were sampled from at the positions before them, and take those of this rank."""
    if not batch.rollout_support:
        return None
    counts = np.zeros(total, np.int64)
    pieces = [np.zeros(0, np.uint16)]
    for start, length, support in zip(starts, lengths, batch.rollout_support, strict=True):
        known = support.last(min(len(support), max(length - 1, 0)))  # the first token of a sequence has no predictor
        end = start + length - 1
        counts[end - len(known) : end] = known.counts
        pieces.append(known.ids)
    ids = np.concatenate(pieces)
    begins = np.cumsum(counts) - counts
    if isinstance(mine, Tensor):
        begins, counts = begins[mine.numpy()], counts[mine.numpy()]
        before = np.cumsum(counts) - counts
        ids = ids[np.repeat(begins - before, counts) + np.arange(counts.sum())]
    return Support.of(ids, counts, device)


def _routes(
    batch: TrainingBatch,
    lengths: list[int],
    starts: list[int],
    total: int,
    mine: Tensor | slice,
    shape: tuple[int, int],
    layers: Sequence[int],
    groups: ProcessGroups,
    device: torch.device,
) -> Mapping[int, Tensor] | None:
    """Place the experts of each token, and take those of this rank's layers and of the tokens that it routes."""
    known = [routes for routes in batch.rollout_routes if routes is not None]
    if not layers or not known:
        return None
    placed = np.full((total, len(layers), known[0].shape[2]), -1, np.int16)
    for start, length, routes in zip(starts, lengths, batch.rollout_routes, strict=True):
        if routes is not None:
            count = min(len(routes), length)
            placed[start : start + count] = routes[:count, layers]
    tokens = torch.from_numpy(placed)[mine].unflatten(0, shape).transpose(0, 1)  # [S, b, …], as layers see them
    if groups.parallel.sequence_parallel:
        tokens = tokens.chunk(groups.tp.size())[groups.tp.rank()]
    here = tokens.flatten(0, 1).transpose(0, 1).contiguous().to(device)
    return dict(zip(layers, here, strict=True))


def _sequence_params(
    padded_lengths: tuple[int, ...], positions: Tensor, padding: Tensor, device: torch.device
) -> PackedSeqParams:
    """Make the boundaries of the global pack; Megatron divides them by cp where it works on local tokens."""
    boundaries = torch.zeros(len(padded_lengths) + 1, dtype=torch.int32)
    boundaries[1:] = torch.tensor(padded_lengths).cumsum(0)
    boundaries = boundaries.to(device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max(padded_lengths),
        max_seqlen_kv=max(padded_lengths),
    )
    params.padded_lengths = padded_lengths  # read by PackedAttention: host numbers, no device synchronisation
    params.positions = positions.to(device)  # read by PackedRotary: [p], of this rank's tokens
    params.padding = padding.to(device)  # read by SelectedAttention: [p] bool
    return params
