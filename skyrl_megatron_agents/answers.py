"""The wires of clients: what an answer said, as the client got it, and errors in the form that its library expects.

There are three: OpenAI's chat completions and completions, OpenAI's Responses, and Anthropic's Messages. Answers are
written by vLLM (``inference/vllm/wire_app.py``). :func:`messages_of` reads them as the client does, streamed or not,
so that the history that the client sends next is compared with what it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_of(path: str, content_type: str, body: bytes) -> list[dict[str, Any]]:
    """Return the message of each choice of an answer, in OpenAI's chat format; a text for ``/v1/completions`` is the
    ``content``. Raises ValueError for an answer without one."""
    streamed = content_type.startswith("text/event-stream")
    if path == MESSAGES:
        return [_of_blocks(_streamed_blocks(body) if streamed else json.loads(body)["content"])]
    if path == RESPONSES:
        return [_of_items((_last_response(body) if streamed else json.loads(body))["output"])]
    if streamed:
        return _streamed_choices(body)
    choices = sorted(json.loads(body)["choices"], key=lambda choice: choice["index"])
    return [
        choice["message"] if path == CHAT else {"role": "assistant", "content": choice["text"]} for choice in choices
    ]


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the data of the events of a stream. Raises ValueError if one is an error."""
    for line in body.decode().split("\n"):
        if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
            event = json.loads(text)
            if isinstance(event, dict) and (event.get("error") or event.get("type") == "error"):
                raise ValueError(f"the stream ends with an error: {event}")
            yield event


def _streamed_choices(body: bytes) -> list[dict[str, Any]]:
    made: dict[int, dict[str, Any]] = {}
    for event in events(body):
        for choice in event.get("choices") or ():
            message = made.setdefault(choice["index"], {"role": "assistant", "content": "", "tool_calls": []})
            if "text" in choice:
                message["content"] += choice["text"] or ""
                continue
            delta = choice.get("delta") or {}
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                calls = message["tool_calls"]
                while len(calls) <= part["index"]:
                    calls.append({"function": {"name": "", "arguments": ""}})
                for name, value in (part.get("function") or {}).items():
                    calls[part["index"]]["function"][name] += value or ""
    if not made:
        raise ValueError("the stream has no choice")
    return [made[index] for index in sorted(made)]


def _streamed_blocks(body: bytes) -> list[dict[str, Any]]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events(body):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["text"] = block.get("text", "") + (delta.get("text") or "")
            block["json"] += delta.get("partial_json") or ""
    for block in blocks.values():
        if block["json"]:
            block["input"] = json.loads(block["json"])
    return [blocks[index] for index in sorted(blocks)]


def _last_response(body: bytes) -> dict[str, Any]:
    for event in events(body):
        if event.get("type") in ("response.completed", "response.incomplete"):
            response: dict[str, Any] = event["response"]
            return response
    raise ValueError("the stream has no complete response")


def _of_blocks(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(block.get("text") or "" for block in blocks if block["type"] == "text")
    calls = [_call(block["name"], block.get("input")) for block in blocks if block["type"] == "tool_use"]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _of_items(items: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [
        part.get("text") or "" for item in items if item["type"] == "message" for part in item.get("content") or ()
    ]
    calls = [_call(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return {"role": "assistant", "content": "".join(texts), "tool_calls": calls}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def error_content(path: str, status: int, message: str, *, param: str | None = None, code: str | None = None) -> Any:
    """Return the body of an error in the form of the wire that ``path`` belongs to."""
    if path.startswith(MESSAGES):
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def message_of_error(body: bytes) -> tuple[str, str | None]:
    """Return (message, parameter) of an error that vLLM answered with."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500], None
    if not isinstance(error, Mapping):
        return str(error), None
    return str(error.get("message")), error.get("param")
