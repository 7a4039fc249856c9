"""Packed input tensors of micro-batches, and checks of a mini-batch before a training step.

A packed micro-batch is one row of P tokens. Each sequence is padded at its end to the layout's alignment
(``ParallelConfig.alignment``) and attends only to itself. With ``padded=True`` all sequences are padded to the longest
and run as a [b, S] batch. This is slower; it is for debugging and for models that do not support packing.
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
    """One micro-batch on this rank: b sequences, P packed tokens over all cp ranks, p = P / cp tokens on this rank."""

    tokens: Tensor
    """[1, p] int64 (padded: [b, S])."""
    position_ids: Tensor
    """[1, p] int64 (padded: [b, S]): position of each token in its sequence."""
    targets: Tensor
    """[p] int64 (padded: [b·S]): the token after each token; 0 after the last of a sequence."""
    further_targets: Tensor
    """[p] int64 (padded: [b·S]): the token after the next; 0 if there is none."""
    padding_mask: Tensor
    """[1, p] bool (padded: [b, S]): True on padding. Routers must not count it."""
    params: PackedSeqParams | None
    """Sequence boundaries for attention; None when padded."""
    padded_lengths: tuple[int, ...]
    """Length of each sequence in the pack, padding included."""
    response_columns: Tensor
    """[b, T] int64: the position that predicts response token (row, t), in the packed global order; 0 if the row has
    no token t."""
    response_valid: Tensor
    """[b, T] bool: whether the row has a response token t."""
    groups: ProcessGroups
    support: Support | None = None
    """The tokens that the next token of each of the p (padded: b·S) was sampled from; None: the whole vocabulary."""
    routes: Mapping[int, Tensor] | None = None
    """Layer of the model → [t, K] int16, experts of the t tokens that the layer's router sees on this rank (with tp, a
    part of p); -1 for tokens without a route. None: the model routes."""
    sequences: SequenceNumbers | None = None
    """The sequences of these t tokens. None: no router asks for them."""

    def model_arguments(self) -> dict[str, object]:
        """Return the keyword arguments of ``GPTModel.forward``."""
        arguments: dict[str, object] = {
            "input_ids": self.tokens,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "packed_seq_params": self.params,
            "padding_mask": self.padding_mask,
        }
        for name in ("routes", "sequences"):  # the model takes them if its routers read them
            if (value := getattr(self, name)) is not None:
                arguments[name] = value
        return arguments

    def to_responses(self, per_token: Tensor) -> Tensor:
        """Map values at predicting positions, [p, …] per cp rank → [b, T, …] on every rank, 0 without a token.

        Differentiable, if all cp ranks compute the same loss from the result.
        """
        whole = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        valid = self.response_valid.view(*self.response_valid.shape, *[1] * (whole.dim() - 1))
        return torch.where(valid, whole[self.response_columns], 0.0)

    def further_responses(self, per_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return (values two positions before each response token, valid), [b, T] each.

        Valid is False for the second token of a sequence, which has no such position.
        """
        whole = gather_tokens(per_token, self.padded_lengths, self.groups.cp, shared_loss=True)
        lengths = torch.tensor(self.padded_lengths, device=whole.device)
        begins = (lengths.cumsum(0) - lengths)[:, None]
        valid = self.response_valid & (self.response_columns > begins)
        return torch.where(valid, whole[torch.where(valid, self.response_columns - 1, 0)], 0.0), valid

    def to_rows(self, seen: Tensor) -> list[Tensor]:
        """Map values of this rank's layers, [s, b, …] → one [n, …] per row, with padding, on every tp and cp rank."""
        if self.groups.parallel.sequence_parallel:
            parts = [torch.empty_like(seen) for _ in range(self.groups.tp.size())]
            dist.all_gather(parts, seen.contiguous(), group=self.groups.tp)
            seen = torch.cat(parts)
        tokens = seen.transpose(0, 1).flatten(0, 1)
        whole = gather_tokens(tokens, self.padded_lengths, self.groups.cp, shared_loss=True)
        return list(whole.split(self.padded_lengths))

    def to_positions(self, per_response: Tensor) -> Tensor:
        """Map [b, T, …] → [p, …]: each value at the position that predicts its token; 0 elsewhere."""
        whole = per_response.new_zeros(sum(self.padded_lengths), *per_response.shape[2:])
        whole[self.response_columns[self.response_valid]] = per_response[self.response_valid]
        local = local_positions(self.padded_lengths, self.groups.cp.size(), self.groups.cp.rank())
        return whole[local.to(whole.device)]


def pack(
    batch: PaddedBatch,
    groups: ProcessGroups,
    device: torch.device,
    *,
    padded: bool = False,
    replayed: Sequence[int] = (),
    by_sequence: bool = False,
) -> PackedInputs:
    """Pack the rows of ``batch`` as one micro-batch. A batch without rows becomes one sequence of padding.

    ``replayed``: layers of this rank whose routers replay the routes of the batch. ``by_sequence``: routers read which
    sequence a token is in.
    """
    # A collective runs for a pack without rows too, so it becomes a sequence of padding.
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
        index = torch.arange(sequences.shape[1]) - (sequences.shape[1] - counts)  # [b, W], in its sequence; < 0: none
        taken = (begins[:, None] + index)[index >= 0]
        tokens[taken] = sequences[index >= 0]
        padding[taken] = False
    # The next position belongs to another sequence, or to padding: 0 is a valid token whose loss nobody reads.
    nothing_follows = torch.cat([padding[1:] | (positions[1:] == 0), padding.new_ones(1)])
    targets = tokens.roll(-1).masked_fill(nothing_follows, 0)
    further = targets.roll(-1).masked_fill(nothing_follows, 0)

    columns, valid = _response_index(batch, lengths, starts)
    local: Tensor | slice = slice(None)
    if padded:
        # The split over cp follows the boundaries of the pack, which a padded batch does not have.
        assert groups.cp.size() == 1, "padded inputs cannot be split over context-parallel ranks"
        shape, params = (len(lengths), width), None
    else:
        local = local_positions(padded_lengths, groups.cp.size(), groups.cp.rank())
        tokens, targets, further, positions, padding = (
            values[local] for values in (tokens, targets, further, positions, padding)
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
        support=_support(batch, lengths, starts, total, local, device),
        routes=_routes(batch, lengths, starts, total, local, shape, replayed, groups, device),
        sequences=_sequences(padded_lengths, local, shape, groups, device) if by_sequence else None,
    )


def _response_index(batch: PaddedBatch, lengths: list[int], starts: list[int]) -> tuple[Tensor, Tensor]:
    """Return (columns [b, T], valid [b, T]) as in :class:`PackedInputs`.

    Response token t of a row is T − t positions before the row's end, and the position before it predicts it. No
    position predicts the first token of a sequence, so a response never includes it.
    """
    rows, width = len(batch), batch.response_mask.shape[1]
    if not rows:
        return torch.zeros(1, width, dtype=torch.int64), torch.zeros(1, width, dtype=torch.bool)
    # Responses are right-aligned in the batch, so columns count from the end of a row.
    ends = torch.tensor([start + length for start, length in zip(starts, lengths, strict=True)])
    columns = ends[:, None] - width + torch.arange(width)[None, :] - 1
    valid = (columns >= torch.tensor(starts)[:, None]) & (batch.response_mask.cpu() > 0)
    return torch.where(valid, columns, 0), valid


def _support(
    batch: PaddedBatch,
    lengths: list[int],
    starts: list[int],
    total: int,
    local: Tensor | slice,
    device: torch.device,
) -> Support | None:
    """Return the sampling support of response tokens at the predicting positions of this rank."""
    if not batch.rollout_support:
        return None
    counts = np.zeros(total, np.int64)
    pieces = [np.zeros(0, np.uint16)]
    for start, length, support in zip(starts, lengths, batch.rollout_support, strict=True):
        predicted = support.last(min(len(support), max(length - 1, 0)))  # no position predicts the first token
        end = start + length - 1
        counts[end - len(predicted) : end] = predicted.counts
        pieces.append(predicted.ids)
    ids = np.concatenate(pieces)
    begins = np.cumsum(counts) - counts
    if isinstance(local, Tensor):
        begins, counts = begins[local.numpy()], counts[local.numpy()]
        before = np.cumsum(counts) - counts
        ids = ids[np.repeat(begins - before, counts) + np.arange(counts.sum())]
    return Support.of(ids, counts, device)


def _routes(
    batch: PaddedBatch,
    lengths: list[int],
    starts: list[int],
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
    for start, length, routes in zip(starts, lengths, batch.rollout_routes, strict=True):
        if routes is not None:
            count = min(len(routes), length)
            placed[start : start + count] = routes[:count, list(layers)]
    here = _for_routers(torch.from_numpy(placed)[local], shape, groups).transpose(0, 1).contiguous().to(device)
    return dict(zip(layers, here, strict=True))


def _sequences(
    padded_lengths: tuple[int, ...],
    local: Tensor | slice,
    shape: tuple[int, int],
    groups: ProcessGroups,
    device: torch.device,
) -> SequenceNumbers:
    count = len(padded_lengths)
    numbers = torch.arange(count).repeat_interleave(torch.tensor(padded_lengths))[local]
    return SequenceNumbers(_for_routers(numbers, shape, groups).to(device), count)


def _for_routers(tokens: Tensor, shape: tuple[int, int], groups: ProcessGroups) -> Tensor:
    """Map values of a cp rank's tokens [p, …] (padded: [b·S, …]) to those that its routers see, in their order."""
    tokens = tokens.unflatten(0, shape).transpose(0, 1)  # [S, b, …], as layers see them
    if groups.parallel.sequence_parallel:
        tokens = tokens.chunk(groups.tp.size())[groups.tp.rank()]
    return tokens.flatten(0, 1)


def _sequence_params(
    padded_lengths: tuple[int, ...], positions: Tensor, padding: Tensor, device: torch.device
) -> PackedSeqParams:
    """Return the sequence boundaries of the global pack; Megatron divides them by cp for local tokens."""
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
