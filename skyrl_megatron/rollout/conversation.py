"""The turns of a trajectory as training sequences, in one of four forms:

* :class:`ChatConversation`: each turn and each observation is a separate chat message; tokens are only appended.
* :class:`OneMessageConversation`: all turns and observations form one assistant message.
* :class:`StepwiseConversation`: every turn is a separate sequence, whose prompt the template renders.
* :class:`RetokenizedConversation`: one sequence, tokenized as a whole with a template that marks the answers.

In the first three forms a sequence holds the sampled tokens, which are never decoded and tokenized again, and the loss
mask is 1 on exactly these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_megatron.data.encoding import after_stop
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.rollout.templates import ChatFormat
from skyrl_megatron.types import TokenSupport, joined_arrays


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
    """[n]: each turn's reward on its last token, else 0."""
    stop_reason: str
    rollout_logprobs: np.ndarray | None = None
    """[n] float32, nats; 0 on tokens that were not sampled. None: unknown."""
    rollout_expert_indices: np.ndarray | None = None
    """[m, L, K]: experts of the first m tokens. The engine does not return those of the last sampled token and later
    ones."""
    rollout_support: TokenSupport | None = None
    """Sampling support of the n response tokens; None: unknown, or the whole vocabulary."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(policy version, first response token, end) of each sampled span."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Error of the environment, or None."""
    parsed_answer: str | None = None
    """The answer that the environment read from the last turn (metadata ``parsed_answer`` or ``pred``)."""


@dataclass(slots=True)
class Turn:
    """One generation and its position in the sequence."""

    start: int
    """Position of its first token in the sequence."""
    generation: Generation
    kept: int
    """Number of sampled tokens in the sequence."""
    appended: int
    """Number of tokens after them that were not sampled: an end token, or the text of the environment."""
    reward: float


class ChatConversation:
    """Appends the sampled tokens, then the tokens that the template puts before the next turn."""

    def __init__(self, chat: ChatFormat, messages: ConversationType, *, append_end_token: bool = True) -> None:
        self.chat, self.messages, self.append_end_token = chat, list(messages), append_end_token
        self.turns: list[Turn] = []
        self.ids: list[int] = self._first_prompt()
        self.prompt_length = len(self.ids)

    def _first_prompt(self) -> list[int]:
        return self.chat.prompt(self.messages)

    def next_prompt(self) -> list[int]:
        """Return the prompt tokens of the next turn."""
        return self.ids

    def routed(self) -> int:
        """Return the number of first tokens of :meth:`next_prompt` whose routed experts earlier turns returned."""
        routes = _routes_of(self.turns)
        return 0 if routes is None else len(routes)

    def add_turn(
        self, generation: Generation, text: str, reward: float, *, at_stop_string: bool, rewritten: str | None = None
    ) -> None:
        """Append a sampled turn.

        ``at_stop_string``: it ended with a stop string instead of an end token. ``rewritten``: the text with which the
        environment replaces it.
        """
        start, sampled = len(self.ids), list(generation.token_ids)
        stopped = sampled[-1:] if sampled and sampled[-1] in self.chat.stop_ids else []
        said = text if rewritten is None else rewritten
        if rewritten is not None:
            # the new text was not sampled: its tokens have no log-probs, and the mask leaves them out
            sampled, added = [], self.chat.encoder.continued(rewritten)
        else:
            added = [] if stopped or not at_stop_string else self._end_of_turn()
        self.ids += sampled + added
        self.turns.append(Turn(start, generation, len(sampled), len(added), reward))
        if stopped and (end := self.chat.tokenizer.decode(stopped)):
            said = said.removesuffix(end)  # the template writes it again
        self.messages.append({"role": "assistant", "content": said})

    def _end_of_turn(self) -> list[int]:
        """Return what ends a turn that ended at a stop string."""
        return [self.chat.end_token] if self.append_end_token else []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        """Append messages of the environment, before another turn.

        A stop token that ends the turn stays, also where the template writes another one in earlier messages: gpt-oss
        keeps its ``<|return|>`` instead of ``<|end|>``, because nothing that was sampled is changed.
        """
        self.messages += observations
        between = self.chat.after_answer(observations)
        turn, closing = self.turns[-1], self.chat.closing_token
        ends = bool(between) and (between[0] == closing or between[0] in self.chat.stop_ids)
        if at_stop_string and turn.kept and turn.appended and ends:
            self.ids[-1] = between.pop(0)  # what ends a turn depends on the next message
        elif turn.kept + turn.appended and self._ended(between):
            between = after_stop(between, self.ids[turn.start :], closing)
        elif at_stop_string and not self.append_end_token and between[:1] == [closing]:
            between = between[1:]
        self.ids += between

    def _ended(self, between: list[int]) -> bool:
        """Return whether the last token is a stop token, also one that only this run's sampling stops at."""
        last = self.ids[-1]
        return last in self.chat.stop_ids or (between[:1] == [last] and last in self.chat.tokenizer.all_special_ids)

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        """Return the rows of the trajectory up to its last turn. An empty response becomes an end token."""
        last = self.turns[-1]
        # an empty response has no token to carry the reward
        if last.start + last.kept + last.appended == self.prompt_length:
            self.ids[self.prompt_length :] = [self.chat.end_token]
            last.appended = 1
        ids = self.ids[: last.start + last.kept + last.appended]
        return [sequence_of(ids, self.prompt_length, self.turns, stop_reason)]


class OneMessageConversation(ChatConversation):
    """Appends observations as plain text, without the template.

    End tokens between turns are removed. If the last turn stopped without an end token, one is appended, masked.
    """

    def _end_of_turn(self) -> list[int]:
        return []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        last = self.turns[-1]
        # the policy's end token is removed with its place in the mask: plain text follows it
        if last.kept and self.ids[-1] in self.chat.stop_ids:
            self.ids.pop()
            last.kept -= 1
        self.ids += self.chat.observation(observations)

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        last = self.turns[-1]
        complete = stop_reason == "stop" and last.kept > 0 and not last.appended
        if complete and len(self.ids) == last.start + last.kept and self.ids[-1] not in self.chat.stop_ids:
            self.ids.append(self.chat.end_token)
            last.appended = 1
        return super().sequences(stop_reason)


class StepwiseConversation(ChatConversation):
    """One row per turn. The template renders each prompt, so it may drop earlier thinking."""

    def __init__(self, chat: ChatFormat, messages: ConversationType, *, append_end_token: bool = True) -> None:
        super().__init__(chat, messages, append_end_token=append_end_token)
        self.rows: list[TrajectoryOutput] = []

    def add_observations(self, observations: ConversationType, *, at_stop_string: bool) -> None:
        self.rows += super().sequences(self.turns[-1].generation.finish_reason)
        self.messages += observations
        self.turns = []
        # each prompt is rendered anew, so nothing of the turns before it may be assumed to be a prefix
        self.ids = self.chat.prompt(self.messages)
        self.prompt_length = len(self.ids)

    def sequences(self, stop_reason: str) -> list[TrajectoryOutput]:
        if not self.turns:  # the next prompt was too long: the trajectory ends with the row of an earlier turn
            self.rows[-1].stop_reason = stop_reason
        return self.rows + (super().sequences(stop_reason) if self.turns else [])


class RetokenizedConversation(ChatConversation):
    """One sequence with a template that changes earlier answers, such as one that drops earlier thinking.

    Its tokens are not the sampled ones, so it has no log-probs and no routed experts.
    """

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
        # the ends of the runs of ones: one per answer, at which its reward is put
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


def sequence_of(
    ids: list[int], prompt_length: int, turns: list[Turn], stop_reason: str, before: Sequence[Turn] = ()
) -> TrajectoryOutput:
    """Make a row from its tokens and its turns. ``before``: turns in its prompt, which another row trains."""
    n = len(ids) - prompt_length
    mask = np.zeros(n, np.uint8)
    complete = all(len(turn.generation.logprobs) == len(turn.generation.token_ids) for turn in turns)
    logprobs = np.zeros(n, np.float32) if complete else None
    rewards, versions = [0.0] * n, []
    for turn in turns:
        first = turn.start - prompt_length
        after = first + turn.kept
        mask[first:after] = 1
        if logprobs is not None:
            logprobs[first:after] = turn.generation.logprobs[: turn.kept]
        # the reward of a turn belongs to its last token; an end token that was appended counts as that
        if n:
            rewards[max(after + turn.appended - 1, 0)] += turn.reward
        spans = ((name, first + start, min(first + end, after)) for name, start, end in turn.generation.versions)
        versions += [(name, start, end) for name, start, end in spans if start < end]
    prompt, response = np.split(np.asarray(ids, np.int32), [prompt_length])
    experts = _routes_of([*before, *turns])
    support = _support_of(turns, prompt_length, n)
    return TrajectoryOutput(prompt, response, mask, rewards, stop_reason, logprobs, experts, support, versions)


def _support_of(turns: list[Turn], prompt_length: int, n: int) -> TokenSupport | None:
    """Return the sampling support of n response tokens; None unless the engine returned it for every turn."""
    pieces, known = [], 0
    for turn in turns:
        if turn.generation.support is None:
            return None
        first = turn.start - prompt_length
        pieces += [TokenSupport.none(first - known), turn.generation.support.first(turn.kept)]
        known = first + turn.kept
    return TokenSupport.joined([*pieces, TokenSupport.none(n - known)])


def _routes_of(turns: list[Turn]) -> np.ndarray | None:
    """Return the experts of the first n tokens, [n, L, K], or None unless the engine returned them for every turn.

    Those of a token come from the turn that first computed it. The engine has not computed the last sampled token and
    the tokens after it. Raises DataError if a turn lacks experts of tokens that it computed, except those that the
    request left out (:meth:`ChatConversation.routed`).
    """
    pieces, covered = [], 0
    for turn in turns:
        routes = turn.generation.routed_experts
        if routes is None:
            return None
        computed = turn.start + len(turn.generation.token_ids) - 1
        first = max(computed - len(routes), 0)
        if first > covered:
            raise DataError(
                f"the engine returned routed experts of {len(routes)} tokens, but the sequence needs {computed}: the "
                "engine must return those of every token that it computed"
            )
        end = min(computed, turn.start + turn.kept)
        pieces.append(routes[covered - first : end - first])
        covered = max(covered, end)
    return joined_arrays(pieces) if covered else None
