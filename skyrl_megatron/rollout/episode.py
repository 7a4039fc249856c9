"""One episode: the turns of the policy and an environment, collected in a conversation."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.envs.env_pool import EnvPool, EnvTimeout
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning, with_origin
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.continuation import BegunTurn, continued, may_continue, remaining, without_open_stop
from skyrl_megatron.rollout.conversation import ChatConversation, TrajectoryOutput
from skyrl_megatron.rollout.interface import (
    NonFiniteReward,
    RecordedTurn,
    TrajectoryID,
    checked_reward,
    has_same_prompt,
    record_turn,
    step_fields,
)
from skyrl_megatron.rollout.templates import ChatFormat

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLGymConfig


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Trajectory:
    """A finished trajectory with at least one row."""

    rows: list[TrajectoryOutput]
    turns: int = 0
    unfinished: bool = False
    """Whether the environment was not done after the last turn, and the next prompt was not too long."""
    llm_seconds: float = 0.0
    env_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings shared by all episodes of a batch."""

    chat: ChatFormat
    conversation: Callable[[ChatFormat, ConversationType], ChatConversation]
    pool: EnvPool
    gym_config: SkyRLGymConfig
    sampling: Mapping[str, Any]
    max_turns: int
    max_input_length: int
    skip_nonfinite: bool = False


class _EnvFailed(Exception):
    """The environment failed. The message is the error."""


class _ReplayMismatch(Exception):
    """The environment does not reproduce its recorded turns. The message says where it differs."""


class Episode:
    """One episode. Call :meth:`begin`, alternate :meth:`request` and :meth:`answer` until a request is None, then
    :meth:`end`.

    If the environment raises or exceeds its time limit, the episode ends with one masked token and the error. Errors
    that affect all trajectories are raised: a reward or an observation of the wrong type.

    ``recording``: append each turn to ``recorded``, from which :meth:`begin` of another episode can continue.
    """

    def __init__(
        self,
        config: RolloutConfig,
        prompt: ConversationType,
        env_class: str,
        extras: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        *,
        recording: bool = False,
    ) -> None:
        self.config, self.env_class, self.trajectory_id = config, env_class, trajectory_id
        self.prompt, self.extras = prompt, {**extras, "max_turns": config.max_turns}
        self.recording = recording
        self.restarted: str | None = None
        """Why the episode restarted instead of continuing from recorded turns; None if it did not."""
        self._reset()

    def _reset(self) -> None:
        self.env: Any = None
        self.conversation: ChatConversation | None = None
        self.turns, self.done = 0, False
        self.stop_reason = "stop"
        self.error: str | None = None
        self.metrics: dict[str, Any] = {}
        self.parsed_answer: Any = None
        self.closed = False
        self.recorded: list[RecordedTurn] = []
        self.part: Generation | None = None
        """The beginning of the current turn, which the next request continues."""
        self._last_turn_ids: list[int] = []  # prompt + generation of the last turn
        self._inside = threading.RLock()  # a cancelled episode may be closed while its last call still runs
        self.started = self.asked = time.perf_counter()
        self.llm_seconds = self.env_seconds = 0.0

    async def begin(self, recorded: Sequence[RecordedTurn] = (), begun: BegunTurn | None = None) -> None:
        """Make the environment and the prompt of the first turn.

        With ``recorded`` turns, replay them in the environment and continue after them; ``begun``: and after the
        beginning of the next turn. If the environment cannot be replayed or returns other results, the episode
        restarts, and ``restarted`` has the reason.
        """
        await self._begin()
        if not (recorded or begun) or self.error:
            return
        self.recording = True
        try:
            await self._replay(recorded)
            if begun is not None:
                if self.request() != begun.prompt.tolist():
                    raise _ReplayMismatch(f"environment {self.env_class!r} has another prompt than the begun turn")
                self.part = begun.generation
        except (_EnvFailed, _ReplayMismatch) as difference:
            # a new environment from the start: after a difference, the recorded turns are of another episode
            await self.close()
            self.restarted = str(difference)
            self._reset()
            await self._begin()

    @property
    def goes_on(self) -> bool:
        """Whether another turn follows the last one, if its prompt is not too long."""
        return bool(self.turns) and not (self.done or self.error) and self.turns < self.config.max_turns

    async def _begin(self) -> None:
        self.started = time.perf_counter()
        try:
            messages = await self._in_pool(self._open)
            self.conversation = self.config.conversation(self.config.chat, messages)
        except _EnvFailed as failure:
            self.error = str(failure)

    async def _replay(self, recorded: Sequence[RecordedTurn]) -> None:
        if not getattr(self.env, "replayable", True):
            raise _ReplayMismatch(f"environment {self.env_class!r} sets replayable=False")
        for number, turn in enumerate(recorded):
            prompt = self.request()
            if prompt is None or not has_same_prompt(turn, self._last_turn_ids, prompt):
                raise _ReplayMismatch(
                    f"turn {number} of environment {self.env_class!r} has another prompt than recorded"
                )
            # what was sampled before the interruption counts as this episode's time
            self.asked = time.perf_counter() - turn.llm_seconds
            self.started -= turn.llm_seconds
            step = await self._take(turn.generation)
            if step_fields(step) != turn.answer:
                raise _ReplayMismatch(
                    f"environment {self.env_class!r} returns another result for turn {number} than recorded"
                )

    def request(self) -> list[int] | None:
        """Begin the next request: return its prompt, with what is sampled of its turn; None if the episode is over.

        A prompt that is too long ends the episode."""
        if self.conversation is None or self.error or self.done or self.turns >= self.config.max_turns:
            return None
        prompt = self.conversation.next_prompt()
        if len(prompt) > self.config.max_input_length:
            self.stop_reason, self.done = "length", True
            return None
        self.asked = time.perf_counter()
        return prompt if self.part is None else [*prompt, *self.part.token_ids]

    def sampling(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sampling keys of the next request.

        If the engine returns routed experts, the request leaves out the tokens whose experts earlier turns returned.
        """
        # the engine computes these tokens again or has them in its cache; their experts are known either way
        routed = 0 if self.conversation is None else self.conversation.routed()
        if self.part is not None:
            assert self.conversation is not None
            keys = remaining(keys, self.part)
            if self.part.routed_experts is not None:
                routed = len(self.conversation.next_prompt()) + len(self.part.token_ids) - 1
        return {**keys, "routed_experts_prompt_start": routed} if routed else keys

    def hold(self, generation: Generation) -> None:
        """Add a generation to the beginning of the current turn, which the next request continues or starts again."""
        assert self.conversation is not None
        sampling, decode = self.config.sampling, self.config.chat.tokenizer.decode
        part = continued(self.part, generation, len(self.conversation.next_prompt()))
        part = without_open_stop(part, decode, stops_of(sampling))
        restarts = not part.token_ids or not may_continue(sampling)
        self.part = None if restarts else part

    @property
    def begun(self) -> BegunTurn | None:
        """The beginning of the current turn, None if it has no tokens yet."""
        if self.part is None or self.conversation is None:
            return None
        return BegunTurn(np.asarray(self.conversation.next_prompt(), np.int32), self.part)

    async def answer(self, generation: Generation) -> None:
        """Pass a generation to the environment and process its step output."""
        if self.part is not None:
            assert self.conversation is not None
            part, self.part = self.part, None
            generation = continued(part, generation, len(self.conversation.next_prompt()))
        try:
            await self._take(generation)
        except _EnvFailed as failure:
            self.error = str(failure)

    async def _take(self, generation: Generation) -> Any:
        """Implement :meth:`answer`; return the step output."""
        assert self.conversation is not None
        llm_seconds = time.perf_counter() - self.asked
        self.llm_seconds += llm_seconds
        self.turns += 1
        self.stop_reason = generation.finish_reason
        text, at_stop = self._text_of(generation)
        last = self.turns >= self.config.max_turns
        step = await self._in_pool(self._step, text, last)
        # before anything is recorded: a step that is not valid must not be continued from later
        reward = self._reward_of(step)
        metadata = step.get("metadata") or {}
        self.parsed_answer = metadata.get("parsed_answer", metadata.get("pred"))
        if self.recording:
            self._record(generation, step, llm_seconds)
        rewritten = step.get("postprocessed_action")
        if rewritten is not None and rewritten != text:
            _warn_rewritten(self.env_class)
        else:
            rewritten = None
        self.conversation.add_turn(generation, text, reward, at_stop_string=at_stop, rewritten=rewritten)
        self.done = bool(step["done"])
        if not (self.done or last):
            self.conversation.add_observations(list(step["observations"] or ()), at_stop_string=at_stop)
        return step

    def _record(self, generation: Generation, step: Any, llm_seconds: float) -> None:
        assert self.conversation is not None
        prompt = self.conversation.next_prompt()
        self.recorded.append(record_turn(self._last_turn_ids, prompt, generation, step, llm_seconds))
        self._last_turn_ids = [*prompt, *generation.token_ids]

    async def end(self) -> Trajectory:
        """Close the environment and return the trajectory."""
        await self.close()
        rows = self._rows()
        rows[-1].env_metrics, rows[-1].error = self.metrics, self.error
        rows[-1].parsed_answer = None if self.parsed_answer is None else str(self.parsed_answer)
        return Trajectory(
            rows,
            self.turns,
            unfinished=not (self.done or self.error),
            llm_seconds=self.llm_seconds,
            env_seconds=self.env_seconds,
            seconds=time.perf_counter() - self.started,
        )

    async def close(self) -> None:
        """Close the environment unless it is closed or stuck."""
        if self.env is None or self.closed:
            return
        try:
            # in a thread: close() of an environment may block as long as a step
            await self._in_pool(self._close)
        except _EnvFailed as failure:
            self.error = self.error or str(failure)

    def _rows(self) -> list[TrajectoryOutput]:
        if self.conversation is not None and self.turns and not self.error:
            return self.conversation.sequences(self.stop_reason)
        prompt: list[int] = []
        if self.conversation is not None:
            length = min(self.conversation.prompt_length, self.config.max_input_length)
            prompt = self.conversation.next_prompt()[:length]
        # masked, so that it is never trained on: a row needs one response token
        end = np.asarray([self.config.chat.end_token], np.int32)
        logprobs = np.zeros(1, np.float32) if self.config.sampling.get("logprobs") is not None else None
        ids = np.asarray(prompt, np.int32) if prompt else end.copy()
        reason = "error" if self.error else self.stop_reason
        return [TrajectoryOutput(ids, end, np.zeros(1, np.uint8), [0.0], reason, logprobs)]

    async def _in_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return await self.config.pool.run(function, *arguments)
        except Exception as error:
            self.closed = self.closed or isinstance(error, EnvTimeout)  # its thread still runs the environment
            failure = with_origin(error)
            _log_once(self.env_class, failure, error)
            raise _EnvFailed(failure) from error
        finally:
            self.env_seconds += time.perf_counter() - started

    # The following run in a thread of the pool.
    def _open(self) -> ConversationType:
        config = registry.config_of(self.env_class, self.config.gym_config)
        # copies: an environment may change its prompt and extras, which the samples of a group share
        self.env = registry.make(self.env_class, env_config=config, extras=copy.deepcopy(self.extras))
        messages, _ = self.env.init(copy.deepcopy(self.prompt))
        return list(messages)

    def _step(self, text: str, last: bool) -> Any:
        # a cancelled episode is closed from another thread while its step may still run
        with self._inside:
            step = self.env.step(text)
            # here and not at the end: the environment frees what it holds while others still sample
            if last or (isinstance(step, Mapping) and step.get("done")):
                self._close()
            return step

    def _close(self) -> None:
        with self._inside:
            if self.closed:
                return
            self.closed = True
            self.metrics = dict(self.env.get_metrics()) if hasattr(self.env, "get_metrics") else {}
            self.env.close()

    def _text_of(self, generation: Generation) -> tuple[str, bool]:
        skip = bool(self.config.sampling.get("skip_special_tokens", True))
        text: str = self.config.chat.tokenizer.decode(
            generation.token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return cut_at_stop(text, stops_of(self.config.sampling))

    def _reward_of(self, step: Any) -> float:
        """Check a step output and return its reward. Raises DataError with environment and trajectory."""
        name = self.trajectory_id.to_string()
        keys = ("observations", "reward", "done")
        if not isinstance(step, Mapping) or any(key not in step for key in keys):
            raise DataError(
                f"environment {self.env_class!r}, trajectory {name}: step() returned {step!r:.200}, it must return"
                f" BaseTextEnvStepOutput with {', '.join(keys)}"
            )
        for message in step["observations"] or ():
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise DataError(
                    f"environment {self.env_class!r}, trajectory {name}: an observation is {message!r:.200}, it must"
                    " be a message with role and content"
                )
        try:
            return checked_reward(step["reward"], self.env_class, name)
        except NonFiniteReward as error:
            if self.config.skip_nonfinite:
                raise _EnvFailed(str(error)) from error
            raise


def stops_of(sampling: Mapping[str, Any]) -> Sequence[str]:
    """Return the stop strings of sampling keys."""
    stop = sampling.get("stop") or ()
    return (stop,) if isinstance(stop, str) else stop


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return (text up to and including its first stop string, whether there is one).

    The last token of a turn can contain text after the stop string.
    """
    ends = [at + len(each) for each in stops if (at := text.find(each)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


_logged: set[str] = set()


def _log_once(env_class: str, failure: str, error: Exception) -> None:
    """Log the traceback of an environment's error, once per line of code that raised."""
    place = failure.rpartition(", at ")[2]
    if place not in _logged and not isinstance(error, EnvTimeout):
        _logged.add(place)
        log.error("environment %r failed", env_class, exc_info=error)


_warned: set[str] = set()


def _warn_rewritten(env_class: str) -> None:
    if env_class in _warned:
        return
    _warned.add(env_class)
    warnings.warn(
        f"environment {env_class!r} rewrites the policy's text (postprocessed_action): the new tokens were not sampled"
        " and are not trained on",
        SkyRLMegatronWarning,
        stacklevel=2,
    )


@dataclass(slots=True)
class PartialTrajectory:
    """The recorded part of one sample of an unfinished group."""

    turns: list[RecordedTurn] = field(default_factory=list)
    trajectory: Trajectory | None = None
    """The whole trajectory, if it is finished."""
    begun: BegunTurn | None = None
    """The beginning of the turn after ``turns``, if it was interrupted (:mod:`skyrl_megatron.rollout.partial`)."""


class TrajectoryLog(Protocol):
    """Stores the turns of a batch's trajectories, so that a generator can continue those of an earlier process."""

    def stored(self, id: TrajectoryID) -> PartialTrajectory:
        """Return the turns of a trajectory that an earlier process stored."""

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """Note that a trajectory continued after its stored turns, or why it restarted."""

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """Store turn number ``place`` (from 0) of an unfinished trajectory."""

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """Store a finished trajectory."""


class EarlyEnd(Exception):
    """A trajectory was interrupted, and what it has is recorded."""


class EarlyEndingLog(TrajectoryLog, ABC):
    """The log of a batch that may end before all its trajectories have, such as ``partial.py``'s."""

    ended: asyncio.Event
    """Set when the unfinished trajectories are to be interrupted."""

    @property
    @abstractmethod
    def complete(self) -> list[str]:
        """Uids of the groups whose samples are all finished."""

    @abstractmethod
    def look(self) -> bool:
        """Return whether the batch may end; from then on it is interrupted."""

    @abstractmethod
    def keep(self, id: TrajectoryID, begun: BegunTurn | None) -> None:
        """Record the beginning of an unfinished turn."""
