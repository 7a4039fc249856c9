"""One episode: the turns between the policy and an environment, written into a conversation."""

from __future__ import annotations

import copy
import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from skyrl_megatron.envs import base as registry
from skyrl_megatron.envs.base import ConversationType
from skyrl_megatron.envs.pool import EnvPool, EnvTimeout
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning, with_origin
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.conversation import ChatConversation, TrajectoryOutput
from skyrl_megatron.rollout.interface import (
    NonFiniteReward,
    RecordedTurn,
    TrajectoryID,
    answer_of,
    checked_reward,
    record_turn,
    starts_alike,
)
from skyrl_megatron.rollout.templates import ChatFormat

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLGymConfig


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Trajectory:
    """A finished trajectory: at least one row."""

    rows: list[TrajectoryOutput]
    turns: int = 0
    unfinished: bool = False
    """The environment was not done after the last turn that it was given."""
    llm_seconds: float = 0.0
    env_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings that all episodes of a batch share."""

    chat: ChatFormat
    conversation: Callable[[ConversationType], ChatConversation]
    pool: EnvPool
    gym_config: SkyRLGymConfig
    sampling: Mapping[str, Any]
    max_turns: int
    max_input_length: int
    skip_nonfinite: bool = False


class _EnvFailed(Exception):
    """The environment failed; the message says how."""


class _Differs(Exception):
    """The environment is not what it was when its turns were recorded; the message says where."""


class Episode:
    """Call :meth:`begin`, alternate :meth:`request` and :meth:`answer` until a request is None, then :meth:`end`.

    An environment that raises or exceeds its time limit ends the episode with one masked token and the reason. Errors
    that all trajectories would share pass through: a reward or an observation of the wrong type.

    ``recording``: keep each turn in ``recorded``, from which :meth:`begin` of another episode can go on.
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
        """Why recorded turns could not be gone on from."""
        self._reset()

    def _reset(self) -> None:
        self.env: Any = None
        self.conversation: ChatConversation | None = None
        self.turns, self.done = 0, False
        self.stop_reason = "stop"
        self.error: str | None = None
        self.metrics: dict[str, Any] = {}
        self.closed = False
        self.recorded: list[RecordedTurn] = []
        self._said: list[int] = []  # tokens of the last turn, its prompt included
        self._inside = threading.RLock()  # a cancelled episode is closed while its last call may be under way
        self.started = self.asked = time.perf_counter()
        self.llm_seconds = self.env_seconds = 0.0

    async def begin(self, recorded: Sequence[RecordedTurn] = ()) -> None:
        """Make the environment and the prompt of the first turn. With ``recorded`` turns, go on behind them: the
        environment is stepped through them. Where it cannot be, or does not answer as it did, the episode begins anew,
        and ``restarted`` says why."""
        await self._begin()
        if not recorded or self.error:
            return
        self.recording = True
        try:
            await self._replay(recorded)
        except (_EnvFailed, _Differs) as difference:
            await self.close()
            self.restarted = str(difference)
            self._reset()
            await self._begin()

    @property
    def goes_on(self) -> bool:
        """Whether there was a turn, and another one will be asked for unless its prompt is too long."""
        return bool(self.turns) and not (self.done or self.error) and self.turns < self.config.max_turns

    async def _begin(self) -> None:
        self.started = time.perf_counter()
        try:
            messages = await self._in_pool(self._open)
            self.conversation = self.config.conversation(messages)
        except _EnvFailed as failure:
            self.error = str(failure)

    async def _replay(self, recorded: Sequence[RecordedTurn]) -> None:
        if not getattr(self.env, "replayable", True):
            raise _Differs(f"environment {self.env_class!r} declares that it cannot be replayed")
        for number, turn in enumerate(recorded):
            prompt = self.request()
            if prompt is None or not starts_alike(turn, self._said, prompt):
                raise _Differs(f"turn {number} of environment {self.env_class!r} does not start as it did")
            self.asked = time.perf_counter() - turn.llm_seconds
            self.started -= turn.llm_seconds
            step = await self._take(turn.generation)
            if answer_of(step) != turn.answer:
                raise _Differs(f"environment {self.env_class!r} answers turn {number} otherwise than it did")

    def request(self) -> list[int] | None:
        """Return the tokens that the next turn starts from; None when the episode is over."""
        if self.conversation is None or self.error or self.done or self.turns >= self.config.max_turns:
            return None
        prompt = self.conversation.next_prompt()
        if len(prompt) > self.config.max_input_length:
            self.stop_reason, self.done = "length", True
            return None
        self.asked = time.perf_counter()
        return prompt

    def sampling(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``keys`` of the next turn's request. An engine that returns routes is asked for none of the tokens
        that an earlier turn brought with theirs."""
        routed = 0 if self.conversation is None else self.conversation.routed()
        return {**keys, "routed_experts_prompt_start": routed} if routed else keys

    async def answer(self, generation: Generation) -> None:
        """Pass the sampled turn to the environment and record its step output."""
        try:
            await self._take(generation)
        except _EnvFailed as failure:
            self.error = str(failure)

    async def _take(self, generation: Generation) -> Any:
        """Do what :meth:`answer` says, and return the step output."""
        assert self.conversation is not None
        llm_seconds = time.perf_counter() - self.asked
        self.llm_seconds += llm_seconds
        self.turns += 1
        self.stop_reason = generation.finish_reason
        text, at_stop = self._text_of(generation)
        last = self.turns >= self.config.max_turns
        step = await self._in_pool(self._step, text, last)
        reward = self._reward_of(step)
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
        self.recorded.append(record_turn(self._said, prompt, generation, step, llm_seconds))
        self._said = [*prompt, *generation.token_ids]

    async def end(self) -> Trajectory:
        """Close the environment and return the trajectory."""
        await self.close()
        rows = self._rows()
        rows[-1].env_metrics, rows[-1].error = self.metrics, self.error
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
            self.closed = self.closed or isinstance(error, EnvTimeout)  # its thread is still inside the environment
            failure = with_origin(error)
            _log_once(self.env_class, failure, error)
            raise _EnvFailed(failure) from error
        finally:
            self.env_seconds += time.perf_counter() - started

    # The following run in a thread of the pool.
    def _open(self) -> ConversationType:
        config = registry.config_of(self.env_class, self.config.gym_config)
        self.env = registry.make(self.env_class, env_config=config, extras=copy.deepcopy(self.extras))
        messages, _ = self.env.init(copy.deepcopy(self.prompt))
        return list(messages)

    def _step(self, text: str, last: bool) -> Any:
        with self._inside:
            step = self.env.step(text)
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
        return cut_at_stop(text, self.config.sampling.get("stop") or ())

    def _reward_of(self, step: Any) -> float:
        """Check a step output and return its reward. Raises DataError naming the environment."""
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


def cut_at_stop(text: str, stop: str | Sequence[str]) -> tuple[str, bool]:
    """Cut a turn behind its first stop string, which its last token may reach beyond; whether there was one."""
    stops = (stop,) if isinstance(stop, str) else stop
    ends = [at + len(each) for each in stops if (at := text.find(each)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


_logged: set[str] = set()


def _log_once(env_class: str, failure: str, error: Exception) -> None:
    """Log the traceback of an environment's error, for the console.log of a run: the first one at each place."""
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
    """What there is of one sample of an unfinished group."""

    turns: list[RecordedTurn] = field(default_factory=list)
    trajectory: Trajectory | None = None
    """The whole of it, where it is over."""


class TrajectoryLog(Protocol):
    """Keeps the turns of a batch's trajectories. A generator that asks it for what there is need not sample that."""

    def begun(self, id: TrajectoryID) -> PartialTrajectory:
        """Return what an earlier process left of a trajectory."""

    def resumed(self, id: TrajectoryID, restarted: str | None) -> None:
        """Note that a trajectory went on behind its turns, or why it began anew."""

    async def turn(self, id: TrajectoryID, place: int, turn: RecordedTurn) -> None:
        """Keep a turn, the ``place``-th from 0, of a trajectory that goes on."""

    async def finished(self, id: TrajectoryID, trajectory: Trajectory) -> None:
        """Keep a trajectory that is over."""
