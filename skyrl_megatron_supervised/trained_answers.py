"""Conversations as sequences whose answers are trained.

The chat template is the truth. A sequence is the text that it writes, tokenized once, and a trained answer is what the
model has to sample in that place: from the end of the generation prompt to and including the token at which generation
stops (:attr:`~skyrl_megatron.rollout.answer_ends.AnswerEnds.stop_ids`). That token is the first of

1. the one that the template writes inside the answer's own text or at its end (ChatML's ``<|im_end|>``, ``<|return|>``
   and ``<|call|>`` of gpt-oss);
2. the one with which the template begins the next message, or would begin a tool's after a call and a user's after
   other answers (GLM's ``<|observation|>`` and ``<|user|>``);
3. the tokenizer's end-of-sequence token.

An answer continues the sequence of the answers before it if the template writes these in its prompt as they are
trained. If not, because it drops their thinking or ends them with another token, it begins a new sequence.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.data.messages import THINKING
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.answer_ends import AnswerEnds

SWITCHES = (
    ("enable_thinking", False),
    ("thinking", False),
    ("enable_thinking", True),
    ("thinking", True),
    ("reasoning_effort", "high"),
)
"""Arguments with which chat templates turn thinking off or on."""

_THINKING_TAGS = re.compile(r"</?think>")

type TrainedSequence = tuple[list[int], list[int], list[int]]
"""(prompt ids, response ids, mask of the response): 1 on trained tokens."""


@dataclass(slots=True)
class RenderedSequence:
    """The text of a sequence up to the end of its last answer."""

    text: str
    stop: int | None = None
    """The stop token after the text, where the template writes none."""
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    """(number of the message, first character, end) of each trained answer."""


def trained_sequences(
    chat: AnswerEnds,
    messages: Sequence[Mapping[str, Any]],
    trained: Sequence[bool] | None = None,
    tools: Sequence[Any] | None = None,
) -> list[TrainedSequence]:
    """Return (prompt, response, mask) of each sequence that trains the assistant's messages. ``trained``: for each
    message whether it is trained, of which only those of the assistant may be; None: all of the assistant. The mask is
    1 on the tokens of a trained answer and on its end token.

    Raises DataError, with the number of the message, if the tokens of an answer are ambiguous.
    """
    return [tokens_of(chat, sequence) for sequence in rendered_sequences(chat, messages, trained, tools)]


def rendered_sequences(
    chat: AnswerEnds,
    messages: Sequence[Mapping[str, Any]],
    trained: Sequence[bool] | None,
    tools: Sequence[Any] | None,
) -> list[RenderedSequence]:
    """Return the texts of the sequences of :func:`trained_sequences`, which :func:`tokens_of` tokenizes."""
    rest_after_stop = chat.rest_after_stop
    sequences: list[RenderedSequence] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not (trained is None or trained[number]):
            continue
        before = chat.text(messages[:number], generation_prompt=True, tools=tools)
        text = chat.text(messages[: number + 1], tools=tools)
        if not text.startswith(before):
            answer = _rewritten_answer(chat, messages, number, before, text, tools)
            if answer is None:
                raise DataError(f"message {number}: {_why_not(chat, messages, number, tools)}")
            text = before + answer
        if omitted := _omitted(message, text[len(before) :]):
            raise DataError(f"message {number}: the chat template does not write {omitted}: change the message")
        if not sequences or not _continues(chat, sequences[-1], before):
            sequences.append(RenderedSequence(""))
        written = chat.stops.search(text, len(before))
        current = sequences[-1]
        if written is not None:
            rest = text[written.end() :]
            if rest.strip() and rest != rest_after_stop:
                raise DataError(
                    f"message {number}: its text continues with {rest[:40]!r} after {written[0]}, at which the model"
                    " stops: take that token out of the message"
                )
            current.text, current.stop = text[: written.end()], None
        else:
            current.text, current.stop = text, _stop_after(chat, messages, number, text, tools)
        current.answers.append((number, len(before), len(current.text)))
    return sequences


def _rewritten_answer(
    chat: AnswerEnds,
    messages: Sequence[Mapping[str, Any]],
    number: int,
    before: str,
    text: str,
    tools: Sequence[Any] | None,
) -> str | None:
    """Return the text of an answer with which the template renders its prompt differently, as gpt-oss drops the
    thinking of tool calls once they are answered; None if that is not certain.

    The answer follows the longest end of its own prompt, ``before``, that ``text`` still holds. That end must be there
    once, and must have the generation prompt; without one, all of the message before the answer.
    """
    same = next((n for n, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text)))
    rest = text[same:]
    # If a longer end of the prompt is in the rest, a shorter one is too.
    length = bisect_left(range(1, len(before) + 1), 1, key=lambda size: int(before[-size:] not in rest))
    end = before[len(before) - length :]
    opening = _generation_prompt(chat, messages, number, tools)
    needed = opening if opening != before else ""
    needed = needed or str(messages[number - 1].get("content") or before)
    if not end or needed not in end or rest.count(end) != 1:
        return None
    return rest.partition(end)[2]


def _why_not(chat: AnswerEnds, messages: Sequence[Mapping[str, Any]], number: int, tools: Sequence[Any] | None) -> str:
    """Return why an answer does not follow its generation prompt, and what makes it possible."""
    opening = _generation_prompt(chat, messages, number, tools)
    differs = f"the chat template does not begin the answer with its generation prompt {opening[-60:]!r}"
    for name, value in SWITCHES:
        other = chat.with_kwargs({**chat.kwargs, name: value})
        prompt = other.text(messages[:number], generation_prompt=True, tools=tools)
        if other.text(messages[: number + 1], tools=tools).startswith(prompt):
            setting = f"generator.chat_template_kwargs.{name}={str(value).lower()}"
            return f"{differs}: set {setting}, or give the answer the thinking that this prompt asks for"
    return (
        f"{differs}: give the answer the thinking that this prompt asks for, or set generator.chat_template or"
        " generator.chat_template_kwargs"
    )


def _generation_prompt(
    chat: AnswerEnds, messages: Sequence[Mapping[str, Any]], number: int, tools: Sequence[Any] | None
) -> str:
    """Return what the template adds after the messages before an answer, or, if it changes these, all of its text."""
    before = chat.text(messages[:number], generation_prompt=True, tools=tools)
    return before.removeprefix(chat.text(messages[:number], tools=tools))


def _omitted(message: Mapping[str, Any], answer: str) -> str:
    """Return what a template leaves out of an answer, as some do with text next to tool calls, with thinking, or with
    all calls but one; "" if it writes everything."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    # Thinking in the text is written in other places, and some templates keep one part of it only.
    for part in _THINKING_TAGS.split(content) if isinstance(content, str) else ():
        if (spoken := part.strip()) and spoken not in answer:
            return f"the text {spoken[:40]!r}"
    for name in THINKING:
        thinking = message.get(name)
        if isinstance(thinking, str) and thinking.strip() and thinking.strip() not in answer:
            return f"the thinking {thinking.strip()[:40]!r} of {name}"
    functions = [call.get("function") or call for call in calls if isinstance(call, Mapping)]
    names = Counter(function["name"] for function in functions if isinstance(function.get("name"), str))
    for name, count in names.items():
        if answer.count(name) < count:
            return f"{count - answer.count(name)} of {count} calls of {name!r}"
    return ""


def _continues(chat: AnswerEnds, sequence: RenderedSequence, prompt: str) -> bool:
    """Return whether a prompt begins with a sequence, which then holds its stop token as text."""
    if not prompt.startswith(sequence.text):
        return False
    if sequence.stop is None:
        return True
    written = chat.next_stop.match(prompt, len(sequence.text))
    if written is None or chat.id_of(written[1]) != sequence.stop:
        return False
    number, start, _ = sequence.answers.pop()
    sequence.text, sequence.stop = prompt[: written.end()], None
    sequence.answers.append((number, start, written.end()))
    return True


def _stop_after(
    chat: AnswerEnds, messages: Sequence[Mapping[str, Any]], number: int, text: str, tools: Sequence[Any] | None
) -> int:
    """Return the stop token of an answer whose ``text`` holds none."""
    calls = messages[number].get("tool_calls")
    role = messages[number + 1]["role"] if number + 1 < len(messages) else "tool" if calls else "user"
    if not calls:
        return chat.stop_before(role)
    ids = [call["id"] for call in calls if isinstance(call, Mapping) and call.get("id")]
    following = (
        messages[number + 1]
        if number + 1 < len(messages)
        else {"role": "tool", "content": "?"} | ({"tool_call_id": ids[0]} if ids else {})
    )
    try:
        longer = chat.text([*messages[: number + 1], following], generation_prompt=True, tools=tools)
    except DataError:  # the template wants another message here
        return chat.stop_before(role)
    written = chat.next_stop.match(longer, len(text)) if longer.startswith(text) else None
    return chat.stop_before(role) if written is None else chat.id_of(written[1])


def tokens_of(chat: AnswerEnds, sequence: RenderedSequence, encoding: Any = None) -> TrainedSequence:
    """Return (prompt, response, mask) of a sequence. ``encoding``: of its text, see
    :meth:`~skyrl_megatron.data.encoding.Encoder.encodings`."""
    bounds = [bound for _, start, end in sequence.answers for bound in (start, end)]
    try:
        ids, counts = chat.encoder.divided(sequence.text, bounds, encoding)
    except DataError as error:
        raise DataError(f"message {sequence.answers[0][0]}: {error}") from error
    if sequence.stop is not None:
        ids.append(sequence.stop)
        counts[-1] = len(ids)
    mask = [0] * len(ids)
    for (number, _, _), first, after in zip(sequence.answers, counts[::2], counts[1::2], strict=True):
        if ids[after - 1] not in chat.stop_ids or not chat.stop_ids.isdisjoint(ids[first : after - 1]):
            raise DataError(f"message {number}: its tokens do not end with the first stop token of the model")
        mask[first:after] = [1] * (after - first)
    start = counts[0]
    return ids[:start], ids[start:], mask[start:]
