"""The calls of a trajectory as a graph, and which sampled tokens a new request continues.

A client sends its whole history with each request, as messages. A :class:`SampledCall` is one answer that an engine
sampled: the tokens of its prompt and those that were sampled. A request whose messages begin with those of an earlier
call and its answer continues that call: it is a child of it. A request that does not is a root, or a fork where it
branches off an earlier path. Compaction, edited history, a subagent and a second sample of one prompt are forks.

Messages are compared by a canonical form (:func:`canonical`), because clients do not return an answer as they got it:
they drop or reformat its thinking, reorder the keys of JSON, reformat the arguments of tools, and give tool calls
other ids. None of that changes the form. Text is compared exactly, except for white space around an answer.

Programs also ask for titles, summaries and memories. These requests have a system prompt of their own and quote what
was said under another one: they are another :class:`Conversation`, and what they quote is not an answer in it. Nor is
the answer of such a request, a summary for instance, that the client puts into the conversation of the task.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
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
    conversation: int = 0
    """Number of its :class:`Conversation`."""
    text: bytes = b""
    """Digest of the answer's text with its thinking, which the canonical form leaves out."""

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


@dataclass(slots=True)
class Conversation:
    """The calls of a trajectory whose system prompts are alike: the same one, or one with another date in it."""

    number: int
    system: str
    """The first of its system prompts."""
    tools: int = 0
    """The most tools that a request had."""
    answered: bool = False
    """Whether it has a sampled call."""
    quoted: set[str] = field(default_factory=set)
    """Digests of answers that the client sent before anything was sampled in it, such as examples, or those of another
    conversation: no path holds them."""
    _triples: frozenset[tuple[str, ...]] = frozenset()

    def is_like(self, triples: frozenset[tuple[str, ...]]) -> bool:
        """Return whether a system prompt has half of the words in common with that of the conversation, in threes."""
        self._triples = self._triples or _word_triples(self.system)
        return 2 * len(self._triples & triples) >= max(len(self._triples), len(triples))


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
    conversation: Conversation | None = None


@dataclass(slots=True)
class Graph:
    """The calls of one trajectory, in the order in which they were answered."""

    calls: list[SampledCall] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    _ends: dict[bytes, list[SampledCall]] = field(default_factory=dict)
    _systems: dict[bytes, Conversation] = field(default_factory=dict)
    _texts: dict[bytes, set[int]] = field(default_factory=dict)
    """Numbers of the conversations in which an answer had a text, by :attr:`SampledCall.text`."""

    def match(self, messages: Sequence[ChatMessage], scope: Any = None) -> Match:
        """Return the longest path that the request's messages begin with.

        ``scope``: what else the prompt depends on, such as tools and arguments of the template, as JSON values. A path
        of another scope does not match.
        """
        conversation = self.conversation_of(_system_of(messages))
        tools = scope.get("tools") if isinstance(scope, Mapping) else None
        conversation.tools = max(conversation.tools, len(tools or ()))
        digest = _digest(b"", scope)
        parent, first, used, unmatched = None, 0, 0, None
        before, answers = 0, 0
        said: list[str] = []
        for form, text, after in grouped(messages):
            digest = _digest(digest, form)
            said.append(_as_json(form))
            if form["role"] == "assistant":
                answers += 1
                if digest in self._ends:
                    parent, first, used, unmatched = self._end(digest, text), before, after, None
                    said.clear()
                elif not conversation.answered:
                    conversation.quoted.add(_short(said[-1]))
                elif unmatched is None and _short(said[-1]) not in conversation.quoted:
                    replaces = answers == 1 and not form["calls"] and self._said_elsewhere(text, conversation)
                    unmatched = None if replaces else after - 1
            before = after
        return Match(parent, first, used, digest, unmatched, tuple(said), conversation)

    def _said_elsewhere(self, text: str, conversation: Conversation) -> bool:
        """Return whether a text is that of an answer of another conversation. At the place of a request's first answer
        it is a summary by which the client replaces the history; later it may repeat history that was sampled."""
        return bool(text) and bool(self._texts.get(_digest(b"", text), set()) - {conversation.number})

    def _end(self, digest: bytes, text: str) -> SampledCall:
        """Return the call with an answer of this canonical form: the one with the same thinking, or the last."""
        calls = self._ends[digest]
        if len(calls) == 1:
            return calls[0]
        whole = _digest(b"", text)
        return next((call for call in reversed(calls) if call.text == whole), calls[-1])

    def conversation_of(self, system: str) -> Conversation:
        """Return the conversation of a system prompt, which may be a new one."""
        digest = _digest(b"", system)
        conversation = self._systems.get(digest)
        if conversation is None:
            triples = _word_triples(system)
            conversation = next(
                (conversation for conversation in self.conversations if conversation.is_like(triples)), None
            )
            if conversation is None and len(self.conversations) >= MOST_CONVERSATIONS:
                conversation = self.conversations[-1]
            if conversation is None:
                conversation = Conversation(len(self.conversations), system)
                self.conversations.append(conversation)
            if len(self._systems) < MOST_SYSTEMS:
                self._systems[digest] = conversation
        return conversation

    def continued(self, tokens: list[int]) -> SampledCall | None:
        """Return the call with the longest prompt and answer that ``tokens`` begin with."""
        longest: SampledCall | None = None
        ends: dict[int, int] = {}
        for call in self.calls:
            start = 0 if call.parent is None else ends.get(call.parent.number)
            if start is None:
                continue
            added = [*call.rest.tolist(), *call.generation.token_ids]
            if tokens[start : start + len(added)] == added:
                ends[call.number] = start + len(added)
                if longest is None or ends[call.number] > ends[longest.number]:
                    longest = call
        return longest

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
        sent = match.said[common] if common < len(match.said) else ""
        recorded = nearest.said[common]
        at = max(_common(sent, recorded) - SHOWN // 4, 0)
        dots = "…" if at else ""
        return (
            f"the client sends {dots}{sent[at : at + SHOWN]} where call {nearest.number} has"
            f" {dots}{recorded[at : at + SHOWN]}"
        )

    def add(
        self, match: Match, rest: Sequence[int], generation: Generation, answer: ChatMessage | None
    ) -> SampledCall:
        """Add the call that answered a request. ``rest``: the tokens of its prompt after those of ``match.parent``.
        ``answer``: the message that the client got; None: it is no message, and nothing can continue it."""
        end = b"" if answer is None else _digest(match.digest, canonical(answer))
        text = b"" if answer is None else _digest(b"", _text_of(answer.get("content")).strip())
        text_only = match.unmatched is not None
        tokens = np.asarray(rest, np.int32)
        said = () if answer is None or not match.said else (*match.said, _as_json(canonical(answer)))
        conversation = match.conversation or self.conversation_of("")
        return self.restore(
            SampledCall(
                len(self.calls), match.parent, tokens, generation, end, text_only, said, conversation.number, text
            )
        )

    def restore(self, call: SampledCall) -> SampledCall:
        """Add a call as it was. Its number is the next one."""
        assert call.number == len(self.calls), f"call {call.number} is added after {len(self.calls)} calls"
        self.calls.append(call)
        while len(self.conversations) <= call.conversation:
            self.conversations.append(Conversation(len(self.conversations), ""))
        self.conversations[call.conversation].answered = True
        if call.end:
            self._ends.setdefault(call.end, []).append(call)
            self._texts.setdefault(call.text, set()).add(call.conversation)
        return call

    def restore_conversation(self, number: int, system: str, tools: int, quoted: Sequence[str]) -> None:
        """Give a conversation of restored calls what was known of it."""
        conversation = self.conversations[number]
        conversation.system, conversation.tools, conversation.quoted = system, tools, set(quoted)
        conversation._triples = _word_triples(system)
        self._systems[_digest(b"", system)] = conversation

    def leaves(self) -> list[SampledCall]:
        """Return the calls that no other call continues, in order."""
        continued = {id(call.parent) for call in self.calls}
        return [call for call in self.calls if id(call) not in continued]

    def forks(self) -> int:
        """Return the number of paths besides the first."""
        return max(len(self.leaves()) - 1, 0)


SHOWN = 400
"""Characters of a differing message that are shown."""


MOST_CONVERSATIONS, MOST_SYSTEMS = 64, 4096
COMPARED = 1 << 15
"""Characters of a system prompt that are kept and compared."""


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many first parts are equal."""
    length = min(len(one), len(other))
    return bisect_left(range(length), True, key=lambda place: one[: place + 1] != other[: place + 1])


def _word_triples(text: str) -> frozenset[tuple[str, ...]]:
    """Return what two texts are compared by: every three words that follow each other."""
    words = text.split()
    return frozenset(zip(words, words[1:], words[2:], strict=False)) or frozenset([tuple(words)])


def _system_of(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the first messages that are the system's."""
    texts = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        texts.append(_text_of(message.get("content")))
    return "\n".join(texts)[:COMPARED]


def canonical(message: ChatMessage) -> dict[str, Any]:
    """Return the form of a message in which two messages are the same if a client may have made one of the other.

    It has the role, the text, and of an answer the names and arguments of its tool calls in order. Thinking, also as a
    part of the text, ids and the order of keys do not count. Raises no error: what it does not know is compared as
    JSON.
    """
    role = str(message.get("role"))
    text = _text_of(message.get("content"))
    if role != "assistant":
        return {"role": role, "text": text}
    calls = [_tool_call(call) for call in message.get("tool_calls") or ()]
    return {"role": role, "text": without_thinking(text), "calls": calls}


_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning|seed:think)>.*?</\1>|◁think▷.*?◁/think▷", re.DOTALL)
_ENDS_THOUGHT = re.compile(r"</(?:think|thinking|thought|reasoning|seed:think)>|◁/think▷")


def without_thinking(text: str) -> str:
    """Return the text of an answer without the thinking in it, and without white space around. The template may have
    opened the thinking, so what is before an end without a beginning is thinking, too."""
    if "</" not in text and "◁/" not in text:
        return text.strip()
    text = _THOUGHT.sub("", text)
    *_, last = _ENDS_THOUGHT.split(text)
    return last.strip()


def grouped(messages: Sequence[ChatMessage]) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield (canonical form, text of an answer with its thinking, number of messages up to its end). Adjacent messages
    of the assistant are one, because the Responses API makes one item of each part of an answer."""
    texts: list[str] = []
    calls: list[Any] = []
    answering = False

    def answer() -> tuple[dict[str, Any], str]:
        whole = "".join(texts) if len(texts) > 1 else texts[0].strip()
        made = {"role": "assistant", "text": without_thinking(whole), "calls": list(calls)}
        texts.clear()
        calls.clear()
        return made, whole.strip()

    for index, message in enumerate(messages):
        if str(message.get("role")) == "assistant":
            texts.append(_text_of(message.get("content")).strip())
            calls += [_tool_call(call) for call in message.get("tool_calls") or ()]
            answering = True
            continue
        if answering:
            yield *answer(), index
            answering = False
        yield canonical(message), "", index + 1
    if answering:
        yield *answer(), len(messages)


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


def _short(said: str) -> str:
    return _digest(b"", said).hex()


def _digest(before: bytes, value: Any) -> bytes:
    text = _as_json(value).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16, key=before).digest()
