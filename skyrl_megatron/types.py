"""Shape legend, and the batches that the layers of the project exchange.

Legend (for every docstring and comment of the project):

    B  sequences of a batch                 V  vocabulary (``V_padded`` when padded to the tp size)
    N  tokens of a batch, row after row     R  response tokens of a batch, row after row
    T  response tokens, right-aligned and padded at the left
    S  tokens of a padded sequence (prompt + response), padded at the left
    P  packed tokens: the concatenated sequences of a micro-batch, without padding
    H  hidden size   E  experts   K  experts per token (top-k)   L  layers

A step's batch is flat (``[N]``, ``[R]``), so that it takes the memory of its tokens. A micro-batch is small and sees
both forms: the model runs on packed ``[P]`` tensors with ``cu_seqlens``, losses on ``[B, T]``.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

OWN_LOGPROBS = "own_logprobs"
"""Metadata key of a batch that gets a single optimizer step: the log-probs before the update are those of the training
forward pass."""


@dataclass(frozen=True, slots=True)
class TokenSupport:
    """The sampling support of n tokens: the vocabulary entries that top-k, top-p and min-p left for each token.

    A token without entries was sampled from the whole vocabulary, or was not sampled.
    """

    ids: Any
    """[N] uint16 or int32: vocabulary entries of all tokens, concatenated: an array, or a :class:`StoredArray`."""
    counts: np.ndarray
    """[n] int32: number of entries of each token."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> TokenSupport:
        """Make the support from the entries of each token."""
        counts = np.fromiter(map(len, sets), np.int32, len(sets))
        ids = np.fromiter((entry for entries in sets for entry in entries), np.int32, int(counts.sum()))
        return cls(ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids, counts)

    @classmethod
    def none(cls, tokens: int) -> TokenSupport:
        """Make the support of ``tokens`` tokens without entries."""
        return cls(np.zeros(0, np.uint16), np.zeros(tokens, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[TokenSupport]) -> TokenSupport:
        """Concatenate the supports of several parts."""
        return cls(joined_arrays([part.ids for part in parts]), np.concatenate([part.counts for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def first(self, tokens: int) -> TokenSupport:
        """Return the support of the first ``tokens`` tokens."""
        return TokenSupport(self.ids[: int(self.counts[:tokens].sum())], self.counts[:tokens])

    def last(self, tokens: int) -> TokenSupport:
        """Return the support of the last ``tokens`` tokens."""
        left = len(self) - tokens
        return TokenSupport(self.ids[int(self.counts[:left].sum()) :], self.counts[left:])

    def without(self, tokens: np.ndarray) -> int | None:
        """Return the first position whose sampled token (``tokens`` [n]) is not in its support, else None."""
        places, ids = np.repeat(np.arange(len(self)), self.counts), np.asarray(self.ids)
        found = np.bincount(places, weights=ids == np.repeat(tokens, self.counts), minlength=len(self))
        missing = np.flatnonzero((found == 0) & (self.counts > 0))
        return int(missing[0]) if missing.size else None


class Stored(Protocol):
    """A reference to an array elsewhere, such as in Ray's object store (``workers/dispatch.py``)."""

    @property
    def name(self) -> str:
        """Name that no other object has."""

    def get(self, stored: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays [n, …] of several references, fetched together."""


@dataclass(frozen=True, slots=True, eq=False)
class ByLayer:
    """An array [n, L, …] whose layers are stored in groups, so that a rank fetches those of its pipeline stage."""

    layers: tuple[tuple[int, ...], ...]
    """Layers of each group. An array is 0 in layers of no group."""
    groups: tuple[Any, ...]
    """[n, l, …] of each group: an array, or :class:`Stored`."""

    def holding(self, layers: Sequence[int] | None) -> list[int]:
        """Return the numbers of the groups that have some of ``layers``; None: of all groups."""
        some = range(len(self.groups))
        return [group for group in some if layers is None or not set(layers).isdisjoint(self.layers[group])]


class StoredArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array [n, …] in Ray's object store, in pieces along its first axis, which is fetched when it is read.

    ``len``, ``shape``, ``dtype``, ``nbytes``, slices of the first axis and :func:`joined_arrays` do not fetch it; all
    else does, and gives what the NumPy array gives. ``array[rows, layers]``, with a slice and a list, fetches these
    layers. ``pieces``: (array, :class:`Stored` or :class:`ByLayer`, first, end) of each.
    """

    __slots__ = ("dtype", "ends", "pieces", "shape")

    def __init__(self, pieces: Sequence[tuple[Any, int, int]], rest: Sequence[int], dtype: np.dtype) -> None:
        self.pieces = tuple(piece for piece in pieces if piece[1] < piece[2])
        self.ends = list(accumulate(end - first for _, first, end in self.pieces))
        """Where each piece ends in the array."""
        self.shape = (self.ends[-1] if self.ends else 0, *rest)
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], slice) and isinstance(part[1], list):
            rows = self if part[0].step not in (None, 1) else self[part[0]]
            [taken] = fetched([rows], part[1])
            taken = taken._read({}, part[1]) if isinstance(taken, StoredArray) else taken[:, part[1]]
            return taken if rows is not self else taken[part[0]]
        if not isinstance(part, slice) or part.step not in (None, 1):
            return np.asarray(self)[part]
        start, stop, _ = part.indices(len(self))
        pieces = []
        for number in range(bisect_right(self.ends, start), min(bisect_left(self.ends, stop) + 1, len(self.pieces))):
            source, first, end = self.pieces[number]
            at = self.ends[number] - (end - first)
            pieces.append((source, first + max(start - at, 0), min(end, first + stop - at)))
        return StoredArray(pieces, self.shape[1:], self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(fetched([self])[0], dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*fetched(inputs), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__:  # a copy that is being made has no fields yet
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def _wanted(self, layers: Sequence[int] | None) -> dict[str, Stored]:
        """Return what :meth:`_read` needs of the store, by its name."""
        wanted: dict[str, Stored] = {}
        for source, _, _ in self.pieces:
            parts = [source.groups[n] for n in source.holding(layers)] if isinstance(source, ByLayer) else [source]
            wanted |= {part.name: part for part in parts if not isinstance(part, np.ndarray)}
        return wanted

    def _read(self, objects: Mapping[str, np.ndarray], layers: Sequence[int] | None) -> np.ndarray:
        """Return the array, or its ``layers`` [n, l, …]; ``objects``: what was fetched, by its name."""
        all_layers = layers is None
        shape = self.shape if all_layers else (self.shape[0], len(layers or ()), *self.shape[2:])
        if not all_layers and not layers:
            return np.zeros(shape, self.dtype)
        taken = []
        for source, first, end in self.pieces:
            if not isinstance(source, ByLayer):
                array = source if isinstance(source, np.ndarray) else objects[source.name]
                taken.append(array[first:end] if all_layers else array[first:end, list(layers or ())])
                continue
            columns = {layer: column for column, layer in enumerate(range(shape[1]) if all_layers else layers or ())}
            piece = np.zeros((end - first, *shape[1:]), self.dtype)
            for number in source.holding(layers):
                group = source.groups[number]
                group = group if isinstance(group, np.ndarray) else objects[group.name]
                pairs = [(columns[layer], n) for n, layer in enumerate(source.layers[number]) if layer in columns]
                piece[:, [column for column, _ in pairs]] = group[first:end, [n for _, n in pairs]]
            taken.append(piece)
        return taken[0] if len(taken) == 1 else np.concatenate([np.zeros((0, *shape[1:]), self.dtype), *taken])

    def _with(self, objects: Mapping[str, np.ndarray]) -> StoredArray:
        """Return the same array, of which ``objects`` have parts."""

        def here(part: Any) -> Any:
            return part if isinstance(part, np.ndarray) else objects.get(part.name, part)

        def of(source: Any) -> Any:
            return ByLayer(source.layers, tuple(map(here, source.groups))) if type(source) is ByLayer else here(source)

        pieces = [(of(source), first, end) for source, first, end in self.pieces]
        return StoredArray(pieces, self.shape[1:], self.dtype)


def joined_arrays(parts: Sequence[np.ndarray | StoredArray]) -> Any:
    """Concatenate arrays [n, …] along their first axis, without a fetch if one of them is stored."""
    if not any(isinstance(part, StoredArray) for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])
    pieces: list[tuple[Any, int, int]] = []
    for source, first, end in (piece for part in parts for piece in _pieces(part)):
        if pieces and pieces[-1][0] is source and pieces[-1][2] == first:
            pieces[-1] = (source, pieces[-1][1], end)
        else:
            pieces.append((source, first, end))
    return StoredArray(pieces, parts[0].shape[1:], np.result_type(*(part.dtype for part in parts)))


def _pieces(part: np.ndarray | StoredArray) -> Sequence[tuple[Any, int, int]]:
    return part.pieces if isinstance(part, StoredArray) else [(part, 0, len(part))]


def fetched(arrays: Sequence[Any], layers: Sequence[int] | None = None) -> list[Any]:
    """Return ``arrays`` with those that are stored as NumPy arrays, fetched together; what is of another kind stays.

    ``layers``: those that will be read. An array whose layers are stored apart then stays a :class:`StoredArray`, with
    these fetched; without layers, nothing is fetched. On the node that has an object this copies nothing. Raises Ray's
    errors of lost objects.
    """
    stored = [array for array in arrays if isinstance(array, StoredArray)] if layers is None or layers else []
    wanted = {name: part for array in stored for name, part in array._wanted(layers).items()}
    objects: dict[str, np.ndarray] = {}
    if wanted:
        objects = dict(zip(wanted, next(iter(wanted.values())).get(list(wanted.values())), strict=True))

    def whole(array: Any) -> Any:
        if not isinstance(array, StoredArray) or not stored:
            return array
        apart = layers is not None and any(isinstance(source, ByLayer) for source, _, _ in array.pieces)
        return array._with(objects) if apart else array._read(objects, None)

    return [whole(array) for array in arrays]


class TensorElsewhere(Tensor):
    """The tensor of a :class:`StoredArray` ``array``, which is fetched when it is read, once: a change in place stays.

    ``shape``, ``dtype`` and ``len`` do not fetch it. What functions return is an ordinary tensor.
    """

    array: StoredArray
    _here: Tensor | None

    @staticmethod
    def __new__(cls, array: StoredArray) -> TensorElsewhere:
        dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
        made: TensorElsewhere = Tensor._make_wrapper_subclass(cls, array.shape, dtype=dtype)
        made.array, made._here = array, None
        return made

    @property
    def stored(self) -> StoredArray | None:
        """Where the tensor is; None once it was read."""
        return self.array if self._here is None else None

    def here(self) -> Tensor:
        """Return the tensor, in the memory of this process."""
        if self._here is None:
            self._here = torch.from_numpy(np.array(self.array))
        return self._here

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(TensorElsewhere, TensorElsewhere.here, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.here().numpy(), dtype=dtype, copy=copy)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.here().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.here().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.here())

    def numpy(self, **options: Any) -> np.ndarray:
        return self.here().numpy(**options)

    def tolist(self) -> Any:
        return self.here().tolist()

    def contiguous(self, **options: Any) -> Tensor:  # type: ignore[override]
        return self.here().contiguous(**options)


class RowSpans:
    """The rows of flat values: B rows whose R values stand one after another, without padding.

    ``lengths`` [B] int64: values of each row, which may be 0. ``starts`` [B] int64: its first value.
    """

    __slots__ = ("_lengths", "lengths", "starts")

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self._lengths = torch.from_numpy(self.lengths.copy())

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        """R, the number of values."""
        return int(self.lengths.sum())

    def of(self, row: int) -> slice:
        """Return where the values of a row are."""
        return slice(int(self.starts[row]), int(self.starts[row] + self.lengths[row]))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of each row of ``values`` [R], [B] float64: the sum of a long row is exact to many digits."""
        return self._reduced(np.add, values, 0.0, np.float64)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each row of ``values`` [R] floating, [B] of the same dtype; −∞ of an empty row."""
        return self._reduced(np.maximum, values, -np.inf, values.numpy().dtype)

    def any(self, chosen: Tensor) -> Tensor:
        """Return [B] bool: whether ``chosen`` [R] bool holds for a value of each row."""
        return self._reduced(np.logical_or, chosen, False, np.bool_)

    def _reduced(self, function: np.ufunc, values: Tensor, empty: float, dtype: Any) -> Tensor:
        """Return ``function`` over each row, [B]; ``empty`` of an empty row."""
        rows = np.flatnonzero(self.lengths)  # without the empty rows each row ends where the next one begins
        out = np.full(len(self), empty, dtype)
        blocks = self.starts[rows] // 2**20  # NumPy holds the GIL while it converts values
        for some in np.split(rows, np.flatnonzero(np.diff(blocks)) + 1) if len(rows) else ():
            first, end = self.starts[some[0]], self.starts[some[-1]] + self.lengths[some[-1]]
            out[some] = function.reduceat(values[first:end].numpy(), self.starts[some] - first, dtype=dtype)
        return torch.from_numpy(out)

    def spread(self, of_rows: Tensor) -> Tensor:
        """Return for each value that of its row in ``of_rows`` [B, …]: [R, …]."""
        return of_rows.repeat_interleave(self._lengths, dim=0)

    def row_of(self, position: int) -> tuple[int, int]:
        """Return (row, place in the row) of a value by its ``position`` in [R]."""
        row = int(np.searchsorted(self.starts + self.lengths, position, "right"))
        return row, position - int(self.starts[row])

    def numbers(self) -> Tensor:
        """Return the row of each value, [R] int64."""
        return self.spread(torch.arange(len(self)))

    def select[T: (Tensor, np.ndarray)](self, values: T, rows: Sequence[int] | np.ndarray) -> T:
        """Return the values of ``rows`` [b] int64, in their order, of ``values`` [R, …]: [r, …]; those of neighbours
        as a view."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and bool((np.diff(rows) == 1).all()):  # neighbours: one slice
            first, last = int(rows[0]), int(rows[-1])
            return values[int(self.starts[first]) : int(self.starts[last] + self.lengths[last])]
        # one copy of each row: an index of every value would take more memory than most values
        pieces = [values[self.of(row)] for row in rows.tolist()] or [values[:0]]
        return torch.cat(pieces) if isinstance(values, Tensor) else np.concatenate(pieces)

    def padded(self, values: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``values`` [R, …] as [B, width, …], right-aligned, 0 elsewhere. ``width`` defaults to the longest
        row, at least 1."""
        out = values.new_zeros(len(self), self.width if width is None else width, *values.shape[1:], dtype=dtype)
        for line, start, length in zip(out, self.starts.tolist(), self.lengths.tolist(), strict=True):
            if length:
                line[-length:] = values[start : start + length]
        return out

    def flat(self, padded: Tensor) -> Tensor:
        """Return the values [R, …] of right-aligned rows [B, T, …]."""
        width = padded.shape[1]
        rows = zip(padded, self.lengths.tolist(), strict=True)
        return torch.cat([line[width - length :] for line, length in rows] or [padded.new_zeros(0, *padded.shape[2:])])

    @property
    def width(self) -> int:
        """The longest row, at least 1."""
        return int(self.lengths.max(initial=1))

    def of_similar_length(self, most: int) -> list[np.ndarray]:
        """Return the rows in parts, each [b] int64, whose padded form is little more than their values: at most
        ``most`` values padded, or one row."""
        parts: list[list[int]] = []
        width = 0
        for row in np.argsort(-self.lengths, kind="stable").tolist():
            # from the longest on: the first row of a part is as wide as any of it
            full = not parts or (len(parts[-1]) + 1) * width > most or 4 * int(self.lengths[row]) < 3 * width
            if full:
                parts.append([])
                width = max(int(self.lengths[row]), 1)
            parts[-1].append(row)
        return [np.asarray(part, dtype=np.int64) for part in parts]


OF_RESPONSES = (
    "response_mask",
    "loss_mask",
    "rewards",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "teacher_top_logprobs",
    "teacher_top_ids",
    "values",
    "advantages",
    "returns",
    "observation_mask",
)
"""Fields of a batch with a value for each response token."""
OF_ROWS = ("is_last_step", "truncated", "reward_parts", "preferences")
"""Fields of a batch that are tensors with an entry for each row."""
LISTS = ("uids", "adapters", "rollout_support", "rollout_routes")
"""Fields of a batch that are lists with an entry for each row, or empty."""
MASKS = ("response_mask", "loss_mask", "observation_mask")
PADDED_DTYPES = dict.fromkeys(MASKS, torch.float32) | {"teacher_top_ids": torch.int64}
"""Dtypes of padded fields that differ from the flat ones."""


@dataclass(slots=True)
class TrainingBatch:
    """Sequences with all data that training needs, without padding: every field is flat, one row after another.

    Example: prompt ``a b`` with response ``x y z``, prompt ``c`` with response ``u``; N = 7, R = 4::

        tokens   a b x y z c u       lengths           5 2
        rewards      0 0 1   1       response_lengths  3 1

    :meth:`padded` has the form that estimators and losses see. Tensors are on the CPU.
    """

    tokens: Tensor
    """[N] int32: prompt and response of each row."""
    lengths: np.ndarray
    """[B] int64: number of tokens of each row."""
    response_lengths: np.ndarray
    """[B] int64: number of tokens of each response, the last ones of the row."""
    response_mask: Tensor
    """[R] bool: response tokens, of the policy and of the environment. False in rows that failed."""
    loss_mask: Tensor
    """[R] bool: the trained tokens, a subset of ``response_mask``."""
    uids: list[str] = field(default_factory=list)
    """[B] uid of each row's prompt; rows with the same uid are a group of group-relative estimators."""
    rewards: Tensor | None = None
    """[R] float32: reward of each token."""
    rollout_logprobs: Tensor | None = None
    """[R] float32, nats: log-probs of the engine that sampled the tokens, over ``rollout_support`` if present, else
    over the whole vocabulary."""
    old_logprobs: Tensor | None = None
    """[R] float32, nats: log-probs of the trainer before the update."""
    ref_logprobs: Tensor | None = None
    """[R] float32, nats: log-probs of the reference policy."""
    teacher_logprobs: Tensor | None = None
    """[R] float32, nats: log-probs of the row's teacher."""
    teacher_top_logprobs: Tensor | None = None
    """[R, K] float32, nats: log-probs of the teacher's likeliest tokens, in descending order; a
    :class:`TensorElsewhere` of a teacher that has ranks."""
    teacher_top_ids: Tensor | None = None
    """[R, K] int32: the ids of these tokens."""
    values: Tensor | None = None
    """[R] float32: critic's values before the update."""
    advantages: Tensor | None = None
    """[R] float32."""
    returns: Tensor | None = None
    """[R] float32."""
    is_last_step: Tensor | None = None
    """[B] bool: last row of its trajectory (step-wise trajectories have one row per turn)."""
    truncated: Tensor | None = None
    """[B] bool: a length limit cut off the response."""
    observation_mask: Tensor | None = None
    """[R] bool: response tokens of the environment, which ``observation_loss_coef`` trains on."""
    reward_parts: Tensor | None = None
    """[B, n] float32: the n rewards that ``gdpo`` normalises separately."""
    preferences: Tensor | None = None
    """[B, 3] float64 of preferences: 1 for a row of the better answer, -1 for one of the other; the summed log-probs
    of its trained tokens under the reference, in nats; and the margin of its pair."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data of the whole batch, passed on unchanged."""
    adapters: list[str] = field(default_factory=list)
    """[B] name of each row's policy adapter. Empty: all rows use the first adapter, or adapters have no names."""
    rollout_support: list[TokenSupport] = field(default_factory=list)
    """[B] sampling support of each row's response tokens. Log-probs and entropies of all models are computed over it.
    Empty: over the whole vocabulary."""
    rollout_routes: list[Any] = field(default_factory=list)
    """[B] of [n, L, K] uint8/uint16: the experts that the engine chose for the first n tokens of a row, by model
    layer: an array, or a :class:`StoredArray`, which only ranks fetch. With ``moe_routing_replay_source=trainer`` the
    trainer chose them before the update. None: unknown for this row. Empty: unknown for all rows."""
    carried: Any = field(default=None, repr=False, compare=False)
    """What is in the object store of these rows (``workers/dispatch.py``), which frees it with the batch."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> RowSpans:
        """Where the tokens of each row are in ``tokens``."""
        return RowSpans(self.lengths)

    @property
    def responses(self) -> RowSpans:
        """Where the response tokens of each row are in the fields [R]."""
        return RowSpans(self.response_lengths)

    def response_tokens(self) -> Tensor:
        """Return the tokens of the responses, [R] int32."""
        ends = (self.rows.starts + self.lengths).tolist()
        pieces = [self.tokens[end - n : end] for end, n in zip(ends, self.response_lengths.tolist(), strict=True)]
        return torch.cat([self.tokens[:0], *pieces])

    def select(self, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
        """Return copies of the given rows, in the given order."""
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        tokens, responses = self.rows, self.responses
        picked: dict[str, Any] = {"tokens": tokens.select(self.tokens, index).clone(), "metadata": self.metadata}
        picked |= {name: getattr(self, name)[index] for name in ("lengths", "response_lengths")}
        for name in OF_RESPONSES:
            value = getattr(self, name)
            picked[name] = None if value is None else responses.select(value, index).clone()
        for name in OF_ROWS:
            value = getattr(self, name)
            picked[name] = None if value is None else value[torch.from_numpy(index)]
        for name in LISTS:
            value = getattr(self, name)
            picked[name] = [value[row] for row in index.tolist()] if value else []
        return TrainingBatch(**picked)

    def blank_row(self) -> TrainingBatch:
        """Return one row without tokens, with the fields of this batch.

        It lets a rank without data take part in collectives, and has weight 0.
        """
        blank: dict[str, Any] = {"metadata": self.metadata, "tokens": self.tokens[:0]}
        blank |= {name: np.zeros(1, np.int64) for name in ("lengths", "response_lengths")}
        for name in (*OF_RESPONSES, *OF_ROWS):
            value = getattr(self, name)
            if value is not None:
                blank[name] = value[:0] if name in OF_RESPONSES else value.new_zeros(1, *value.shape[1:])
        return TrainingBatch(
            **blank,
            uids=[""] if self.uids else [],
            adapters=self.adapters[:1],
            rollout_support=[TokenSupport.none(0)] if self.rollout_support else [],
            rollout_routes=[None] if self.rollout_routes else [],
        )

    @classmethod
    def joined(cls, parts: Sequence[TrainingBatch]) -> TrainingBatch:
        """Concatenate the rows of batches that have the same fields; the metadata is that of the first."""
        first = parts[0]
        made: dict[str, Any] = {"metadata": first.metadata}
        for name in ("lengths", "response_lengths"):
            made[name] = np.concatenate([getattr(part, name) for part in parts])
        for name in ("tokens", *OF_RESPONSES, *OF_ROWS):
            values = [getattr(part, name) for part in parts]
            made[name] = None if values[0] is None else torch.cat(values)
        for name in LISTS:
            made[name] = [entry for part in parts for entry in getattr(part, name)]
        return cls(**made)

    def padded(self) -> PaddedBatch:
        """Return the rows as padded tensors."""
        responses = self.responses
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*OF_ROWS, *LISTS, "metadata")}
        for name in OF_RESPONSES:
            value = getattr(self, name)
            dtype = PADDED_DTYPES.get(name)
            fields[name] = None if value is None else responses.padded(value, dtype=dtype)
        valid = self.rows.padded(torch.ones(len(self.tokens), dtype=torch.bool))
        sequences = self.rows.padded(self.tokens, dtype=torch.int64)
        return PaddedBatch(sequences, valid, **fields, response_lengths=self.response_lengths)


def rows_without_response(tokens: Sequence[Tensor]) -> TrainingBatch:
    """Return a batch of rows that a model only reads. ``tokens``: [n] integers of each row."""
    none = torch.zeros(0, dtype=torch.bool)
    lengths = np.asarray([len(row) for row in tokens], np.int64)
    return TrainingBatch(torch.cat(list(tokens)).int(), lengths, np.zeros(len(tokens), np.int64), none, none)


@dataclass(slots=True)
class PaddedBatch:
    """The rows of a :class:`TrainingBatch` as padded tensors: what losses and estimators look at.

    Example: the rows of :class:`TrainingBatch`; S = 5, T = 3::

        sequences       a b x y z        response_mask   1 1 1
                        . . . c u                        . . 1

    Token ``t`` of ``[B, T]`` is in column ``S - T + t`` of ``sequences``. The trainer computes its log-prob at the
    previous column. Fields that are not described here are those of the flat batch, [B, T, …] in place of [R, …].
    """

    sequences: Tensor
    """[B, S] int64: prompt and response, padded at the left."""
    attention_mask: Tensor
    """[B, S] bool: False on padding."""
    response_mask: Tensor
    """[B, T] float32 in {0, 1}."""
    loss_mask: Tensor
    """[B, T] float32 in {0, 1}."""
    uids: list[str] = field(default_factory=list)
    rewards: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    """[B, T, K] int64."""
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    is_last_step: Tensor | None = None
    truncated: Tensor | None = None
    observation_mask: Tensor | None = None
    """[B, T] float32 in {0, 1}."""
    reward_parts: Tensor | None = None
    preferences: Tensor | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    adapters: list[str] = field(default_factory=list)
    rollout_support: list[TokenSupport] = field(default_factory=list)
    rollout_routes: list[np.ndarray | None] = field(default_factory=list)
    response_lengths: np.ndarray | None = None
    """[B] int64: tokens of each response. None: from the first token that a mask holds."""

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64: number of tokens of each row without padding."""
        return self.attention_mask.sum(dim=1, dtype=torch.int64).numpy(force=True)

    def to(self, device: torch.device) -> PaddedBatch:
        """Return the same batch with every tensor on ``device``."""
        moved: dict[str, Any] = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return PaddedBatch(**moved)

    def flat(self) -> TrainingBatch:
        """Return the rows without padding."""
        lengths, counts = self.lengths, self.response_lengths
        if counts is None:
            held = torch.stack([getattr(self, name) for name in MASKS if getattr(self, name) is not None]).any(0)
            first = torch.where(held.any(1), held.int().argmax(1), held.shape[1])
            counts = (held.shape[1] - first).numpy(force=True)
        responses = RowSpans(counts)
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*OF_ROWS, *LISTS, "metadata")}
        for name in OF_RESPONSES:
            value = getattr(self, name)
            dtype = torch.bool if name in MASKS else torch.int32 if name == "teacher_top_ids" else None
            fields[name] = None if value is None else responses.flat(value.cpu()).to(dtype)
        tokens = RowSpans(lengths).flat(self.sequences.cpu()).int()
        return TrainingBatch(tokens, lengths, responses.lengths, **fields)


Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")
"""All parts, in the order in which a step needs them."""
