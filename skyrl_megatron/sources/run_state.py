"""What the sources of rollouts get of a run: its state, and the parts of a step.

The trainer makes a :class:`RunState` and is itself the :class:`StepParts`: a source calls the trainer's methods by
their names there, so that what a subclass overrides acts in every source. Nothing else of a trainer is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorOutput, TrainingPhase

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.data.loader import PromptLoader
    from skyrl_megatron.identity import Identity
    from skyrl_megatron.rollout.dynamic_sampling import Batch, DynamicSampler
    from skyrl_megatron.rollout.gates import Gates
    from skyrl_megatron.types import TrainingBatch


@dataclass
class RunState:
    """How far a run is. The loop counts the steps; whoever acts in a step adds to its metrics."""

    total_steps: int
    """The last step of the run."""
    position: dict[str, Any]
    """The position in the data after the last step, for a checkpoint."""
    phases: Callable[[str], AbstractContextManager[None]]
    """Measures the time of a named phase within ``with``."""
    say: Callable[[str], None]
    """Writes a line to the terminal and the log of the run."""
    step: int = 0
    """Completed steps. Also the version of the weights that the engines serve."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the current step."""
    epochs: int = 0
    """Completed passes over the training prompts."""
    finite: bool = True
    """Whether every optimizer step of the last training step was applied."""

    def snapshot(self) -> RunSnapshot:
        """Return what a part of a step changes, to repeat the part."""
        return RunSnapshot(self.step, dict(self.metrics), self.epochs, self.finite)

    def restore(self, before: RunSnapshot) -> None:
        """Undo what a part of a step changed."""
        self.step, self.epochs, self.finite = before.step, before.epochs, before.finite
        self.metrics = dict(before.metrics)  # a copy: the part may run, fail and be undone again


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """What a part of a step changes of a :class:`RunState`; see there."""

    step: int
    metrics: dict[str, float]
    epochs: int
    finite: bool


class StepParts(Protocol):
    """The parts of a step: what makes a batch of prompts a batch of tensors."""

    cfg: SkyRLTrainConfig
    train_dataloader: PromptLoader
    generator: Any
    """A ``GeneratorInterface``, or a user's object with its methods; None in a run that samples nothing."""
    gates: Gates
    sampler: DynamicSampler

    def sample_batch(self) -> Batch:
        """Return the rows of one batch of prompts. By default that of the source's ``sample``."""

    def prepare_generator_input(
        self, prompts: Sequence[Any], phase: TrainingPhase
    ) -> tuple[GeneratorInput, list[str]]:
        """Return the generator's input, with every prompt repeated, and the uid of each row."""

    def generate(self, generator_input: GeneratorInput) -> GeneratorOutput:
        """Return responses and the rewards of their environments."""

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """Measure rewards and responses, and return the output with a reward for each token."""

    def handle_dynamic_sampling(self, generator_output: GeneratorOutput, uids: list[str]) -> Batch | None:
        """Return the rows to train on; None to sample more."""

    def note_rows(self, output: GeneratorOutput) -> None:
        """Show the rows of the step to what records the run."""

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingBatch:
        """Return right-aligned tensors."""


class StreamParts(StepParts, Protocol):
    """What a source that samples while the ranks train needs in addition."""

    @property
    def identity(self) -> Identity:
        """What the run depends on: recorded rollouts carry it."""

    def free_slots(self) -> int:
        """Return how many more sequences the engines could decode at the same time; negative if requests wait."""

    def on_loop[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the event loop, and return its result."""

    def wait_for[T](self, work: Coroutine[Any, Any, T], *, stoppable: bool = False) -> T:
        """Run ``work`` on the event loop and return its result. ``stoppable``: a stop signal cancels it, which is
        right only for work that changes no state."""
