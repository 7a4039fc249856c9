"""What the journal of groups holds. Arrays are kept as they are, bit for bit; masks take a bit a token.

A response token takes 4 bytes of id, 4 of log-prob, 1/8 of mask and L · K of routes, one or two each; a reward that is
0 takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.conversation import TrajectoryOutput
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import GeneratorOutput, TrajectoryID
from skyrl_megatron.rollout.recorded import RecordedTurn
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
    repetition: int
    place: int
    """0, 1, 2 …; a 0 after others begins the trajectory anew."""
    turn: RecordedTurn


@dataclass(slots=True)
class FinishedTrajectory:
    """A trajectory that is over, of a group that is not."""

    number: int
    repetition: int
    trajectory: Trajectory


@dataclass(slots=True)
class PartialTrajectory:
    """What there is of one sample of an unfinished group."""

    turns: list[RecordedTurn] = field(default_factory=list)
    trajectory: Trajectory | None = None
    """The whole of it, where it is over."""


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
