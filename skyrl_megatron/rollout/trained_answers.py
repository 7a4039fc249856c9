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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.answer_ends import MARKER, AnswerEnds

type TrainedSequence = tuple[list[int], list[int], list[int]]
"""(prompt ids, response ids, mask of the response): 1 on trained tokens."""


@dataclass(slots=True)
class _Sequence:
    """The text of a sequence up to the end of its last answer."""

    text: str
    stop: int | None = None
    """The stop token after the text, where the template writes none."""
    answers: list[tuple[int, int, int]] = field(default_factory=list)
    """(number of the message, first character, end) of each trained answer."""


def trained_sequences(
    chat: AnswerEnds,
    messages: Sequence[Mapping[str, Any]],
    trained: Sequence[bool] | None,
    tools: Sequence[Any] | None,
) -> list[TrainedSequence]:
    """Implement :meth:`~skyrl_megatron.rollout.templates.ChatFormat.trained_sequences`."""
    rest_after_stop = chat.rest_after_stop
    sequences: list[_Sequence] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not (trained is None or trained[number]):
            continue
        before = chat.text(messages[:number], generation_prompt=True, tools=tools)
        text = before + _answer(chat, messages[: number + 1], before, tools)
        if not sequences or not _continues(chat, sequences[-1], before):
            sequences.append(_Sequence(""))
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
    return [_tokens(chat, sequence) for sequence in sequences]


def _answer(chat: AnswerEnds, messages: Sequence[Mapping[str, Any]], before: str, tools: Sequence[Any] | None) -> str:
    """Return what the template writes for the last message, after its generation prompt ``before``."""
    text, number = chat.text(messages, tools=tools), len(messages) - 1
    start = len(before) if text.startswith(before) else None
    if start is None:
        start = _rewritten_start(chat, messages, before, text, tools)
    if start is None:
        raise DataError(
            f"message {number}: the chat template renders an answer differently from what follows its generation"
            " prompt: set generator.chat_template, or chat_template_kwargs"
        )
    if left_out := _call_left_out(messages[-1], text[start:]):  # or its name is in the content, which is not written
        silent = chat.text([*messages[:-1], {**messages[-1], "content": ""}], tools=tools)
        if _call_left_out({**messages[-1], "content": ""}, silent[start:]):
            raise DataError(
                f"message {number}: the chat template leaves out a call of {left_out!r}: set another"
                " generator.chat_template, or make a message of each call"
            )
    return text[start:]


def _call_left_out(message: Mapping[str, Any], answer: str) -> str | None:
    """Return the name of a call that the text of an answer seems to lack, as of templates that write none, or only
    the first; None if it has all."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]
    content = str(message.get("content") or "").strip()
    for name, count in Counter(str(function.get("name")) for function in functions).items():
        if answer.count(name) - (content.count(name) if content in answer else 0) < count:
            return name
    return None


def _rewritten_start(
    chat: AnswerEnds, messages: Sequence[Mapping[str, Any]], before: str, text: str, tools: Sequence[Any] | None
) -> int | None:
    """Return where the last answer begins in a text that rewrites the messages before it, as gpt-oss drops the
    thinking of calls when a final answer follows; None if that is not certain.

    It begins at the last generation prompt in what the text shares with that of another answer, if what is
    before it, from the content of the last message on, is that of the prompt.
    """
    asked = chat.text(messages[:-1], tools=tools)
    kept = {name: messages[-1][name] for name in ("role", "tool_calls") if name in messages[-1]}
    other = chat.text([*messages[:-1], {**kept, "content": MARKER}], tools=tools)
    shorter = min(len(text), len(other))
    differs = next((place for place in range(shorter) if text[place] != other[place]), shorter)
    generation_prompt = before[len(asked) :]
    content = messages[-2].get("content") if len(messages) > 1 else None
    if not generation_prompt or not before.startswith(asked) or not isinstance(content, str):
        return None
    found = text.rfind(generation_prompt, 0, differs)
    start = found + len(generation_prompt)
    return start if found >= 0 and text[:start].endswith(before[before.rfind(content.strip()) :]) else None


def _continues(chat: AnswerEnds, sequence: _Sequence, prompt: str) -> bool:
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
        whole = chat.text([*messages[: number + 1], following], generation_prompt=True, tools=tools)
    except DataError:  # the template wants another message here
        return chat.stop_before(role)
    written = chat.next_stop.match(whole, len(text)) if whole.startswith(text) else None
    return chat.stop_before(role) if written is None else chat.id_of(written[1])


def _tokens(chat: AnswerEnds, sequence: _Sequence) -> TrainedSequence:
    bounds = [bound for _, start, end in sequence.answers for bound in (start, end)]
    try:
        ids, counts = chat.encoder.divided(sequence.text, bounds)
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
