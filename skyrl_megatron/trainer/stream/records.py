"""What the journal of groups holds. Arrays are kept as they are, bit for bit; masks take a bit a token.

A response token takes 4 bytes of id, 4 of log-prob, 1/8 of mask and L · K of routes, one or two each; a reward that is
0 takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.conversation import TrajectoryOutput
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import GeneratorOutput, TrajectoryID
from skyrl_megatron.rollout.recorded import RecordedTurn
from skyrl_megatron.rollout.trajectory_log import PartialTrajectory
from skyrl_megatron.trainer.stream.codec import Codec
from skyrl_megatron.types import TokenSupport

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
