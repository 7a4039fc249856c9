"""What a request of an agent may be, found before anything of it is converted.

All agents of a run share the gateway's process. vLLM's serving code takes seconds for 100,000 messages, so the bounds
follow from the context's length: what could never fit into a prompt is refused at once. A request is also made what
the client means: a field that is null is absent, and no limit of tokens is above the context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron_agents.http_endpoint import MAX_BODY_BYTES

LIMITS_OF_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
BYTES_OF_TOOLS, BYTES_OF_A_TOKEN = 256 << 10, 16
"""Of a body. The latter is more than tokens of text have on average, also where JSON escapes each character."""
MOST_MESSAGES, MOST_ITEMS, MOST_TOOLS = 8192, 4096, 1024
MOST_CHOICES, MOST_STOPS, MOST_BIASES = 128, 256, 1024
MOST_IDS = 1 << 16
"""Entries of ``allowed_token_ids``."""
FORMS, MOST_FORM_BYTES = ("response_format", "structured_outputs", "text", "output_config"), 128 << 10
"""Fields with a schema or a grammar, which engines compile."""
WIDE_BYTES, WIDE_VALUES = 256 << 10, 2000
"""From these sizes on, a request is converted in another thread."""
THE_RUNS = ("kv_transfer_params", "use_beam_search")
"""Fields that would replace the prompt or the sampling of the run."""


class RefusedRequest(RequestError):
    """A request outside of the bounds. ``field``: the one that it is refused for. ``too_long``: whether it is, because
    its prompt could not fit into the context."""

    def __init__(self, message: str, field: str | None = None, *, too_long: bool = False) -> None:
        self.field, self.too_long = field, too_long
        super().__init__(f"{field}: {message}" if field else message)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request within the bounds."""

    fields: dict[str, Any]
    """As the client sent it."""
    body: bytes
    """JSON of what is passed on."""
    values: int
    """Its JSON values."""

    @property
    def samples(self) -> int:
        """Answers that it wants."""
        count = self.fields.get("n")
        return count if type(count) is int else 1

    @property
    def wide(self) -> bool:
        """Whether converting it takes long."""
        return len(self.body) > WIDE_BYTES or self.values > WIDE_VALUES


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The bounds of a model whose prompt and answer have ``context`` tokens together."""

    context: int

    @property
    def body_bytes(self) -> int:
        """Bytes of a body."""
        return min(MAX_BODY_BYTES, BYTES_OF_TOOLS + BYTES_OF_A_TOKEN * self.context)

    def messages(self, name: str = "messages") -> int:
        """Messages or items with their parts. A template writes four tokens or more for each."""
        most = MOST_ITEMS if name == "input" else MOST_MESSAGES
        return min(max(most, self.context // 64), 16 + self.context // 2)

    @property
    def tools(self) -> int:
        """Tools, of which each has a name and a schema in the prompt."""
        return min(MOST_TOOLS, 16 + self.context // 8)

    @property
    def values(self) -> int:
        """JSON values of a request."""
        return 50_000 + 2 * self.context

    def check(self, body: bytes) -> CheckedRequest:
        """Return a request. Raises RefusedRequest for one that is not a JSON object or not within the bounds."""
        try:
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise ValueError(f"it is {type(fields).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"the body is not a JSON object: {error}") from error
        count = _count(fields, self.values)
        if count > self.values:
            raise RefusedRequest(f"the body has more than {self.values} values")
        self._check_lists(fields)
        passed = self._meant(fields)
        return CheckedRequest(fields, body if passed == fields else json.dumps(passed).encode(), count)

    def _check_lists(self, fields: Mapping[str, Any]) -> None:
        """Raise RefusedRequest for a field with too many entries, and for one that is the run's."""
        for name in THE_RUNS:
            if fields.get(name):
                raise RefusedRequest("leave it out, prompt and sampling are the run's", name)
        for name in ("messages", "input", "system"):
            if isinstance(entries := fields.get(name), list):
                count = _objects(entries)
                self._require(name, count, self.messages(name), "messages and parts", too_long=True)
        if isinstance(prompt := fields.get("prompt"), list):
            self._require("prompt", len(prompt), self.context, "tokens: the maximum context length", too_long=True)
        bounds = dict.fromkeys(("stop", "stop_sequences", "stop_token_ids", "bad_words"), MOST_STOPS)
        bounds |= {"tools": self.tools, "logit_bias": MOST_BIASES, "allowed_token_ids": MOST_IDS}
        for name, most in bounds.items():
            if isinstance(listed := fields.get(name), list | dict):
                self._require(name, len(listed), most, "entries")
        for name in ("n", "best_of"):
            if type(wanted := fields.get(name)) is int:
                self._require(name, wanted, MOST_CHOICES, "samples")
        for name in FORMS:
            if isinstance(form := fields.get(name), dict):
                self._require(name, len(json.dumps(form)), MOST_FORM_BYTES, "bytes")
        if not isinstance(fields.get("structured_outputs"), dict | None):  # vLLM fails on it
            raise RefusedRequest("it must be an object", "structured_outputs")

    @staticmethod
    def _require(name: str, count: int, most: int, what: str, *, too_long: bool = False) -> None:
        if count > most:
            raise RefusedRequest(f"it has {count} {what}, and may have {most}", name, too_long=too_long)

    def _meant(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that are passed on."""
        passed = {name: value for name, value in fields.items() if value is not None}
        for name in LIMITS_OF_TOKENS:
            if type(limit := passed.get(name)) is int and limit > self.context:
                passed[name] = self.context
        thinking, limit = passed.get("thinking"), passed.get("max_tokens")
        budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
        if (
            limit != fields.get("max_tokens") and type(budget) is int and budget >= self.context
        ):  # Anthropic's API wants less
            passed["thinking"] = {"type": "adaptive"}
        return passed


def _objects(entries: list[Any]) -> int:
    """Return the number of objects in a list, in each other or not: messages, parts, tool calls."""
    count, todo = 0, list(entries)
    while todo:
        entry = todo.pop()
        if isinstance(entry, dict):
            count += 1
            todo += [value for value in entry.values() if isinstance(value, list | dict)]
        elif isinstance(entry, list):
            todo += [value for value in entry if isinstance(value, list | dict)]
    return count


def _count(value: Any, most: int) -> int:
    """Return the number of values in a JSON value; any number above ``most`` if it has more."""
    count, todo = 0, [value]
    while todo and count <= most:
        entry = todo.pop()
        count += 1
        if isinstance(entry, dict):
            todo += entry.values()
        elif isinstance(entry, list):
            todo += entry
    return count
