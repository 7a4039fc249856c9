"""The messages and tools of a row: what is valid, what their flags say, and how a row's own text becomes values.

Chat templates are not asked here: what they read of a message is :mod:`skyrl_megatron.data.message_form`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl_megatron.errors import DataError

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message with its thinking."""
FLAGS = (
    "weight",
    "loss",
    "train",
    "trainable",
    "training",
    "train_on",
    "loss_mask",
    "step_loss_mask",
    "loss_scale",
    "loss_weight",
)
"""Keys of a message or a row that say whether it is trained: 0 or false, 1 or true."""
TOKEN_MASKS = ("train_detail", "mask", "masks", "loss_masks", "assistant_masks", "completion_mask", "labels")
"""Keys that select parts of a text or tokens, which nothing here reads."""
BARE_TOOLS = 'tools are written as they are, not in the form {"type": "function", "function": {…}} of OpenAI'
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message's content that are text."""


def messages_problem(messages: Any) -> str | None:
    """Return the problem of a list of chat messages; None if it is valid."""
    if messages is None or (isinstance(messages, list) and not messages):
        return "is empty"
    if not isinstance(messages, list):
        return f"is {messages!r:.80}, it must be a list of messages with role and content"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") is None or not _says_something(message):
            return f"holds {message!r:.80}, which is no message with role and content"
        if not isinstance(message["role"], str) or not message["role"]:
            return f"holds a message whose role is {message['role']!r:.80}, it must be text"
        if not isinstance(content := message.get("content"), str | None) and not _text_parts(content):
            return f"holds a message whose content is {content!r:.80}, it must be text"
        if message.get("tool_calls"):
            try:
                list(calls_of(message, number))
            except DataError as error:
                return f"has an invalid tool call: {error}"
    return None


def _says_something(message: Mapping[str, Any]) -> bool:
    """Return whether a message has content or tool calls."""
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _text_parts(content: Any) -> bool:
    """Return whether a content is a list of parts that are text, as in OpenAI's form."""
    return isinstance(content, list) and bool(content) and all(isinstance(part_text(part), str) for part in content)


def part_text(part: Any) -> Any:
    """Return the text of a part of a message's content; None if it is no text."""
    return part.get("text") if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS else None


def as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null fields, which Arrow adds for fields of other messages.

    ``content`` stays null for a message that only calls tools, as in OpenAI's format, which templates expect.
    """
    rendered = {key: value for key, value in message.items() if value is not None}
    rendered.setdefault("content", None)
    return rendered


def calls_of(message: Mapping[str, Any], number: int) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield each tool call of the message ``number`` of a row with its arguments as an object, and their text if the
    row has text.

    No arguments, and an empty text, are the empty object, as in vLLM. Raises DataError for a call that has no name,
    and for arguments that are no object.
    """
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise DataError(f"message {number}: tool_calls is {calls!r:.80}, it must be a list")
    for position, call in enumerate(calls):
        where = f"message {number}, tool call {position}"
        nested = isinstance(call, dict) and call.get("function") is not None
        function = call["function"] if nested else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where} is {call!r:.80}, it must be {{'function': {{'name': …, 'arguments': …}}}}")
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) and arguments.strip() else None
        if text is not None:
            arguments = from_json(text, f"{where}: arguments")
        if arguments is None or arguments == "" or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if not isinstance(arguments, dict):
            raise DataError(
                f"{where}: arguments is {function['arguments']!r:.80}, it must be an object or its JSON text"
            )
        changed = {**function, "arguments": arguments}
        yield ({**call, "function": changed} if nested else changed), text


def from_json(text: str, name: str) -> Any:
    """Return the value of a JSON text. Raises DataError that begins with ``name``."""
    try:
        return _JSON.decode(text.strip())
    except RecursionError:
        raise DataError(f"{name} is nested too deeply: write it with fewer levels") from None
    except ValueError as error:
        raise DataError(f"{name} is {text!r:.80}, which is no JSON: {error}; write a JSON value") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text:.40} is no number in JSON")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r:.40} is given twice")
    return entries


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_distinct)


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row: a list of objects, or its JSON text. No tools are null, an empty text, or an empty
    list. Raises DataError for anything else."""
    listed = value
    try:
        if isinstance(listed, str):
            listed = _JSON.decode(listed.strip()) if listed.strip() else None
        listed = [_JSON.decode(tool) if isinstance(tool, str) else tool for tool in listed or []]
    except (TypeError, ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise DataError(f"tools is {value!r:.80}, it must be a list or its JSON text")
    return listed


EMPTY_TOOLS = ("[]", "null")
"""Texts of no tools, in addition to the empty one."""


def declared_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a prompt's row that the chat template writes; [] if the column has something else for the
    environment, such as names."""
    try:
        return read_tools(value)
    except DataError:
        return []


def flag_of(holder: Mapping[str, Any], where: str) -> bool | None:
    """Return whether a message or a row is trained, by its keys of :data:`FLAGS`; None if it has none.

    ``where`` begins the messages. Raises DataError for other values than 0, 1, false and true, for keys that
    contradict each other, and for keys of :data:`TOKEN_MASKS`; of a row, for those that hold a list.
    """
    chosen: dict[str, bool] = {}
    for name in holder:
        value = holder[name]
        if value is None or name not in _SELECTING:
            continue
        if name in TOKEN_MASKS and not where and not isinstance(value, list):
            continue  # a column of another meaning: it is named as one that nothing reads
        if name in TOKEN_MASKS:
            fix = "only whole messages are left out of training, by weight=0"
            raise DataError(f"{where}{name} is {value!r:.40}, which cannot be obeyed: {fix}")
        if not isinstance(value, int | float) or value not in (0, 1):
            fix = "only 0, 1, false and true are"
            raise DataError(f"{where}{name} is {value!r:.40}, which cannot be obeyed: {fix}")
        chosen[name] = bool(value)
    if len(set(chosen.values())) > 1:
        raise DataError(f"{where}{' and '.join(chosen)} contradict each other: keep one of them")
    return next(iter(chosen.values()), None)


_SELECTING = frozenset((*FLAGS, *TOKEN_MASKS))


def trained_messages(messages: Sequence[Mapping[str, Any]], start: int = 0, *, last: bool = False) -> list[bool]:
    """Return for each message whether it is trained: those of the assistant from the message ``start`` on, or only the
    ``last`` message, without those that a flag leaves out.

    Raises DataError for a flag that cannot be obeyed, also if it would train what another role says.
    """
    first = len(messages) - 1 if last else start
    trained = []
    for number, message in enumerate(messages):
        answer = message["role"] == "assistant"
        flag = None if len(message) == 2 else flag_of(message, f"message {number}: ")
        if flag and not answer:
            name = next(name for name in FLAGS if message.get(name))
            raise DataError(
                f"message {number}: {name} is {message[name]!r}, but a message of the role {message['role']!r} is not"
                " trained: remove it"
            )
        trained.append(answer and number >= first and flag is not False)
    return trained


def is_finite_number(value: Any) -> bool:
    """Return whether a value is a finite number in the range of float64, and no bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False
