"""Groups, trajectories and schedules as bytes, bit for bit.

Layout: uint32 length of the JSON text, the text, the arrays one after the other. The text is ``[arrays, tree]``;
``arrays`` has ``[dtype, shape, packed]`` of each, ``packed`` where eight values of 0 and 1 share a byte. In the tree,
None, bool, int, float and str are themselves, a dict with text as keys is an object, and everything else is a list
that begins with what it is: ``l`` list, ``t`` tuple, ``d`` dict of pairs, ``a`` array, ``c`` list of arrays as one and
their lengths, ``s`` numpy scalar, ``i`` and ``f`` lists of integers and of floats in an array, ``z`` a list of floats
of which most are 0, and a class by its name.

A response token takes 4 bytes of id, 4 of log-prob, 1/8 of mask and L · K of routes, one or two each; a reward that is
0 takes nothing.

It is what decides, after a crash, which groups are trained already, and from which a run can be repeated: with the
recorded groups, a replay trains the same batches in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from array import array as Doubles
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_megatron.errors import DataError, JournalError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.conversation import TrajectoryOutput
from skyrl_megatron.rollout.episode import PartialTrajectory, Trajectory
from skyrl_megatron.rollout.interface import GeneratorOutput, RecordedTurn, TrajectoryID
from skyrl_megatron.trainer.journal import Buffer, Journal
from skyrl_megatron.types import TokenSupport

_LENGTH = struct.Struct("<I")
_PLAIN = frozenset((type(None), bool, int, float, str))
_SHORT = 8
"""Lists of fewer numbers stay in the text."""


class Codec:
    """Encodes trees of None, bool, int, float, str, list, tuple, dict, numpy arrays and the given dataclasses."""

    def __init__(self, *classes: type) -> None:
        self._classes = {kind.__name__: kind for kind in classes}
        self._fields = {kind: [field.name for field in dataclasses.fields(kind)] for kind in classes}

    def encode(self, value: Any) -> list[Buffer]:
        """Return the bytes in parts; arrays are not copied. Raises DataError naming a value of another type."""
        arrays: list[tuple[list[Any], Buffer]] = []
        tree = self._tree(value, arrays, "")
        text = json.dumps([[about for about, _ in arrays], tree], separators=(",", ":")).encode()
        return [_LENGTH.pack(len(text)), text, *(data for _, data in arrays)]

    def decode(self, data: Buffer) -> Any:
        """Return the value. Raises JournalError for one that another version of the package recorded."""
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        about, tree = json.loads(bytes(data[_LENGTH.size : at]))
        arrays: list[np.ndarray] = []
        for dtype, shape, packed in about:
            array, at = _array(data, at, np.dtype(dtype), shape, packed)
            arrays.append(array)
        try:
            return self._value(tree, arrays)
        except (TypeError, LookupError) as error:
            raise JournalError(f"a record does not fit this version of skyrl-megatron: {error}") from error

    def _tree(self, value: Any, arrays: list[tuple[list[Any], Buffer]], path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is np.ndarray:
            return ["a", _add(value, arrays, path)]
        if kind is list:
            if whole := _numbers(value, arrays) or _column(value, arrays, path):
                return whole
            if _PLAIN.issuperset(map(type, value)):
                return ["l", *value]
            return ["l", *(self._tree(each, arrays, f"{path}[{i}]") for i, each in enumerate(value))]
        if kind is tuple:
            if _PLAIN.issuperset(map(type, value)):
                return ["t", *value]
            return ["t", *(self._tree(each, arrays, path) for each in value)]
        if kind is dict:
            if all(type(key) is str for key in value):
                return {key: self._tree(each, arrays, f"{path}.{key}") for key, each in value.items()}
            pairs = ((self._tree(k, arrays, path), self._tree(v, arrays, path)) for k, v in value.items())
            return ["d", *pairs]
        if kind in self._fields:
            values = ((name, getattr(value, name)) for name in self._fields[kind])
            return [kind.__name__, {name: self._tree(each, arrays, f"{path}.{name}") for name, each in values}]
        if isinstance(value, np.generic):
            return ["s", _add(np.asarray(value), arrays, path)]
        raise DataError(
            f"{path.lstrip('.') or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be recorded:"
            " return numbers, text, lists, dicts or numpy arrays"
        )

    def _value(self, tree: Any, arrays: list[np.ndarray]) -> Any:
        if isinstance(tree, dict):
            return {key: self._value(each, arrays) for key, each in tree.items()}
        if not isinstance(tree, list):
            return tree
        tag, *rest = tree
        if tag == "l":
            return [self._value(each, arrays) for each in rest]
        if tag == "t":
            return tuple(self._value(each, arrays) for each in rest)
        if tag == "d":
            return {self._value(key, arrays): self._value(each, arrays) for key, each in rest}
        if tag == "a":
            return arrays[rest[0]]
        if tag == "c":
            return [part.copy() for part in np.split(arrays[rest[0]], np.cumsum(rest[1])[:-1])]
        if tag == "s":
            return arrays[rest[0]][()]
        if tag in ("i", "f"):
            return arrays[rest[0]].tolist()
        if tag == "z":
            length, places, values = rest
            numbers = [0.0] * length
            for place, number in zip(places, values, strict=True):
                numbers[place] = number
            return numbers
        return self._classes[tag](**self._value(rest[0], arrays))


def _add(array: np.ndarray, arrays: list[tuple[list[Any], Buffer]], path: str) -> int:
    """Add an array to those behind the text, and return its number."""
    if array.dtype.hasobject or array.dtype.names:
        raise DataError(f"{path.lstrip('.')} is an array of {array.dtype}, which cannot be recorded")
    flat = array.reshape(-1)  # a copy where it is not contiguous
    packed = array.dtype.itemsize == 1 and array.dtype.kind in "ub" and flat.size > 64 and bool(flat.max() <= 1)
    data = np.packbits(flat) if packed else flat.view(np.uint8)
    arrays.append(([array.dtype.str, array.shape, int(packed)], data.data if data.size else b""))
    return len(arrays) - 1


def _array(data: Buffer, at: int, dtype: np.dtype, shape: list[int], packed: int) -> tuple[np.ndarray, int]:
    """Return (a writable array, where the next one begins)."""
    size = math.prod(shape)
    if packed:
        nbytes = (size + 7) // 8
        flat = np.unpackbits(np.frombuffer(data, np.uint8, nbytes, at), count=size).view(dtype)
    else:
        nbytes = size * dtype.itemsize
        flat = np.frombuffer(data, np.uint8, nbytes, at).copy().view(dtype) if nbytes else np.zeros(size, dtype)
    return flat.reshape(shape), at + nbytes


def _numbers(values: list[Any], arrays: list[tuple[list[Any], Buffer]]) -> list[Any] | None:
    """Return the tree of a list of nothing but integers, or nothing but floats; None for others and short ones."""
    if len(values) < _SHORT:
        return None
    kinds = set(map(type, values))
    if kinds == {float}:
        array = np.frombuffer(Doubles("d", values))  # several times as fast as np.asarray
        places = np.flatnonzero(array.view(np.int64))  # of what is not 0.0, and -0.0 is not
        if 4 * len(places) < len(values):
            return ["z", len(values), places.tolist(), array[places].tolist()]
        return ["f", _add(array, arrays, "")]
    if kinds == {int}:
        least, most = min(values), max(values)
        if -(2**63) <= least and most < 2**63:
            far = min(least, -most - 1) if least < 0 else most  # the narrowest type that holds it holds all
            return ["i", _add(np.asarray(values, np.min_scalar_type(far)), arrays, "")]
    return None


def _column(values: list[Any], arrays: list[tuple[list[Any], Buffer]], path: str) -> list[Any] | None:
    """Return the tree of a list of arrays that differ in length alone; None for others."""
    if len(values) < 2 or not all(type(value) is np.ndarray and value.ndim for value in values):
        return None
    first = values[0]
    if any(value.dtype != first.dtype or value.shape[1:] != first.shape[1:] for value in values):
        return None
    return ["c", _add(np.concatenate(values), arrays, path), [len(value) for value in values]]


type Spans = list[list[tuple[str, int, int]]]
"""By row: (policy version, first response token, token after the last)."""


@dataclass(slots=True)
class FinishedGroup:
    """All samples of a prompt."""

    number: int
    """Place of the prompt in the data, all epochs one after another, from 0."""
    uid: str
    epoch: int
    output: GeneratorOutput
    started: int = 0
    """Version that was published when its sampling began."""


@dataclass(slots=True)
class PartialTurn:
    """A turn of a trajectory of a group that goes on."""

    number: int
    """Of the group."""
    uid: str
    started: int
    """Version that was published when the group's sampling began."""
    repetition: int
    place: int
    """0, 1, 2 …; a 0 after others begins the trajectory anew."""
    turn: RecordedTurn


@dataclass(slots=True)
class FinishedTrajectory:
    """A trajectory that is over, of a group that is not."""

    number: int
    uid: str
    started: int
    repetition: int
    trajectory: Trajectory


type PartialRecord = PartialTurn | FinishedTrajectory


@dataclass(slots=True)
class PartialGroup:
    """What there is of an unfinished group."""

    uid: str
    started: int
    """No token of it is older than this version."""
    samples: dict[int, PartialTrajectory]
    """By repetition."""


CODEC = Codec(
    FinishedGroup,
    PartialTurn,
    FinishedTrajectory,
    RecordedTurn,
    Generation,
    Trajectory,
    TrajectoryOutput,
    TrajectoryID,
    TokenSupport,
)
"""For all records of the journal of groups."""


@dataclass(slots=True)
class ConsumedGroup:
    """A group in the batch of a step."""

    number: int
    """Place of its prompt in the data."""
    trained: bool = True
    """False where it was left out: dynamic sampling took it and did not train on it."""
    versions: Spans | None = None
    """Of its rows; None where it gave none."""


@dataclass(slots=True)
class ScheduledStep:
    """The groups of a step, in the order in which they were taken."""

    step: int
    """``global_step`` once the step is complete."""
    groups: list[ConsumedGroup]


@dataclass(slots=True)
class ResumedAt:
    """A run went on from the checkpoint of a step: what was recorded of later steps came to nothing."""

    step: int


@dataclass(slots=True)
class Discarded:
    """What the journal of groups holds of a group below a sequence number is void; it is sampled again."""

    number: int
    below: int


@dataclass(slots=True)
class GivenSettings:
    """The configuration that the run went on with, from a step on."""

    step: int
    values: dict[str, Any]
    """The resolved configuration, as ``get_config_as_dict`` gives it."""


type _Entry = ScheduledStep | ResumedAt | Discarded | GivenSettings
_CODEC = Codec(ScheduledStep, ConsumedGroup, ResumedAt, Discarded, GivenSettings)


class Schedule:
    """The schedule in a folder. Raises JournalError and CheckpointError as :class:`Journal` does."""

    def __init__(self, folder: str | Path, *, setting: str = "folder") -> None:
        self.steps: dict[int, ScheduledStep] = {}
        """By step, without those that came to nothing."""
        self.taken_at: dict[int, int] = {}
        """Number of a group → the step that took it."""
        self.discarded: dict[int, int] = {}
        """Number of a group → sequence number below which its records are void."""
        self.planned: list[int] = []
        """Groups of steps that came to nothing, in the order in which those took them; steps that took them again do
        not count."""
        self.settings: list[GivenSettings] = []
        """Those of each start, unless they were the same as before."""
        self.reached = 0
        """The last step that was recorded or resumed from."""
        self.journal = Journal(folder, setting=setting)
        try:
            for _, payload in self.journal.records():
                self._apply(_CODEC.decode(payload))
        except BaseException:
            self.close()
            raise

    async def record(self, step: ScheduledStep) -> None:
        """Add a step; it is on the disk on return."""
        await self._add(step)

    async def resume(self, step: int) -> None:
        """Go on behind a step, and forget later ones. Raises JournalError where the schedule does not reach it."""
        if step > self.reached:
            raise JournalError(
                f"{self.journal.folder} ends with step {self.reached}, and the run resumes from step {step}: it does"
                " not belong to this checkpoint. Restore it, or move it away to go on without its groups"
            )
        if self.reached > step:
            await self._add(ResumedAt(step))

    def later(self, step: int) -> list[int]:
        """Return the sampled groups that steps behind one took, in order."""
        steps = [self.steps[each] for each in sorted(self.steps) if each > step]
        return [group.number for each in steps for group in each.groups if group.versions is not None]

    async def begin(self, step: int) -> None:
        """Make an empty schedule one that goes on behind a step which is recorded elsewhere, or nowhere."""
        assert not self.reached, f"the schedule has reached step {self.reached}"
        if step:
            await self._add(ResumedAt(step))

    async def discard(self, number: int, below: int) -> None:
        """Make the records of a group below a sequence number void."""
        await self._add(Discarded(number, below))

    async def configure(self, step: int, values: dict[str, Any]) -> None:
        """Note the configuration that the run goes on with behind a step."""
        if not self.settings or self.settings[-1].values != values:
            await self._add(GivenSettings(step, values))

    def close(self) -> None:
        """Give the folder back."""
        self.journal.close()

    async def _add(self, entry: _Entry) -> None:
        await self.journal.append(*_CODEC.encode(entry))
        self._apply(entry)

    def _apply(self, entry: _Entry) -> None:
        if isinstance(entry, Discarded):
            self.discarded[entry.number] = entry.below
            return
        if isinstance(entry, GivenSettings):
            self.settings.append(entry)
            return
        self.reached = entry.step
        if isinstance(entry, ScheduledStep):
            self.steps[entry.step] = entry
            taken = {group.number for group in entry.groups}
            self.taken_at |= dict.fromkeys(taken, entry.step)
            if self.planned:
                self.planned = [number for number in self.planned if number not in taken]
        else:
            self.planned = [*self.later(entry.step), *self.planned]
            self.steps = {step: each for step, each in self.steps.items() if step <= entry.step}
            self.taken_at = {number: step for number, step in self.taken_at.items() if step <= entry.step}


def read_schedule(folder: str | Path) -> list[ScheduledStep]:
    """Return the steps of a run that is over, first one first."""
    schedule = Schedule(folder)
    schedule.close()
    return [schedule.steps[step] for step in sorted(schedule.steps)]
