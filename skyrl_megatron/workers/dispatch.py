"""Carry the rows of a batch to the replicas of a role, and collect results in the order of the batch.

Rows are put into Ray's object store once, in a block for each replica and mini-batch: a replica trains on the rows
that it scored. Every later pass (log-probs, reference, critic, mini-batches, epochs) sends numbers of rows. A field
that was added or changed since is put when a pass reads it. The references live as long as the batch. The driver owns
them: it outlives the engines that sampled the rows, and the ranks that read them.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from skyrl_megatron.data.prefixes import WORTH, SharedPrefixes
from skyrl_megatron.data.splitting import (
    MINI_BATCH_PROMPTS,
    PROMPT_UIDS,
    TOGETHER,
    balance,
    joined,
    mini_batches,
    rows_by_adapter,
    split_for_dp,
    units,
)
from skyrl_megatron.errors import RowsLostError, SkyRLMegatronWarning
from skyrl_megatron.runtime.flops import ModelFlops
from skyrl_megatron.types import (
    LISTS,
    OF_RESPONSES,
    OF_ROWS,
    ByLayer,
    RowSpans,
    StoredArray,
    TensorElsewhere,
    TokenSupport,
    TrainingBatch,
    fetched,
    joined_arrays,
)

SCORED = ("tokens", "lengths", "response_lengths", "response_mask", "loss_mask", *LISTS)
"""Fields that a pass without gradients reads."""
OF_ESTIMATORS = ("rewards", "is_last_step", "truncated", "reward_parts")
"""Fields that advantages were made of, which no rank reads."""
OF_LAST_STAGE = ("rollout_support", "teacher_top_logprobs", "teacher_top_ids")
"""Fields that only ranks of the last pipeline stage read."""
TRAINED = tuple(name for name in dict.fromkeys((*SCORED, *OF_RESPONSES, *OF_ROWS)) if name not in OF_ESTIMATORS)
"""Fields that a training pass reads."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The position of a rank in its role's layout, and its process."""

    dp_rank: int
    dp_size: int
    collects: bool
    """Whether it returns the results of its replica: tp 0, cp 0, last pipeline stage."""
    pid: int
    node: str
    layers: str = ""
    """On a GPU, the library of its model's layers; empty on CPU."""
    routed: tuple[int, ...] = ()
    """Layers of its model whose routes it replays."""
    records: bool = False
    """Whether it returns what its pipeline stage recorded: tp 0, cp 0."""
    shares_prefixes: bool = False
    """Whether it computes tokens once that several rows begin with."""
    unshared: str = ""
    """Why not, if it would."""


@dataclass(frozen=True, slots=True)
class RayArray:
    """An array in Ray's object store, of which a :class:`~skyrl_megatron.types.StoredArray` has pieces."""

    reference: Any

    @property
    def name(self) -> str:
        """Ray's id of the object."""
        return str(self.reference.hex())

    def get(self, stored: Sequence[RayArray]) -> list[np.ndarray]:
        """Fetch the arrays [n, …] of several references; on the node that has one this copies nothing."""
        return _got([array.reference for array in stored])


def _got(references: Sequence[Any]) -> list[Any]:
    """Return the objects. Raises RowsLostError if the host that had some of them was lost."""
    try:
        objects: list[Any] = ray.get(references)
    except ray.exceptions.ObjectLostError as error:
        raise RowsLostError(
            "rows of this step, or their routed experts, sampling supports or teacher's tokens, were in the memory of "
            f"a host that was lost ({str(error).splitlines()[0]}): resume the run, which samples the step again"
        ) from error
    return objects


def layer_groups(stages: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers that are stored together, all ``count`` once, given those that each pipeline stage replays;
    those of no stage go with the first. () if one array is enough, or the stages are of another model."""
    staged = {layer for layers in stages for layer in layers}
    if len(stages) < 2 or max(staged) >= count:
        return ()
    first, *others = map(tuple, stages)
    return tuple(layer for layer in range(count) if layer in first or layer not in staged), *others


# ---------------------------------------------------------------------------------------------------- on the driver
type Place = tuple[Any, str]
"""Reference to an object of :func:`to_arrays`, and the key in it."""


@dataclass(slots=True)
class RowBlock:
    """Some rows of a batch in the object store."""

    rows: np.ndarray
    """[b] int64, ascending."""
    references: dict[str, Place] = field(default_factory=dict)
    """Field → where it is."""
    states: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Field → what it was when it was put (:func:`_state`)."""
    sizes: dict[Any, int] = field(default_factory=dict)
    """Bytes of each object."""


class Carried:
    """The blocks of a batch in the object store. ``stages``: layers whose routes each pipeline stage replays."""

    def __init__(self, rows: int, stages: Sequence[tuple[int, ...]] = ()) -> None:
        self.blocks: list[RowBlock] = []
        self.stages = stages
        self.block_of, self.place_of = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
        """Number of each row's block, and its place there, [B] each."""
        self._prefixes: SharedPrefixes | None = None
        self.put, self.bytes = 0, 0
        """Bytes that were put, and of the objects that are still referred to."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Make copies and files of a batch without it: they change on their own, and outlive the objects."""
        return type(None), ()

    def prefixes(self, batch: TrainingBatch) -> SharedPrefixes:
        """Return what the rows of the batch share by their tokens, which do not change."""
        if self._prefixes is None:
            self._prefixes = SharedPrefixes.of(batch.tokens.numpy(), batch.lengths, lambda row, other, equal: equal)
        return self._prefixes

    def take(self, batch: TrainingBatch, rows: np.ndarray, names: Sequence[str]) -> list[tuple[RowBlock, np.ndarray]]:
        """Put what is missing of the fields ``names`` of ``rows`` [b] int64; return the blocks that have them, with
        the place in ``rows`` of each of their rows."""
        if len(new := rows[self.block_of[rows] < 0]):
            new = np.unique(new)
            self.block_of[new], self.place_of[new] = len(self.blocks), np.arange(len(new))
            self.blocks.append(RowBlock(new))
        numbers = self.block_of[rows]
        taken = []
        for number in np.unique(numbers).tolist():
            block = self.blocks[number]
            self._put(batch, block, names)
            taken.append((block, np.flatnonzero(numbers == number)))
        return taken

    def _put(self, batch: TrainingBatch, block: RowBlock, names: Sequence[str]) -> None:
        present = [name for name in names if getattr(batch, name) is not None]
        for name in block.references.keys() - set(present):  # removed from the batch since
            if name in names:
                del block.references[name], block.states[name]
        changed = [name for name in present if not _is_same(block.states.get(name), getattr(batch, name))]
        if not changed:
            return
        first = {id(getattr(batch, name)): name for name in reversed(changed)}  # returns may be the advantages
        arrays = to_arrays(batch, block.rows, list(dict.fromkeys(first.values())))
        size = sum(array.nbytes for array in _arrays(arrays))
        _warn_of_a_small_store(self.bytes + size)
        if "rollout_routes" in arrays:
            arrays["rollout_routes"] = self._routes_apart(arrays["rollout_routes"])
        reference = ray.put(arrays)
        for name in changed:
            value = getattr(batch, name)
            block.references[name], block.states[name] = (reference, first[id(value)]), _state(value)
        kept = {reference for reference, _ in block.references.values()}
        self.put += size
        sizes = {of: size for of, size in (block.sizes | {reference: size}).items() if of in kept}
        self.bytes += sum(sizes.values()) - sum(block.sizes.values())
        block.sizes = sizes

    def _routes_apart(self, entries: list[Any]) -> list[Any]:
        """Put the arrays among the routes of some rows, so that each rank fetches those of its layers."""
        arrays = [entry for entry in entries if isinstance(entry, np.ndarray)]
        if not arrays:
            return entries
        concatenated = np.concatenate(arrays)
        groups = layer_groups(self.stages, concatenated.shape[1])
        parts = [np.ascontiguousarray(concatenated[:, list(layers)]) for layers in groups] or [concatenated]
        stored = tuple(RayArray(ray.put(part)) for part in parts)
        source = ByLayer(groups, stored) if groups else stored[0]
        ends = np.cumsum([len(entry) if isinstance(entry, np.ndarray) else 0 for entry in entries]).tolist()
        return [
            StoredArray([(source, end - len(entry), end)], entry.shape[1:], concatenated.dtype)
            if isinstance(entry, np.ndarray)
            else entry
            for entry, end in zip(entries, ends, strict=True)
        ]


def _warn_of_a_small_store(needed: int) -> None:
    """Say that Ray will write rows to disk, if the store of this host has less than ``needed`` bytes."""
    if needed > (size := _store_bytes()):
        text = (
            f"the rows of a step take more than Ray's object store of this host ({size / 2**30:.2f} GiB): Ray writes "
            "the rest to its temporary folder and reads it again, which takes time. Start Ray with a larger "
            "--object-store-memory, or lower trainer.train_batch_size"
        )
        warnings.warn(text, SkyRLMegatronWarning, stacklevel=2)  # the same text in each step, which is shown once


@functools.cache
def _store_bytes() -> float:
    here = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == here]
    return float(node["Resources"].get("object_store_memory", math.inf))


def _state(value: Any) -> tuple[Any, Any]:
    """Return what :func:`_is_same` needs to see that a field was replaced, or changed in place."""
    if isinstance(value, Tensor):
        return value, None if value.is_inference() else value._version  # None: changes are not counted
    return value, list(value) if isinstance(value, list) else None


def _is_same(state: tuple[Any, Any] | None, value: Any) -> bool:
    if state is None or state[0] is not value:
        return False
    if isinstance(value, Tensor):
        return state[1] is not None and bool(state[1] == value._version)
    if not isinstance(value, list):  # lengths, which nothing changes
        return True
    # entries are replaced and never changed; comparing arrays would read them
    return len(state[1]) == len(value) and all(a is b for a, b in zip(state[1], value, strict=True))


def _arrays(value: Any) -> Iterable[np.ndarray]:
    """Return all arrays in nested dictionaries and lists."""
    if isinstance(value, np.ndarray):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _arrays(entry)


def to_arrays(batch: TrainingBatch, rows: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields ``names`` of ``rows`` [b] int64 as NumPy arrays, which Ray shares between processes of a node.

    Lists of arrays become one array each: thousands of small ones would cost more time than their bytes.
    """
    tokens, responses, index = batch.rows, batch.responses, torch.from_numpy(rows)
    arrays: dict[str, Any] = {}
    for name in names:
        value = getattr(batch, name)
        if name == "tokens":
            arrays[name] = tokens.select(value, rows).numpy()
        elif isinstance(value, TensorElsewhere) and value.stored is not None:  # ranks fetch what it refers to
            arrays[name] = joined_arrays([value.stored[responses.of(row)] for row in rows.tolist()])
        elif name in OF_RESPONSES:
            arrays[name] = responses.select(value, rows).numpy()
        elif name in OF_ROWS:
            arrays[name] = value[index].numpy()
        elif name in LISTS:
            arrays[name] = _packed(name, [value[row] for row in rows.tolist()] if value else [])
        else:
            arrays[name] = value[rows]
    return {
        name: _bits(value) if isinstance(value, np.ndarray) and value.dtype == bool else value
        for name, value in arrays.items()
    }


def _bits(mask: np.ndarray) -> dict[str, Any]:
    return {"bits": np.packbits(mask), "size": len(mask)}


def _packed(name: str, entries: list[Any]) -> Any:
    """Return the entries of a list of a batch as few arrays."""
    if name == "rollout_support" and entries:
        support = TokenSupport.joined(entries)
        return {"ids": support.ids, "counts": support.counts, "tokens": np.asarray([len(each) for each in entries])}
    return entries


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one replica for one call, as references to blocks. Ranks make the batch of it."""

    references: list[dict[str, Place]]
    """Of each block: field → where it is."""
    blocks: np.ndarray
    """[b] int64: which of these blocks each row is in."""
    places: np.ndarray
    """[b] int64: the row's number there."""
    blanks: list[str]
    """Adapters of further rows without tokens, which keep the replicas together."""
    metadata: dict[str, Any]

    def batch(self, layers: Sequence[int] | None = None, *, last_stage: bool = True) -> TrainingBatch:
        """Fetch the rows. ``layers``: those whose routes will be read, None: all; others are fetched where they are
        read. Without ``last_stage`` the fields of :data:`OF_LAST_STAGE` are absent. Raises RowsLostError if the host
        that had some of them was lost."""
        return self._fetched(layers, () if last_stage else OF_LAST_STAGE)

    def split(self, batch: TrainingBatch, values: Tensor) -> list[np.ndarray]:
        """Return for each block the values of its rows, [r, …] of ``values`` [R, …]; ``batch``: that of this share."""
        of_blocks = self.rows_of_blocks()
        return [np.ascontiguousarray(batch.responses.select(values, rows).numpy()) for rows in of_blocks]

    def rows_of_blocks(self) -> list[np.ndarray]:
        """Return the rows of this share in each block, [r] int64."""
        return [np.flatnonzero(self.blocks == number) for number in range(len(self.references))]

    def _fetched(self, layers: Sequence[int] | None, absent: Sequence[str]) -> TrainingBatch:
        wanted = {reference.hex(): reference for block in self.references for reference, _ in block.values()}
        objects = dict(zip(wanted, _got(list(wanted.values())), strict=True))
        blocks = [
            {name: objects[reference.hex()][key] for name, (reference, key) in block.items() if name not in absent}
            for block in self.references
        ]
        # without rows, blank ones have the fields of a row of another replica
        one, some = np.zeros(1, np.int64), len(self.places) > 0
        made = from_arrays(blocks, self.blocks if some else one, self.places if some else one)
        made.rollout_routes = fetched(made.rollout_routes, layers)
        supports = fetched([support.ids for support in made.rollout_support])
        made.rollout_support = [
            TokenSupport(ids, support.counts) for ids, support in zip(supports, made.rollout_support, strict=True)
        ]
        made.metadata = self.metadata
        if self.blanks:
            blank = made.blank_row()
            blanks = [blank.select([0]) for _ in self.blanks]
            for row, adapter in zip(blanks, self.blanks, strict=True):
                row.adapters = [adapter] if made.adapters else []
            made = TrainingBatch.joined([made, *blanks] if some else blanks)
        return made


type TopTokens = dict[int, list[tuple[Any, int, int]]]
"""Row → pieces of a :class:`~skyrl_megatron.types.StoredArray`: of the log-probs of its likeliest tokens, and of their
ids."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shares of the replicas in some rows of a batch. It may be used for several calls."""

    rows: list[np.ndarray]
    """Rows of the batch in each share."""
    shares: list[Share]
    responses: RowSpans
    """Where the results of the batch's rows are."""

    def arguments(self, ranks: Sequence[RankInfo]) -> list[tuple[Any]]:
        """Return the share of each rank."""
        return [(self.shares[rank.dp_rank],) for rank in ranks]

    def collect(self, ranks: Sequence[RankInfo], results: Sequence[np.ndarray | None]) -> Tensor:
        """Return [R, …] in the order of the batch, from the ranks that collect."""
        out: np.ndarray | None = None
        for rank, result in zip(ranks, results, strict=True):
            if rank.collects:
                assert result is not None
                if out is None:
                    out = np.zeros((self.responses.size, *result.shape[1:]), result.dtype)
                start = 0
                for row in self.rows[rank.dp_rank].tolist():
                    tokens = self.responses.of(row)
                    out[tokens] = result[start : (start := start + tokens.stop - tokens.start)]
        assert out is not None, "no rank collects"
        return torch.from_numpy(out)

    def places(self, ranks: Sequence[RankInfo], results: Sequence[Sequence[Any]]) -> TopTokens:
        """Return where the values of each row are, as pieces of a :class:`~skyrl_megatron.types.StoredArray`.

        ``results``: of each rank, references to what :meth:`Share.split` returned for each of several values, one
        after another; only those of ranks that collect are read. A row has a piece of each value.
        """
        places: TopTokens = {}
        for rank, references in zip(ranks, results, strict=True):
            share, rows = self.shares[rank.dp_rank], self.rows[rank.dp_rank]
            for number, reference in enumerate(references if rank.collects else ()):
                array, start = RayArray(reference), 0
                for row in rows[share.blocks == number % len(share.references)].tolist():
                    length = int(self.responses.lengths[row])
                    places.setdefault(row, []).append((array, start, start := start + length))
        return places

    def routes(
        self, ranks: Sequence[RankInfo], results: Sequence[Sequence[Any]], lengths: np.ndarray, like: np.ndarray
    ) -> list[StoredArray]:
        """Return the experts [n, L, K] of each row's n tokens, which stay in the object store.

        ``results``: of each rank that records, references to those of its layers for each block of its share.
        ``lengths``: tokens of each row of the batch, [B] int64; ``like``: an array of the same kind, [0, L, K].
        """
        routes: list[StoredArray] = [None] * len(lengths)  # type: ignore[list-item]
        for replica, share in enumerate(self.shares):
            stages = [
                (rank.routed, references)
                for rank, references in zip(ranks, results, strict=True)
                if rank.dp_rank == replica and references
            ]
            layers = tuple(routed for routed, _ in stages)
            for number, rows in enumerate(share.rows_of_blocks()):
                source = ByLayer(layers, tuple(RayArray(references[number]) for _, references in stages))
                ends = np.cumsum(lengths[of_block := self.rows[replica][rows]]).tolist()
                for row, end in zip(of_block.tolist(), ends, strict=True):
                    routes[row] = StoredArray([(source, end - int(lengths[row]), end)], like.shape[1:], like.dtype)
        return routes

    def collect_recorded(
        self, ranks: Sequence[RankInfo], results: Sequence[Mapping[str, Mapping[int, np.ndarray]] | None]
    ) -> list[dict[str, np.ndarray]]:
        """Return the recorded values of each row by name, [n, …] of its n tokens, int32 or float32, from the ranks of
        all pipeline stages."""
        recorded: list[dict[str, np.ndarray]] = [{} for _ in range(len(self.responses))]
        for rank, result in zip(ranks, results, strict=True):
            replica_rows = self.rows[rank.dp_rank]
            for name, by_row in (result or {}).items():
                for row, value in by_row.items():
                    if row < len(replica_rows):  # the rest is blank
                        recorded[replica_rows[row]][name] = value
        return recorded


def dispatch(
    batch: TrainingBatch,
    dp_size: int,
    flops: ModelFlops,
    rows: np.ndarray | None = None,
    *,
    trains: bool = True,
    stages: Sequence[tuple[int, ...]] = (),
    shares_prefixes: bool = False,
) -> ShardedBatch:
    """Split ``rows`` [b] int64 of ``batch``, by default all, over ``dp_size`` replicas, balanced by FLOPs.

    A pass that does not train is split as the mini-batches will be, so that ranks have the rows that they train on.
    The rows of each adapter are split separately, those of a uid with ``TOGETHER`` not at all. If there are fewer rows
    than replicas, blank rows without weight are added. ``stages``: layers whose routes each pipeline stage replays.
    ``shares_prefixes``: rows that share enough tokens stay together, as far as replicas get equal work.
    """
    if batch.carried is None:
        batch.carried = Carried(len(batch), stages)
    prompts = batch.metadata.get(MINI_BATCH_PROMPTS)
    parts = [np.arange(len(batch)) if rows is None else rows]
    has_own_prompts = len(batch.metadata.get(PROMPT_UIDS, batch.uids)) == len(batch)  # not some rows of a batch
    if prompts and not trains and has_own_prompts:
        chosen_rows = parts[0]
        parts = [np.intersect1d(part, chosen_rows) for part in mini_batches(batch, prompts)]
        parts = [part for part in parts if len(part)]
    prefixes = batch.carried.prefixes(batch) if shares_prefixes and dp_size > 1 else None
    if prefixes and prefixes.saved(batch.lengths) >= WORTH and not batch.metadata.get(TOGETHER):
        splits = [_split_families(batch, prefixes, part, flops, dp_size) for part in parts]
    else:
        costs = flops.forward(batch.lengths)
        splits = [_split(batch, part, costs, dp_size) for part in parts]
    names = TRAINED if trains else SCORED
    metadata = {key: value for key, value in batch.metadata.items() if key not in (PROMPT_UIDS, MINI_BATCH_PROMPTS)}
    shares: list[Share] = []
    all_rows: list[np.ndarray] = []
    for replica in range(dp_size):
        chosen = [split[replica][0] for split in splits]
        blanks = [adapter for split in splits for adapter in split[replica][1]]
        for part in chosen:  # a block for each mini-batch
            batch.carried.take(batch, part, names)
        of_replica = np.sort(np.concatenate(chosen))
        taken = batch.carried.take(batch, of_replica, names)
        blocks = np.zeros(len(of_replica), np.int64)
        for number, (_, where) in enumerate(taken):
            blocks[where] = number
        references = [
            {name: block.references[name] for name in names if name in block.references} for block, _ in taken
        ]
        # the first replica has the largest row
        references = references or shares[0].references
        shares.append(Share(references, blocks, batch.carried.place_of[of_replica], blanks, metadata))
        all_rows.append(of_replica)
    return ShardedBatch(all_rows, shares, batch.responses)


def _split(
    batch: TrainingBatch, rows: np.ndarray, costs: np.ndarray, dp_size: int
) -> list[tuple[np.ndarray, list[str]]]:
    """Return (rows [b] int64, adapters of blank rows) of each replica. ``costs``: [B]."""
    if batch.metadata.get(TOGETHER):
        parts = units(batch, rows)
        of_parts = np.array([costs[part].sum() for part in parts] + [0.0] * max(dp_size - len(parts), 0))
        shares = split_for_dp(of_parts, dp_size)
        names = [""] * len(of_parts)
        return [
            (joined(parts, share[share < len(parts)]), [names[part] for part in share if part >= len(parts)])
            for share in shares
        ]
    names = list(dict.fromkeys(batch.adapters)) or [""]
    split: list[tuple[list[np.ndarray], list[str]]] = [([], []) for _ in range(dp_size)]
    for name, of_adapter in rows_by_adapter(batch, names).items():
        chosen = np.intersect1d(of_adapter, rows)
        if not len(chosen):  # an adapter without rows takes no step
            continue
        of_rows = np.concatenate([costs[chosen], np.zeros(max(dp_size - len(chosen), 0))])
        for (real, blanks), share in zip(split, split_for_dp(of_rows, dp_size), strict=True):
            real.append(chosen[share[share < len(chosen)]])
            blanks += [name] * int((share >= len(chosen)).sum())
    return [(np.sort(np.concatenate(real)), blanks) for real, blanks in split]


def _split_families(
    batch: TrainingBatch, prefixes: SharedPrefixes, rows: np.ndarray, flops: ModelFlops, dp_size: int
) -> list[tuple[np.ndarray, list[str]]]:
    """Return what :func:`_split` does, with the rows of a prefix on one replica if that is no more than its work."""
    names = list(dict.fromkeys(batch.adapters)) or [""]
    split: list[tuple[list[np.ndarray], list[str]]] = [([], []) for _ in range(dp_size)]
    for name, of_adapter in rows_by_adapter(batch, names).items():
        if not len(chosen := np.intersect1d(of_adapter, rows)):
            continue
        families, costs = prefixes.families(chosen, batch.lengths, flops.forward, dp_size)
        of_parts = np.concatenate([costs, np.zeros(max(dp_size - len(families), 0))])
        for (real, blanks), share in zip(split, balance(of_parts, dp_size), strict=True):
            real.append(joined(families, share[share < len(families)]))
            blanks += [name] * int((share >= len(families)).sum())
    return [(np.sort(np.concatenate(real)), blanks) for real, blanks in split]


def top_tensors(places: TopTokens, spans: RowSpans, k: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of all rows: log-probs [R, k] float32, and ids [R, k] int32. ``spans``: the R
    responses. What is in the object store stays there."""
    tensors = []
    for number, dtype in enumerate((np.float32, np.int32)):
        pieces = [places[row][number] for row in range(len(spans))]
        array = joined_arrays([StoredArray([piece], (k,), np.dtype(dtype)) for piece in pieces])
        here = all(isinstance(source, np.ndarray) for source, _, _ in array.pieces)
        tensors.append(torch.from_numpy(np.array(array)) if here else TensorElsewhere(array))
    return tensors[0], tensors[1]


# ---------------------------------------------------------------------------------------------------- on the ranks
def from_arrays(blocks: Sequence[Mapping[str, Any]], block_of: np.ndarray, place_of: np.ndarray) -> TrainingBatch:
    """Return the batch of rows, given the block and the place in it of each, [b] int64; ``blocks`` are those of
    :func:`to_arrays`. The tensors are copies."""
    tokens = [RowSpans(block["lengths"]) for block in blocks]
    responses = [RowSpans(block["response_lengths"]) for block in blocks]
    order = list(zip(block_of.tolist(), place_of.tolist(), strict=True))
    fields: dict[str, Any] = {}
    for name in blocks[0] if blocks else ():
        values = [_unpacked(name, block[name]) for block in blocks]
        if name in LISTS:
            fields[name] = [values[block][row] for block, row in order] if values[0] else []
            continue
        where = tokens if name == "tokens" else responses if name in OF_RESPONSES else None
        pieces = [
            values[block][row : row + 1] if where is None else values[block][where[block].of(row)]
            for block, row in order
        ]
        joined_pieces = np.asarray(joined_arrays([values[0][:0], *pieces]))
        if not joined_pieces.flags.writeable:  # a view of the object store
            joined_pieces = joined_pieces.copy()
        fields[name] = joined_pieces if name in ("lengths", "response_lengths") else torch.from_numpy(joined_pieces)
    return TrainingBatch(**fields)


def _unpacked(name: str, value: Any) -> Any:
    """Return the entries of a field that :func:`to_arrays` packed."""
    if not isinstance(value, dict):
        return value
    if "bits" in value:
        return np.unpackbits(value["bits"], count=value["size"]).astype(bool)
    ends = np.cumsum(value["tokens"])  # of rollout_support
    id_ends = np.concatenate([[0], np.cumsum(value["counts"])])
    return [
        TokenSupport(value["ids"][id_ends[end - n] : id_ends[end]], value["counts"][end - n : end])
        for end, n in zip(ends.tolist(), value["tokens"].tolist(), strict=True)
    ]
