"""Rows of other tools as rows of chat messages: the values of ``sft.format``, ``dpo.format`` and ``reward.format``.

A converter gets a row and the columns with messages of the command, of which the first is the conversation or the
prompt. Keys of a turn that it does not convert, such as flags, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_megatron.data.messages import from_json, read_tools
from skyrl_megatron.data.row_files import DatasetRow
from skyrl_megatron.errors import DataError

MESSAGES_FORMAT = "messages"
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""``from`` of a ShareGPT turn → role."""


SOURCES = {
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
"""Format → the columns that have its messages."""


def in_messages(row: Mapping[str, Any], form: str, columns: Sequence[str]) -> DatasetRow:
    """Return a row in the format ``form`` with chat messages in ``columns``. Raises DataError, also for a row that has
    its messages in two columns."""
    twice = [name for name in SOURCES.get(form, ()) if name not in columns and row.get(name) is not None]
    if twice and len(columns) == 1 and row.get(columns[0]) is not None:
        raise DataError(f"the messages are given twice, in {columns[0]} and in {twice[0]}: remove one of the columns")
    return dict(row) if form == MESSAGES_FORMAT else CONVERTERS[form](dict(row), columns)


def format_of(row: Mapping[str, Any]) -> str | None:
    """Return the format that a row without the columns of messages seems to have; None if it is none of them."""
    if "conversations" in row:
        return "sharegpt"
    if "instruction" in row:
        return "alpaca"
    return "prompt_completion" if "prompt" in row and ("completion" in row or "chosen" in row) else None


def format_of_messages(messages: Any) -> str | None:
    """Return the format that messages seem to have which are no valid chat messages; None if it is none of them."""
    given = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    if any("from" in message and "value" in message for message in given):
        return "sharegpt"
    if any(message.get("role") == "function" or message.get("function_call") for message in given):
        return "openai_functions"
    parts = [part for message in given if isinstance(message.get("content"), list) for part in message["content"]]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    return "anthropic" if kinds & {"tool_use", "tool_result", "thinking"} else None


def _sharegpt(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    first = "conversations" if "conversations" in row else columns[0]
    turns = {name: row.pop(name, None) for name in (first, *columns[1:])}
    for name, column in zip(turns, columns, strict=True):
        listed = [turns[name]] if isinstance(turns[name], dict) else turns[name]
        row[column] = [_turn(turn) for turn in listed] if isinstance(listed, list) else listed
    if tools := read_tools(row.get("tools")):  # bare functions, which templates expect in OpenAI's form
        row["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return _with_system(row, columns)


def _turn(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    kept = {key: value for key, value in turn.items() if key not in ("from", "value")}
    speaker, said = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(f"a turn is from {speaker!r:.40}, but only {', '.join(SPEAKERS)} are known")
    if speaker == "function_call":
        calls = from_json(said, "the value of a function_call") if isinstance(said, str) else said
        called = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
        return {**kept, "role": "assistant", "content": None, "tool_calls": called}
    return {**kept, "role": SPEAKERS[speaker], "content": said}


def _with_system(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    system = row.pop("system", None)
    if system and isinstance(row.get(columns[0]), list):
        row[columns[0]] = [{"role": "system", "content": system}, *row[columns[0]]]
    return row


def _alpaca(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    question = [row.pop("instruction", None), row.pop("input", None)]
    if wrong := [part for part in question if not isinstance(part, str | None)]:
        raise DataError(f"instruction or input is {wrong[0]!r:.80}, it must be text")
    if not any(question):
        raise DataError("no instruction and no input: the question is empty; fill one of them, or remove the row")
    messages = []
    for pair in row.pop("history", None) or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"history holds {pair!r:.80}, it must hold pairs of instruction and answer")
        messages += [_said("user", pair[0]), _said("assistant", pair[1])]
    messages.append(_said("user", "\n".join(part for part in question if part)))
    if len(columns) == 1:
        messages.append(_said("assistant", row.pop("output", None)))
    row[columns[0]] = messages
    for name in columns[1:]:
        row[name] = _answer(row.get(name))
    return _with_system(row, columns)


def _prompt_completion(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    prompt = row.pop("prompt", None)
    asked = [_said("user", prompt)] if isinstance(prompt, str) else prompt
    if len(columns) > 1:
        return row | {columns[0]: asked} | {name: _answer(row.get(name)) for name in columns[1:]}
    answer = _answer(row.pop("completion", None))
    if not isinstance(asked, list) or not isinstance(answer, list):
        raise DataError("prompt and completion must both be text or chat messages")
    not_trained = [
        {**turn, "train": False} if isinstance(turn, dict) and turn.get("role") == "assistant" else turn
        for turn in asked
    ]
    return row | {columns[0]: [*not_trained, *answer]}


def _anthropic(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    for name in columns:
        if isinstance(row.get(name), list):
            row[name] = [message for turn in row[name] for message in _from_blocks(turn)]
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = from_json(tools, "tools")
    if isinstance(tools, list):
        row["tools"] = [_tool(tool) for tool in tools]
    if isinstance(system := row.get("system"), list):
        row["system"] = "\n".join(str(block.get("text", "")) for block in system if isinstance(block, dict))
    return _with_system(row, columns)


def _from_blocks(turn: Any) -> list[Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), list):
        return [turn]
    texts: list[Any] = []
    thinking, calls, results = [], [], []
    for block in turn["content"]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            if block.get("is_error"):
                raise DataError(
                    "a tool_result has is_error=true, which chat templates do not write: say it in its content"
                )
            result = block.get("content")
            content = "" if result is None else result
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "thinking":
            thinking.append(str(block.get("thinking") or ""))
        else:
            texts.append(block)
    message = {**turn, "content": texts or None}
    if calls:
        message["tool_calls"] = calls
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    return [*results, *([message] if texts or calls or not results else [])]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        return tool
    rest = {key: value for key, value in tool.items() if key != "input_schema"}
    return {"type": "function", "function": {**rest, "parameters": tool["input_schema"]}}


def _openai_functions(row: DatasetRow, columns: Sequence[str]) -> DatasetRow:
    for name in columns:
        if isinstance(row.get(name), list):
            row[name] = [_without_function(message) for message in row[name]]
    functions = row.pop("functions", None)
    if isinstance(functions, str):
        functions = from_json(functions, "functions") if functions.strip() else None
    if isinstance(functions, list):
        row["tools"] = [{"type": "function", "function": function} for function in functions]
    elif functions is not None:
        raise DataError(f"functions is {functions!r:.80}, it must be a list or its JSON text")
    return row


def _without_function(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {key: value for key, value in message.items() if key != "function_call"}
    if kept.get("role") == "function":
        kept["role"] = "tool"
    if call := message.get("function_call"):
        kept["tool_calls"] = [{"type": "function", "function": call}]
    return kept


def _said(role: str, content: Any) -> DatasetRow:
    return {"role": role, "content": content}


def _answer(given: Any) -> Any:
    """Return the messages of an answer that is text, one message, or a list of messages."""
    if isinstance(given, str):
        return [_said("assistant", given)]
    return [given] if isinstance(given, Mapping) else given


CONVERTERS: dict[str, Callable[[DatasetRow, Sequence[str]], DatasetRow]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "anthropic": _anthropic,
    "openai_functions": _openai_functions,
}
