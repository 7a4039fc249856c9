"""The turns of a trajectory as training sequences, in one of four forms:

* :class:`ChatConversation`: each turn and observation is a chat message of its own; tokens are only ever appended.
* :class:`OneMessageConversation`: all turns and observations continue one assistant message.
* :class:`StepwiseConversation`: every turn is a sequence of its own, its prompt rendered anew by the template.
* :class:`RetokenizedConversation`: one sequence, tokenized anew as a whole with a template that marks the answers.

In the first three, tokens in a sequence are those that the engine sampled, never decoded and tokenized again, and a
turn's mask is 1 on exactly these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_megatron.envs.base import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron.types import TokenSupport


@dataclass(slots=True)
class TrajectoryOutput:
    """One training sequence with n response tokens."""

    prompt_ids: np.ndarray
    """[p] int32."""
    response_ids: np.ndarray
    """[n] int32."""
    loss_mask: np.ndarray
    """[n] uint8."""
    reward: list[float]
    """[n] each turn's reward on its last token."""
    stop_reason: str
    rollout_logprobs: np.ndarray | None = None
    """[n] float32, nats; 0 on tokens that were not sampled. None: unknown."""
    rollout_expert_indices: np.ndarray | None = None
    """[p + n, L, K] experts of each token. Rows that the engine does not return (of its last sampled token and of
    what was appended after it) repeat the row before; training does not depend on them."""
    rollout_support: TokenSupport | None = None
    """What the n response tokens were sampled from; None: unknown, or from the whole vocabulary."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, first response token, token after the last)."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the environment failed."""


@dataclass(slots=True)
class Turn:
    """One generation and its place in the sequence."""

    start: int
    """Position of its first token in the sequence."""
    generation: Generation
    kept: int
    """Sampled tokens that stay in the sequence."""
    appended: int
    """Tokens after them that were not sampled: an end token, or the text of an environment that rewrites the turn."""
    reward: float


class ChatConversation:
    """Tokens are only appended: the sampled ones, then those that the template puts before the next turn."""

    def __init__(self, chat: ChatFormat, messages: ConversationType, *, append_end_token: bool = True) -> None:
        self.chat, self.messages, self.append_end_token = chat, list(messages), append_end_token
        self.turns: list[Turn] = []
        self.ids: list[int] = self._first_prompt()
        self.prompt_length = len(self.ids)

    def _first_prompt(self) -> list[int]:
        return self.chat.prompt(self.messages)

    def next_prompt(self) -> list[int]:
        """Return the tokens that the next turn starts from."""
        return self.ids

    def routed(self) -> int:
        """Return of how many tokens of :meth:`next_prompt` the engine's routes are known: those need no second way."""
        routes = _routes_of(self.turns)
        return 0 if routes is None else len(routes)

    def add_turn(
        self, generation: Generation, text: str, reward: float, *, at_stop_string: bool, rewritten: str | None = None
    ) -> None:
        """Append a sampled turn. ``at_stop_string``: it ended there and not with an end token. ``rewritten``: the text
        that the environment puts in its place."""
        start, sampled = len(self.ids), list(generation.token_ids)
        if rewritten is not None:
            sampled, added = [], self.chat.tokenizer.encode(rewritten, add_special_tokens=False)
        else:
            added = self._end_of(generation, at_stop_string)
        self.ids += sampled + added
        self.turns.append(Turn(start, generation, len(sampled), len(added), reward))
        self.messages.append({"role": "assistant", "content": text if rewritten is None else rewritten})

    def _end_of(self, generation: Generation, at_stop_string: bool) -> list[int]:
        end = self.chat.end_token
        ended = generation.token_ids[-1:] == [end]
        return [end] if at_stop_string and self.append_end_token and not ended else []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        """Append the environment's messages; another turn follows."""
        self.messages += observations
        between = self.chat.after_answer(observations)
        has_end = bool(between) and between[0] == self.chat.end_token
        ended = bool(self.ids) and self.ids[-1] == self.chat.end_token
        if has_end and (ended or (at_stop_string and not self.append_end_token)):
            between = between[1:]
        self.ids += between

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        """Return the rows of the trajectory, up to its last turn. An empty response becomes an end token."""
        last = self.turns[-1]
        if last.start + last.kept + last.appended == self.prompt_length:
            self.ids[self.prompt_length :] = [self.chat.end_token]
            last.appended = 1
        ids = self.ids[: last.start + last.kept + last.appended]
        return [sequence_of(ids, self.prompt_length, self.turns, stop_reason)]


class OneMessageConversation(ChatConversation):
    """Observations are appended as bare text. End tokens inside are removed; the last turn keeps its own, or gets one
    that was not sampled where it was not cut off."""

    def _end_of(self, generation: Generation, at_stop_string: bool) -> list[int]:
        return []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        last = self.turns[-1]
        if last.kept and self.ids[-1] == self.chat.end_token:
            self.ids.pop()
            last.kept -= 1
        self.ids += self.chat.observation(observations)

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        last = self.turns[-1]
        complete = stop_reason == "stop" and last.kept > 0 and not last.appended
        if complete and len(self.ids) == last.start + last.kept and self.ids[-1] != self.chat.end_token:
            self.ids.append(self.chat.end_token)
            last.appended = 1
        return super().sequences(stop_reason)


class StepwiseConversation(ChatConversation):
    """One row a turn. The template renders each prompt, so it may drop earlier thinking."""

    def __init__(self, chat: ChatFormat, messages: ConversationType, *, append_end_token: bool = True) -> None:
        super().__init__(chat, messages, append_end_token=append_end_token)
        self.rows: list[TrajectoryOutput] = []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        self.rows += super().sequences(self.turns[-1].generation.finish_reason)
        self.messages += observations
        self.turns = []
        self.ids = self.chat.prompt(self.messages)
        self.prompt_length = len(self.ids)

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        return self.rows + (super().sequences(stop_reason) if self.turns else [])


class RetokenizedConversation(ChatConversation):
    """For templates that change earlier answers, such as those that drop earlier thinking, in one sequence. Its tokens
    are not the sampled ones, so there are no log-probs and no routes."""

    def __init__(self, chat: ChatFormat, messages: ConversationType, *, append_end_token: bool = True) -> None:
        super().__init__(chat, messages, append_end_token=append_end_token)
        self.first_answer = len(self.messages)
        self.end = self.first_answer

    def add_turn(
        self, generation: Generation, text: str, reward: float, *, at_stop_string: bool, rewritten: str | None = None
    ) -> None:
        super().add_turn(generation, text, reward, at_stop_string=at_stop_string, rewritten=rewritten)
        self.end = len(self.messages)

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        self.messages += observations
        self.ids = self.chat.prompt(self.messages)

    def routed(self) -> int:
        return 0

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        prompt, response, mask = self.chat.answers(self.messages[: self.end], self.first_answer)
        marked = np.asarray(mask, dtype=np.int8)
        ends = np.flatnonzero(np.diff(marked, append=0) == -1)
        if len(ends) != len(self.turns):
            raise DataError(
                f"generator.chat_template marks {len(ends)} answers of {len(self.turns)}: put every assistant message,"
                " its end token included, between {% generation %} and {% endgeneration %}"
            )
        rewards = [0.0] * len(response)
        for end, turn in zip(ends.tolist(), self.turns, strict=True):
            rewards[end] = turn.reward
        ids, positions = np.asarray(prompt, np.int32), np.asarray(response, np.int32)
        return [TrajectoryOutput(ids, positions, marked.astype(np.uint8), rewards, stop_reason)]


def sequence_of(ids: list[int], prompt_length: int, turns: list[Turn], stop_reason: str) -> TrajectoryOutput:
    """Make a row of its tokens and its turns."""
    n = len(ids) - prompt_length
    mask = np.zeros(n, np.uint8)
    known = all(len(turn.generation.logprobs) == len(turn.generation.token_ids) for turn in turns)
    logprobs = np.zeros(n, np.float32) if known else None
    rewards, versions = [0.0] * n, []
    for turn in turns:
        first = turn.start - prompt_length
        after = first + turn.kept
        mask[first:after] = 1
        if logprobs is not None:
            logprobs[first:after] = turn.generation.logprobs[: turn.kept]
        if n:
            rewards[max(after + turn.appended - 1, 0)] += turn.reward
        spans = ((name, first + start, min(first + end, after)) for name, start, end in turn.generation.versions)
        versions += [(name, start, end) for name, start, end in spans if start < end]
    prompt, response = np.split(np.asarray(ids, np.int32), [prompt_length])
    experts = _routes_of(turns)
    support = _support_of(turns, prompt_length, n)
    return TrajectoryOutput(prompt, response, mask, rewards, stop_reason, logprobs, experts, support, versions)


def _support_of(turns: list[Turn], prompt_length: int, n: int) -> TokenSupport | None:
    """Return what n response tokens were sampled from; None where the engine does not say it of every turn."""
    pieces, known = [], 0
    for turn in turns:
        if turn.generation.support is None:
            return None
        first = turn.start - prompt_length
        pieces += [TokenSupport.none(first - known), turn.generation.support.first(turn.kept)]
        known = first + turn.kept
    return TokenSupport.joined([*pieces, TokenSupport.none(n - known)])


def _routes_of(turns: list[Turn]) -> np.ndarray | None:
    """Return the experts of the first n tokens, [n, L, K]: each token's are those of the turn that first computed it.
    No engine has computed the last sampled token and what the environment answers at the end. None where the engine
    does not say it of every turn. Raises DataError for a turn with fewer than it computed, those apart that it was
    asked to leave out (:meth:`ChatConversation.routed`)."""
    pieces, known = [], 0
    for turn in turns:
        routes = turn.generation.routed_experts
        if routes is None:
            return None
        computed = turn.start + len(turn.generation.token_ids) - 1
        first = max(computed - len(routes), 0)
        if first > known:
            raise DataError(f"the engine returned routes of {len(routes)} tokens for a sequence that needs {computed}")
        end = min(computed, turn.start + turn.kept)
        pieces.append(np.asarray(routes)[known - first : end - first])
        known = max(known, end)
    return np.concatenate(pieces) if known else None
