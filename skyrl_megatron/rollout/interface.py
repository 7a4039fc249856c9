"""Input and output of a generator, compatible with SkyRL; rewards, metrics and recorded turns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np

from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.types import TokenSupport

TrainingPhase = Literal["train", "eval"]

type Tokens = Sequence[int] | np.ndarray
"""Token ids, or one value per token. The built-in generator returns numpy arrays, others may return lists."""


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """The prompt of a trajectory, and the index of the sample."""

    instance_id: str
    """The prompt's uid; ``UID#NUMBER`` of a prompt that is drawn again."""
    repetition_id: int
    """Index of the sample among those of the prompt, from 0."""

    def to_string(self) -> str:
        """Return ``uid_repetition``."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The step and the phase of a batch."""

    global_step: int
    training_phase: TrainingPhase


class GeneratorInput(TypedDict):
    """Every list has one entry per trajectory."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    """The other columns of the dataset row."""
    sampling_params: dict[str, Any] | None
    """Keys of vLLM's ``SamplingParams``; None: ``generator.sampling_params``."""
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None
    trajectory_log: NotRequired[Any]
    """A :class:`~skyrl_megatron.rollout.episode.TrajectoryLog`, which stores turns and returns those of an earlier
    process. Generators may ignore it."""


class GeneratorOutput(TypedDict):
    """Every list has one entry per row, in the order of the input.

    A row is a trajectory or, step-wise, one turn of a trajectory. n is the number of its response tokens.
    """

    prompt_token_ids: list[Tokens]
    response_ids: list[Tokens]
    """[n] int: the tokens of the policy and, between its turns, those of the environment."""
    rewards: list[float] | list[list[float]]
    """One number per row if trajectories have one turn, else one per token: each turn's reward on its last token."""
    loss_masks: list[Tokens]
    """[n] in {0, 1}: 1 on sampled tokens that are trained on."""
    stop_reasons: list[str] | None
    """``stop``, ``length`` or ``abort`` of the last turn; ``error`` if the environment failed."""
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[Tokens] | None
    """[n] float, nats: log-probs of sampled tokens, 0 for all others."""
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise only: whether this is the last row of its trajectory."""
    rollout_expert_indices: NotRequired[list[np.ndarray | None] | None]
    """[m, L, K]: the experts of the first m tokens of prompt and response, by model layer."""
    rollout_support: NotRequired[list[TokenSupport | None] | None]
    """Sampling support of the n tokens, which ``rollout_logprobs`` are over; None: the whole vocabulary."""
    rollout_versions: NotRequired[list[list[tuple[str, int, int]]]]
    """(policy version, first response token, end) of each sampled span."""
    env_metrics: NotRequired[list[dict[str, Any]]]
    parsed_answers: NotRequired[list[str | None]]
    """The answer that the environment read from the last turn of the row's trajectory, for majority votes."""
    errors: NotRequired[list[str | None]]
    """Error of the environment, or None. Rows with an error hold one masked token and belong to no group."""


class MetricsOutput(TypedDict):
    """Scores of a batch."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


class GeneratorInterface(ABC):
    """Samples trajectories from prompts."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the trajectories of a batch, in its order."""

    async def stop(self) -> None:
        """Release what the generator holds, at the end of the run."""
        return None


class SamplingClient(Protocol):
    """The part of ``inference.client.InferenceClient`` that generators use."""

    async def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        session_ids: Sequence[str] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Sequence[Generation]:
        """Return a generation for each prompt, in order.

        ``sampling_params``: for all prompts, or one per prompt. Requests of a session prefer the engine that caches
        its prefix. ``adapters``: name of each prompt's adapter, if there are several.
        """


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn: its prompt, its generation, and the step output of the environment."""

    shared: int
    """Number of first prompt tokens that equal prompt + generation of the previous turn."""
    prompt_rest: np.ndarray
    """[p − shared] int32: the other tokens of the prompt."""
    generation: Generation
    answer: dict[str, Any]
    """``observations``, ``reward``, ``done`` and ``postprocessed_action`` of the step output."""
    llm_seconds: float = 0.0


def step_fields(step: Any) -> dict[str, Any]:
    """Return the part of a step output that affects training."""
    return {
        "observations": [dict(message) for message in step["observations"] or ()],
        "reward": step["reward"],
        "done": bool(step["done"]),
        "postprocessed_action": step.get("postprocessed_action"),
    }


def record_turn(
    before: Sequence[int], prompt: Sequence[int], generation: Generation, step: Any, llm_seconds: float
) -> RecordedTurn:
    """Record a turn. ``before``: prompt + generation of the previous turn."""
    known, now = np.asarray(before, np.int32), np.asarray(prompt, np.int32)
    length = min(len(known), len(now))
    differ = np.flatnonzero(known[:length] != now[:length])
    shared = int(differ[0]) if differ.size else length
    return RecordedTurn(shared, now[shared:], generation, step_fields(step), llm_seconds)


def has_same_prompt(turn: RecordedTurn, before: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether the recorded turn had this ``prompt``. ``before``: prompt + generation of the previous turn."""
    recorded = [*before[: turn.shared], *turn.prompt_rest.tolist()]
    return recorded == list(prompt)


class NonFiniteReward(DataError):
    """An environment returned NaN or an infinite reward."""


def checked_reward(value: Any, env_class: str, name: str) -> float:
    """Return ``value`` as a float.

    Raises DataError with environment, trajectory and value if it is not a number, NonFiniteReward for NaN and
    infinity.
    """
    where = f"environment {env_class!r}, trajectory {name}"
    if isinstance(value, str | bytes) or value is None or np.ndim(value) != 0:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number")
    try:
        reward = float(value)
    except OverflowError as error:  # Python may refuse to print so many digits
        raise DataError(
            f"{where}: the reward ({type(value).__name__}) exceeds the range of a float: return a smaller number"
        ) from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: the reward is {value!r} ({type(value).__name__}), it must be a number") from error
    if not math.isfinite(reward):
        raise NonFiniteReward(
            f"{where}: the reward is {reward}: return a finite one, or mask such trajectories with"
            " trainer.algorithm.nonfinite=skip"
        )
    return reward


@dataclass(slots=True)
class SampledTrajectory:
    """The rows of a trajectory in an output, and what it counts as: one sample, whatever the number of its rows."""

    uid: str
    """Of its prompt."""
    rows: list[int]
    reward: float
    """The sum of its rewards over all rows."""
    last_reward: float
    """That of its last turn."""
    positive_reward: float
    """The sum of its positive rewards."""
    failed: bool
    """Whether it is no sample, as its environment or agent failed."""


def sampled_trajectories(output: GeneratorOutput, uids: Sequence[str]) -> list[SampledTrajectory]:
    """Return the trajectories of an output, in order. ``uids`` [rows] are those of the prompts.

    The only place that says what reward a trajectory has: scores, filters, gates, samplers and reports ask it. From
    the tensors of a batch, ``trainer.step_batch.rewards_of_trajectories`` computes the same.
    """
    token_rewards = output["rewards"]
    errors = output.get("errors") or [None] * len(token_rewards)
    rewards = [_given_rewards(reward) for reward in token_rewards]
    return [
        SampledTrajectory(
            uids[rows[-1]],
            rows,
            # One sum over all rewards, so that the rounding does not depend on the rows.
            float(sum(of_all := [reward for row in rows for reward in rewards[row]])),
            last_reward(token_rewards[rows[-1]]),
            float(sum(max(reward, 0.0) for reward in of_all)),
            any(errors[row] is not None for row in rows),
        )
        for rows in trajectory_rows(output)
    ]


def trajectory_rows(output: GeneratorOutput) -> list[list[int]]:
    """Return the rows of each trajectory of an output, which are adjacent."""
    last = output.get("is_last_step") or [True] * len(output["rewards"])
    rows: list[list[int]] = [[]]
    for row, is_last in enumerate(last):
        rows[-1].append(row)
        if is_last:
            rows.append([])
    return [each for each in rows if each]


def has_token_rewards(reward: float | Sequence[float] | np.ndarray) -> bool:
    """Return whether the ``reward`` of a row, a number or [n] of its response tokens, is one for each token."""
    return isinstance(reward, Sequence | np.ndarray)


def _given_rewards(reward: float | Sequence[float] | np.ndarray) -> list[float]:
    """Return the rewards of a row that are not 0, in order: few of its tokens have one."""
    values = np.atleast_1d(np.asarray(reward, np.float64))
    given: list[float] = values[values != 0].tolist()
    return given


def last_reward(reward: float | Sequence[float] | np.ndarray) -> float:
    """Return the reward of a row's last turn (that of its last token in [tokens]), or the row's only reward."""
    return float(reward[-1] if isinstance(reward, Sequence | np.ndarray) else reward)


def zero_where_not_stopped(rewards: Sequence[Any], stop_reasons: Sequence[str]) -> list[Any]:
    """Return the rewards with 0 for rows whose trajectory did not end with ``stop`` (``zero_reward_on_non_stop``).
    ``stop_reasons`` [rows] are those of the trajectories."""
    zeros = (np.zeros(len(reward)) if has_token_rewards(reward) else 0.0 for reward in rewards)
    return [
        kept if reason == "stop" else zero for kept, zero, reason in zip(rewards, zeros, stop_reasons, strict=True)
    ]


def apply_overlong_filtering(loss_masks: Sequence[Tokens], stop_reasons: Sequence[str]) -> list[Tokens]:
    """Return the masks with 0 for rows whose trajectory did not end with ``stop`` (DAPO, arXiv:2503.14476, section
    3.4). ``stop_reasons`` [rows] are those of the trajectories."""
    return [
        mask if reason == "stop" else np.zeros_like(np.asarray(mask))
        for mask, reason in zip(loss_masks, stop_reasons, strict=True)
    ]


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Return the scores of a batch; ``uids`` [rows] are those of the prompts.

    ``avg_score``: mean reward of a trajectory. ``pass_at_n``: share of prompts with a trajectory whose last reward is
    positive. ``mean_positive_reward``: mean over trajectories of the sum of their positive rewards. Trajectories that
    failed are no samples: None if all did. Raises DataError for an empty batch.
    """
    trajectories = sampled_trajectories(generator_output, uids)
    if not trajectories:
        raise DataError("cannot compute scores: the batch holds no trajectory; the generator must return one at least")
    scored = [trajectory for trajectory in trajectories if not trajectory.failed]
    if not scored:
        return {"avg_score": None, "pass_at_n": None, "mean_positive_reward": None}
    passed: dict[str, bool] = defaultdict(bool)
    for trajectory in scored:
        passed[trajectory.uid] |= trajectory.last_reward > 0
    return {
        "avg_score": float(np.mean([trajectory.reward for trajectory in scored])),
        "pass_at_n": sum(passed.values()) / len(passed),
        "mean_positive_reward": float(np.mean([trajectory.positive_reward for trajectory in scored])),
    }
