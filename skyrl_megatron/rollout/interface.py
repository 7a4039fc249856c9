"""Input and output of a generator, in the types of SkyRL's generators and trainers; its rewards and recorded turns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np

from skyrl_megatron.envs.base import ConversationType
from skyrl_megatron.errors import DataError
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


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn: where it started from, what was sampled, what the environment answered."""

    shared: int
    """First tokens of the prompt that are those of the turn before: of its prompt and what it sampled."""
    prompt_rest: np.ndarray
    """[p − shared] int32: the prompt's other tokens."""
    generation: Generation
    answer: dict[str, Any]
    """``observations``, ``reward``, ``done`` and ``postprocessed_action`` of the environment's step."""
    llm_seconds: float = 0.0


def answer_of(step: Any) -> dict[str, Any]:
    """Return what training depends on of a step output."""
    return {
        "observations": [dict(message) for message in step["observations"] or ()],
        "reward": step["reward"],
        "done": bool(step["done"]),
        "postprocessed_action": step.get("postprocessed_action"),
    }


def record_turn(
    before: Sequence[int], prompt: Sequence[int], generation: Generation, step: Any, llm_seconds: float
) -> RecordedTurn:
    """Record a turn. ``before``: the tokens of the turn before, its prompt and what it sampled."""
    known, now = np.asarray(before, np.int32), np.asarray(prompt, np.int32)
    length = min(len(known), len(now))
    differ = np.flatnonzero(known[:length] != now[:length])
    shared = int(differ[0]) if differ.size else length
    return RecordedTurn(shared, now[shared:], generation, answer_of(step), llm_seconds)


def starts_alike(turn: RecordedTurn, before: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether a turn started from ``prompt``, where ``before`` is what it was when it was recorded."""
    recorded = [*before[: turn.shared], *turn.prompt_rest.tolist()]
    return recorded == list(prompt)


class NonFiniteReward(DataError):
    """An environment returned NaN or an infinite reward."""


def checked_reward(value: Any, env_class: str, name: str) -> float:
    """Return ``value`` as a float.

    Raises DataError naming environment, trajectory and value if it is not one number; NonFiniteReward for NaN and
    infinities.
    """
    where = f"environment {env_class!r}, trajectory {name}"
    if isinstance(value, str | bytes) or value is None or np.ndim(value) != 0:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number")
    try:
        reward = float(value)
    except OverflowError as error:  # its digits may be more than Python prints
        raise DataError(
            f"{where}: the reward ({type(value).__name__}) is beyond what a float can be, it must be a smaller number"
        ) from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number") from error
    if not math.isfinite(reward):
        raise NonFiniteReward(
            f"{where}: the reward is {reward}; return a finite one, or mask such trajectories with"
            " trainer.algorithm.nonfinite=skip"
        )
    return reward


def total_reward(reward: float | Sequence[float] | np.ndarray) -> float:
    """Return the sum over the tokens of a row, or the row's one reward."""
    return float(sum(reward)) if isinstance(reward, Sequence | np.ndarray) else float(reward)


def last_reward(reward: float | Sequence[float] | np.ndarray) -> float:
    """Return the reward on the last token of a row, which is that of its last turn, or the row's one reward."""
    return float(reward[-1]) if isinstance(reward, Sequence | np.ndarray) else float(reward)


def zero_where_not_stopped(rewards: Sequence[Any], stop_reasons: Sequence[str]) -> list[Any]:
    """Set the rewards of rows that were cut off to 0 (``zero_reward_on_non_stop``)."""
    zeros = ([0.0] * len(reward) if isinstance(reward, list) else 0.0 for reward in rewards)
    return [
        kept if reason == "stop" else zero for kept, zero, reason in zip(rewards, zeros, stop_reasons, strict=True)
    ]


def apply_overlong_filtering(loss_masks: Sequence[Tokens], stop_reasons: Sequence[str]) -> list[Tokens]:
    """Set the masks of rows that were cut off to 0 (DAPO, arXiv:2503.14476, section 3.4)."""
    return [
        mask if reason == "stop" else np.zeros_like(np.asarray(mask))
        for mask, reason in zip(loss_masks, stop_reasons, strict=True)
    ]


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Score a batch; ``uids`` [rows] name the prompt of each row.

    ``avg_score``: mean total reward. ``pass_at_n``: share of prompts with a trajectory whose last reward is positive.
    ``mean_positive_reward``: mean over trajectories of their positive rewards. Step-wise, a trajectory counts by its
    last row. Raises DataError for an empty batch.
    """
    rewards = generator_output["rewards"]
    last = generator_output.get("is_last_step") or [True] * len(rewards)
    rows = [row for row, is_last in enumerate(last) if is_last]
    if not rows:
        raise DataError("there is nothing to score: the batch holds no trajectory")
    passed: dict[str, bool] = defaultdict(bool)
    for row in rows:
        passed[uids[row]] |= last_reward(rewards[row]) > 0
    positive = [
        total_reward(np.maximum(rewards[row], 0.0)) if np.ndim(rewards[row]) else max(rewards[row], 0.0)
        for row in rows
    ]
    return {
        "avg_score": float(np.mean([total_reward(rewards[row]) for row in rows])),
        "pass_at_n": sum(passed.values()) / len(passed),
        "mean_positive_reward": float(np.mean(positive)),
    }
