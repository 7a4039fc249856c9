"""The calls of a trajectory as a graph, and which sampled tokens a new request continues.

A client sends its whole history with each request, as messages. A :class:`SampledCall` is one answer that an engine
sampled: the tokens of its prompt and those that were sampled. A request whose messages begin with those of an earlier
call and its answer continues that call: it is a child of it. A request that does not is a root, or a fork where it
branches off an earlier path. Compaction, edited history, a subagent and a second sample of one prompt are forks.

Messages are compared by a canonical form (:func:`canonical`), because clients do not return an answer as they got it:
they drop its thinking, reorder the keys of JSON, reformat the arguments of tools, and give tool calls other ids. None
of that changes the form. Text is compared exactly, except for white space around an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_megatron.inference.protocol import Generation

type ChatMessage = Mapping[str, Any]
"""A message of OpenAI's chat format."""


@dataclass(eq=False)
class SampledCall:
    """One sampled answer."""

    number: int
    """Its position among the calls of the trajectory."""
    parent: SampledCall | None
    """The call that it continues: its prompt begins with that call's :attr:`ids`."""
    rest: np.ndarray
    """[n] int32: the tokens of its prompt after those of the parent."""
    generation: Generation
    end: bytes = b""
    """Digest of the messages up to and with the answer; b"" if no request can continue it."""
    text_only: bool = False
    """Whether the prompt has answers of the policy as text that match no path, so that they are not its tokens."""
    said: tuple[str, ...] = ()
    """Canonical messages after those of the parent, up to and with the answer, as JSON; () if they are not known."""

    start: int = field(init=False)
    """Number of tokens of its prompt."""

    def __post_init__(self) -> None:
        before = 0 if self.parent is None else self.parent.start + len(self.parent.generation.token_ids)
        self.start = before + len(self.rest)

    @property
    def ids(self) -> list[int]:
        """Prompt and sampled tokens."""
        return [token for call in self.path() for token in (*call.rest.tolist(), *call.generation.token_ids)]

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens of the prompt."""
        return self.ids[: self.start]

    def path(self) -> list[SampledCall]:
        """Return the calls from the root to this one."""
        calls: list[SampledCall] = []
        call: SampledCall | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """What a request continues."""

    parent: SampledCall | None
    """The call at the end of the longest path that the request begins with; None: there is none."""
    first: int
    """Index of the first message of the answer at the end of that path."""
    used: int
    """Number of its messages that the path holds."""
    digest: bytes
    """Digest of all its messages."""
    unmatched: int | None
    """Index of the first answer in the request that no path holds; None if there is none."""
    said: tuple[str, ...] = ()
    """Its canonical messages after those of the path, as JSON."""


@dataclass(slots=True)
class Graph:
    """The calls of one trajectory, in the order in which they were answered."""

    calls: list[SampledCall] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)
    """Answers that the client wrote itself before anything was sampled, such as examples: no path holds them."""
    _ends: dict[bytes, SampledCall] = field(default_factory=dict)

    def match(self, messages: Sequence[ChatMessage], scope: Any = None) -> Match:
        """Return the longest path that the request's messages begin with.

        ``scope``: what else the prompt depends on, such as tools and arguments of the template, as JSON values. A path
        of another scope does not match.
        """
        digest = _digest(b"", scope)
        parent, first, used, unmatched = None, 0, 0, None
        before = 0
        said: list[str] = []
        for form, after in grouped(messages):
            digest = _digest(digest, form)
            said.append(_as_json(form))
            if form["role"] == "assistant":
                if (found := self._ends.get(digest)) is not None:
                    parent, first, used, unmatched = found, before, after, None
                    said.clear()
                elif not self.calls:
                    self.foreign.add(said[-1])
                elif unmatched is None and said[-1] not in self.foreign:
                    unmatched = after - 1
            before = after
        return Match(parent, first, used, digest, unmatched, tuple(said))

    def difference(self, match: Match) -> str:
        """Return where a request with an unmatched answer first differs from the path that it is most like."""
        nearest, common = None, 0
        for call in self.calls:
            if call.parent is match.parent and call.said:
                same = _common(call.said, match.said)
                if nearest is None or same >= common:
                    nearest, common = call, same
        if nearest is None:
            return f"the client sends an answer that was not sampled: {match.said[0][:SHOWN]}"
        if common == len(nearest.said):
            return f"its tools or its arguments of the template are not those of call {nearest.number}"
        theirs = match.said[common] if common < len(match.said) else ""
        ours = nearest.said[common]
        at = max(_common(theirs, ours) - SHOWN // 4, 0)
        dots = "…" if at else ""
        return (
            f"the client sends {dots}{theirs[at : at + SHOWN]} where call {nearest.number} has"
            f" {dots}{ours[at : at + SHOWN]}"
        )

    def add(
        self, match: Match, rest: Sequence[int], generation: Generation, answer: ChatMessage | None
    ) -> SampledCall:
        """Add the call that answered a request. ``rest``: the tokens of its prompt after those of ``match.parent``.
        ``answer``: the message that the client got; None: it is no message, and nothing can continue it."""
        end = b"" if answer is None else _digest(match.digest, canonical(answer))
        text_only = match.unmatched is not None
        tokens = np.asarray(rest, np.int32)
        said = () if answer is None or not match.said else (*match.said, _as_json(canonical(answer)))
        return self.restore(SampledCall(len(self.calls), match.parent, tokens, generation, end, text_only, said))

    def restore(self, call: SampledCall) -> SampledCall:
        """Add a call as it was. Its number is the next one."""
        assert call.number == len(self.calls), f"call {call.number} is added after {len(self.calls)} calls"
        self.calls.append(call)
        if call.end:
            self._ends[call.end] = call
        return call

    def leaves(self) -> list[SampledCall]:
        """Return the calls that no other call continues, in order."""
        continued = {id(call.parent) for call in self.calls}
        return [call for call in self.calls if id(call) not in continued]

    def forks(self) -> int:
        """Return the number of paths besides the first."""
        return max(len(self.leaves()) - 1, 0)


SHOWN = 400
"""Characters of a differing message that are shown."""


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many first parts are equal."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def canonical(message: ChatMessage) -> dict[str, Any]:
    """Return the form of a message in which two messages are the same if a client may have made one of the other.

    It has the role, the text, and of an answer the names and arguments of its tool calls in order. Thinking, ids and
    the order of keys do not count. Raises no error: what it does not know is compared as JSON.
    """
    role = str(message.get("role"))
    text = _text_of(message.get("content"))
    if role != "assistant":
        return {"role": role, "text": text}
    calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
    return {"role": role, "text": text.strip(), "calls": calls}


def grouped(messages: Sequence[ChatMessage]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (canonical form, number of messages up to its end). Adjacent messages of the assistant are one, because
    the Responses API makes one item of each part of an answer."""
    pending: dict[str, Any] | None = None
    for place, message in enumerate(messages):
        form = canonical(message)
        if form["role"] == "assistant":
            if pending is None:
                pending = form
            else:
                text = "".join([pending["text"], form["text"]])
                pending = {"role": "assistant", "text": text, "calls": [*pending["calls"], *form["calls"]]}
            continue
        if pending is not None:
            yield pending, place
            pending = None
        yield form, place + 1
    if pending is not None:
        yield pending, len(messages)


def _text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or parts of which some may be no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_text_of_part(part) for part in content)
    return _as_json(content)


_THINKING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if part.get("type") in _THINKING:
            return ""
        if isinstance(part.get("text"), str):
            return str(part["text"])
    return _as_json(part)


def _tool_call(call: Any) -> list[str]:
    """Return (name, arguments) of a tool call."""
    function = call.get("function") or call
    return [str(function.get("name")), _arguments(function.get("arguments"))]


def _arguments(given: Any) -> str:
    if not isinstance(given, str):
        return _as_json(given or {})
    try:
        return _as_json(json.loads(given) if given.strip() else {})
    except ValueError:
        return given.strip()


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _digest(before: bytes, value: Any) -> bytes:
    text = _as_json(value).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16, key=before).digest()
