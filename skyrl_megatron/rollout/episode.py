"""One trajectory: an environment, a conversation, and the turns between them."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.envs import registry
from skyrl_megatron.envs.base import ConversationType
from skyrl_megatron.envs.pool import EnvPool, EnvTimeout
from skyrl_megatron.errors import DataError, SkyRLMegatronWarning
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.conversation import ChatConversation, TrajectoryOutput
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron.rollout.rewards import NonFiniteReward, checked_reward
from skyrl_megatron.rollout.stop_strings import cut_at_stop, stop_strings
from skyrl_megatron.rollout.templates import ChatFormat

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLGymConfig


@dataclass(slots=True)
class Outcome:
    """What became of a trajectory: one or more rows, never none."""

    rows: list[TrajectoryOutput]
    turns: int = 0
    unfinished: bool = False
    """The environment was not done after the last turn that it was given."""
    llm_seconds: float = 0.0
    env_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What is common to all episodes of a batch."""

    chat: ChatFormat
    conversation: Callable[[ConversationType], ChatConversation]
    pool: EnvPool
    gym_config: SkyRLGymConfig
    sampling: Mapping[str, Any]
    max_turns: int
    max_input_length: int
    skip_nonfinite: bool = False


class _Failed(Exception):
    """The environment failed; the message says how."""


class Episode:
    """Begin, then alternate :meth:`request` and :meth:`answer` until a request is None, then :meth:`end`.

    What the environment raises, and a call of it that takes too long, ends the episode with one masked token and the
    reason. Errors that every trajectory would share pass through: a reward or an observation of the wrong type.
    """

    def __init__(
        self,
        rules: Rules,
        prompt: ConversationType,
        env_class: str,
        extras: Mapping[str, Any],
        trajectory: TrajectoryID,
    ) -> None:
        self.rules, self.env_class, self.trajectory = rules, env_class, trajectory
        self.prompt, self.extras = prompt, {**extras, "max_turns": rules.max_turns}
        self.env: Any = None
        self.conversation: ChatConversation | None = None
        self.turns, self.done = 0, False
        self.stop_reason = "stop"
        self.error: str | None = None
        self.metrics: dict[str, Any] = {}
        self.closed = False
        self._inside = threading.RLock()  # a cancelled episode is closed while its last call may be under way
        self.started = self.asked = time.perf_counter()
        self.llm_seconds = self.env_seconds = 0.0

    async def begin(self) -> None:
        """Make the environment, and the prompt of the first turn."""
        self.started = time.perf_counter()
        try:
            messages = await self._in_pool(self._open)
            self.conversation = self.rules.conversation(messages)
        except _Failed as failure:
            self.error = str(failure)

    def request(self) -> list[int] | None:
        """Tokens that the next turn starts from; None when there is none."""
        if self.conversation is None or self.error or self.done or self.turns >= self.rules.max_turns:
            return None
        prompt = self.conversation.next_prompt()
        if len(prompt) > self.rules.max_input_length:
            self.stop_reason, self.done = "length", True
            return None
        self.asked = time.perf_counter()
        return prompt

    async def answer(self, generation: Generation) -> None:
        """The turn that the policy sampled: hand it to the environment and take down what it says."""
        assert self.conversation is not None
        self.llm_seconds += time.perf_counter() - self.asked
        self.turns += 1
        self.stop_reason = generation.finish_reason
        text, at_stop = self._text_of(generation)
        last = self.turns >= self.rules.max_turns
        try:
            step = await self._in_pool(self._step, text, last)
            reward = self._reward_of(step)
        except _Failed as failure:
            self.error = str(failure)
            return
        rewritten = step.get("postprocessed_action")
        if rewritten is not None and rewritten != text:
            _warn_rewritten(self.env_class)
        else:
            rewritten = None
        self.conversation.add_turn(generation, text, reward, at_stop_string=at_stop, rewritten=rewritten)
        self.done = bool(step["done"])
        if not (self.done or last):
            self.conversation.add_observations(list(step["observations"] or ()), at_stop_string=at_stop)

    async def end(self) -> Outcome:
        """The outcome, after the environment is closed."""
        await self.close()
        rows = self._rows()
        rows[-1].env_metrics, rows[-1].error = self.metrics, self.error
        return Outcome(
            rows,
            self.turns,
            unfinished=not (self.done or self.error),
            llm_seconds=self.llm_seconds,
            env_seconds=self.env_seconds,
            seconds=time.perf_counter() - self.started,
        )

    async def close(self) -> None:
        """Close the environment unless it is closed, or stuck."""
        if self.env is None or self.closed:
            return
        try:
            await self._in_pool(self._close)
        except _Failed as failure:
            self.error = self.error or str(failure)

    def _rows(self) -> list[TrajectoryOutput]:
        if self.conversation is not None and self.turns and not self.error:
            return self.conversation.sequences(self.stop_reason)
        prompt: list[int] = []
        if self.conversation is not None:
            length = min(self.conversation.prompt_length, self.rules.max_input_length)
            prompt = self.conversation.next_prompt()[:length]
        end = [self.rules.chat.end_token]
        blank = np.zeros(1, np.float32) if self.rules.sampling.get("logprobs") is not None else None
        return [
            TrajectoryOutput(
                np.asarray(prompt or end, np.int32),
                np.asarray(end, np.int32),
                np.zeros(1, np.uint8),
                [0.0],
                "error" if self.error else self.stop_reason,
                blank,
            )
        ]

    async def _in_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return await self.rules.pool.run(function, *arguments)
        except Exception as error:
            self.closed = self.closed or isinstance(error, EnvTimeout)  # its thread is still inside the environment
            raise _Failed(f"{type(error).__name__}: {error}") from error
        finally:
            self.env_seconds += time.perf_counter() - started

    # The following run in a thread of the pool.
    def _open(self) -> ConversationType:
        config = registry.config_of(self.env_class, self.rules.gym_config)
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
        skip = bool(self.rules.sampling.get("skip_special_tokens", True))
        text = self.rules.chat.tokenizer.decode(
            generation.token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        stops = stop_strings(self.rules.sampling)
        return cut_at_stop(text, stops) if stops else (text, False)

    def _reward_of(self, step: Any) -> float:
        """The reward of a step output, after a check of the whole. Raises DataError naming the environment."""
        name = self.trajectory.to_string()
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
            if self.rules.skip_nonfinite:
                raise _Failed(str(error)) from error
            raise


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
