"""Input and output of a generator, in the types of SkyRL's generators and trainers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np

from skyrl_megatron.envs.base import ConversationType
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.types import TokenSupport

TrainingPhase = Literal["train", "eval"]

type Tokens = Sequence[int] | np.ndarray
"""Token ids or values of tokens; our generator returns numpy arrays, others may return lists."""


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """One trajectory: the prompt it starts from, and which of its samples it is."""

    instance_id: str
    """The prompt's uid."""
    repetition_id: int
    """0, 1, 2 … for the samples of a prompt."""

    def to_string(self) -> str:
        """Return ``uid_repetition``."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The step and the purpose that a batch is generated for."""

    global_step: int
    training_phase: TrainingPhase


class GeneratorInput(TypedDict):
    """One entry a trajectory in every list."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    """The other columns of the dataset row."""
    sampling_params: dict[str, Any] | None
    """Keys of vLLM's ``SamplingParams``; None: ``generator.sampling_params``."""
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None
    trajectory_log: NotRequired[Any]
    """A ``rollout.trajectory_log.TrajectoryLog``, which keeps turns and has those of an earlier process. Generators
    may do without."""


class GeneratorOutput(TypedDict):
    """One entry a row in every list, in the order of the input. A row is a trajectory or, step-wise, one turn of it;
    n is the number of its response tokens."""

    prompt_token_ids: list[Tokens]
    response_ids: list[Tokens]
    """[n] int: what the policy sampled and, between its turns, what the environment answered."""
    rewards: list[float] | list[list[float]]
    """A number a row where trajectories have one turn, else one a token, each turn's on its last token."""
    loss_masks: list[Tokens]
    """[n] in {0, 1}: 1 on tokens that the policy sampled and that are trained on."""
    stop_reasons: list[str] | None
    """``stop``, ``length`` or ``abort`` of the last turn; ``error`` where the environment failed."""
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[Tokens] | None
    """[n] float, nats: of sampled tokens; 0 on all others."""
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise only: last row of its trajectory."""
    rollout_expert_indices: NotRequired[list[np.ndarray | None] | None]
    """[m, L, K]: experts that the first m tokens of prompt and response were routed to, by layer of the model."""
    rollout_support: NotRequired[list[TokenSupport | None] | None]
    """Of n tokens each: what they were sampled from, and ``rollout_logprobs`` are over; None: the whole vocabulary."""
    rollout_versions: NotRequired[list[list[tuple[str, int, int]]]]
    """(policy version, first response token, token after the last) of each sampled span."""
    env_metrics: NotRequired[list[dict[str, Any]]]
    errors: NotRequired[list[str | None]]
    """Why the environment failed; such rows hold one masked token and count in no group of a prompt."""


class MetricsOutput(TypedDict):
    """Scores of a batch."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


class GeneratorInterface(ABC):
    """Turns prompts into trajectories."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Sample the trajectories of a batch, in its order."""


class SamplingClient(Protocol):
    """The part of ``inference.client.InferenceClient`` that generators use."""

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Sequence[Generation]:
        """Sample a continuation for each prompt, in order. ``sampling_params``: for all, or one for each. Requests of
        a session prefer the engine that has its prefix. ``adapters``: which of several samples each."""
