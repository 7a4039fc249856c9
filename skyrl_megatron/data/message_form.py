"""What a chat template reads of messages and tool calls, found out by rendering: templates name the thinking of an
answer differently, want the arguments of a tool call as an object or as text, and leave out what they do not know.

Messages get the form in which vLLM's chat endpoint renders them (``vllm/renderers/chat_utils.py``): arguments are
objects, parts of text are joined, an empty list of tool calls is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

from skyrl_megatron.data.messages import FLAGS, THINKING, as_rendered, calls_of, part_text
from skyrl_megatron.data.tokenizer import render
from skyrl_megatron.errors import DataError

_SIGN, _OTHER_SIGN = "HEREstandsTHEprobe", "ANDhereANOTHER"
_QUESTION = {"role": "user", "content": "?"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {}}}  # Mistral: 9 letters
_PLAIN = {"role", "content"}
_STANDARD = {"role", "content", "tool_calls", *FLAGS}
_OF_CALLS = {"id", "type", "index", "function", "name", "arguments"}
_OF_RESULTS = {"name", "tool_call_id"}
_FLAGS = frozenset(FLAGS)
_BOTH = ({_SIGN: "v"}, f'{{"{_SIGN}": "v"}}')
"""Arguments of a call as an object, and as text."""


def unread_keys(call: Mapping[str, Any]) -> set[str]:
    """Return the keys of a tool call that no chat template reads."""
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    return {name for holder in (call, inner) for name in holder if holder[name] is not None} - _OF_CALLS


@dataclass(slots=True)
class Said:
    """What fitting messages found out."""

    unread: set[str] = field(default_factory=set)
    """Keys of messages that nothing reads."""
    notes: set[str] = field(default_factory=set)
    """What was changed or left out, as text."""


class MessageForm:
    """The form of messages for one chat template. ``template`` and ``kwargs``: as in
    :class:`~skyrl_megatron.rollout.templates.ChatFormat`.

    ``thinking``: what happens to thinking in a key that the template does not read: ``template`` (DataError),
    ``content`` (it is written into the content, between ``<think>`` and ``</think>``), ``drop``, or ``ignore`` (it
    counts as a key that nothing reads).
    """

    def __init__(
        self, tokenizer: Any, template: str | None, kwargs: Mapping[str, Any], *, thinking: str, section: str = ""
    ) -> None:
        self.tokenizer, self.template, self.kwargs = tokenizer, template, dict(kwargs)
        self.thinking, self.section = thinking, section
        self._thinking_key = lru_cache(maxsize=None)(self._find_thinking_key)
        self._writes_role = lru_cache(maxsize=None)(self._try_role)
        self._keeps_inline = lru_cache(maxsize=None)(self._try_inline)
        self._reads_key = lru_cache(maxsize=None)(self._try_key)

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"thinking": self.thinking, "section": self.section}
        return partial(MessageForm, **options), (self.tokenizer, self.template, self.kwargs)

    def fitted(self, messages: Sequence[Mapping[str, Any]], said: Said | None = None) -> list[dict[str, Any]]:
        """Return valid messages (:func:`~skyrl_megatron.data.messages.messages_problem`) as the template reads them,
        and add what that found out to ``said``.

        Raises DataError with the number of a message whose thinking, tool calls or role the template leaves out.
        """
        said = said or Said()
        return [
            message if self._is_plain(message) else self._fitted(messages, number, said)  # type: ignore[misc]
            for number, message in enumerate(messages)
        ]

    def _is_plain(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message has nothing to fit."""
        if message.keys() != _PLAIN or not isinstance(content := message["content"], str):
            return False
        role = message["role"]
        return self._writes_role(role) and not (role == "assistant" and "</think>" in content)

    def _fitted(self, messages: Sequence[Mapping[str, Any]], number: int, said: Said) -> dict[str, Any]:
        message = as_rendered(messages[number])
        role = message["role"]
        if not self._writes_role(role):
            raise DataError(
                f"message {number}: the chat template leaves out messages of the role {role!r}: remove the message, "
                "or set generator.chat_template"
            )
        for flag in message.keys() & _FLAGS:
            del message[flag]
        if isinstance(message["content"], list):
            parts = [part_text(part) for part in message["content"]]
            message["content"] = (self.part_separator if role != "tool" else "\n").join(parts)
        if role == "assistant":
            self._fit_calls(message, number, said)
            self._fit_thinking(message, number, messages[number - 1]["role"] if number else "", said)
            if message["content"] is None:
                message["content"] = self.empty_content
        for key in message.keys() - _STANDARD:
            if not (role == "tool" and key in _OF_RESULTS) and not self._reads_key(role, key):
                said.unread.add(key)
        return message

    # ------------------------------------------------------------------------------------------------ tool calls
    def _fit_calls(self, message: dict[str, Any], number: int, said: Said) -> None:
        if "tool_calls" not in message:
            return
        if not message["tool_calls"]:
            del message["tool_calls"]  # templates ask whether there is such a key
            return
        if not self.writes_calls and self.thinking == "ignore":
            said.notes.add("the chat template leaves out the tool calls of a prompt")
            return
        if not self.writes_calls:
            raise DataError(
                f"message {number}: the chat template leaves out tool calls: set generator.chat_template to one that"
                " writes them"
            )
        if self.argument_type is None:
            said.unread.add("arguments")
        if message["content"] and not self.writes_content_of_calls:
            said.unread.add("content (with tool calls)")
        calls = []
        for call, text in calls_of(message, number):
            said.unread |= {f"tool_calls.{name}" for name in unread_keys(call)}
            if self.argument_type is str:
                function = call.get("function") or call
                function["arguments"] = text or json.dumps(function["arguments"], ensure_ascii=False)
                said.notes.add("arguments of tool calls stay text, as the chat template writes them")
            calls.append(call)
        message["tool_calls"] = calls

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls, or refuses them itself."""
        texts = [self._with_arguments(arguments) for arguments in _BOTH]
        return texts == [None, None] or any(text and _OTHER_SIGN in text for text in texts)

    @cached_property
    def argument_type(self) -> type | None:
        """``dict`` or ``str``: as what the template takes the arguments of a tool call; None: it does not write
        them."""
        as_object, as_text = (self._with_arguments(arguments) for arguments in _BOTH)
        if as_object is not None and _SIGN in as_object and f"{{'{_SIGN}'" not in as_object:
            return dict
        if as_text is not None and _SIGN in as_text:
            return str
        if as_object is None and as_text is None:
            return dict  # the row's own rendering tells what is wrong
        return dict if as_object is not None and _SIGN in as_object else None

    def _with_arguments(self, arguments: Any, content: str | None = "") -> str | None:
        call = {**_CALL, "function": {"name": _OTHER_SIGN, "arguments": arguments}}
        return self._try([_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}])

    @cached_property
    def empty_content(self) -> str | None:
        """The content of a message that only calls tools: None, or ``""`` (vLLM's) if the template takes only that."""
        for arguments in _BOTH:
            null, empty = (self._with_arguments(arguments, content) for content in (None, ""))
            if empty is not None and _OTHER_SIGN in empty and "None" not in empty:
                return "" if null is None or "None" in null else None
        return None

    @cached_property
    def writes_content_of_calls(self) -> bool:
        """Whether the template writes the text of a message that calls tools too."""
        arguments = "{}" if self.argument_type is str else {}
        text = self._with_arguments(arguments, _SIGN)
        return text is None or _SIGN in text

    # -------------------------------------------------------------------------------------------------- thinking
    def _fit_thinking(self, message: dict[str, Any], number: int, before: str, said: Said) -> None:
        of_message = {key: message.pop(key) for key in THINKING if key in message}
        case = bool(message.get("tool_calls")), before == "tool"
        inside = "</think>" in (message["content"] or "")
        if inside and any(of_message.values()) and self.thinking != "ignore":
            raise DataError(
                f"message {number}: {' and '.join(of_message)} and the content have thinking: keep one of them"
            )
        if inside and not of_message and not self._keeps_inline(*case):
            of_message = self._inline_as_key(message, case, said)
            if not of_message:
                self._without_inline(message, number, said)
        if not of_message:
            return
        name, thinking = next(iter(of_message.items()))
        for key, value in of_message.items():
            if not isinstance(value, str):
                raise DataError(f"message {number}: {key} is {value!r:.80}, it must be text")
            if value != thinking:
                raise DataError(f"message {number}: {name} and {key} differ: keep one of them")
        read = self._thinking_key(name, *case)
        if read is not None:
            message[read] = thinking
        elif not thinking.strip():
            return
        elif self.thinking == "content" or (self.parses_content and self._keeps_inline(*case)):
            message["content"] = inline(thinking, message["content"])
            if not self._keeps_inline(*case):
                self._without_inline(message, number, said)
        elif self.thinking == "ignore":
            said.unread.add(name)
        elif self.thinking == "drop":
            said.notes.add(f"{name} is dropped ({self.section}.thinking=drop)")
        else:
            raise DataError(
                f"message {number}: the chat template does not write {name} in this place, nor thinking by another"
                f" key: set {self.section}.thinking=content to write it into the content, or drop, or set another"
                " generator.chat_template"
            )

    def _inline_as_key(self, message: dict[str, Any], case: tuple[bool, bool], said: Said) -> dict[str, str]:
        """Take the thinking out of the content of a message whose template reads it by a key only; {} if it reads
        none, or the content does not begin with it."""
        key, begins = self._thinking_key(THINKING[0], *case), message["content"].lstrip()
        if key is None or not begins.startswith("<think>"):
            return {}
        thinking, _, message["content"] = begins.removeprefix("<think>").partition("</think>")
        message["content"] = message["content"].lstrip("\n")
        said.notes.add(f"<think> in the content is given to the chat template as {key}, which it reads")
        return {key: thinking.strip("\n")}

    def _without_inline(self, message: dict[str, Any], number: int, said: Said) -> None:
        """Drop thinking in the content, which the template would drop or write after other thinking. Raises DataError
        unless that is asked for."""
        if self.thinking == "ignore":
            return
        if self.thinking == "drop":
            message["content"] = str(message["content"]).rpartition("</think>")[2].lstrip("\n")
            said.notes.add(f"<think> in the content is dropped ({self.section}.thinking=drop)")
            return
        raise DataError(
            f"message {number}: the chat template does not write the thinking (<think>) of the content in this place:"
            f" set {self.section}.thinking=drop, or another generator.chat_template"
        )

    def _find_thinking_key(self, name: str, calls: bool, after_result: bool) -> str | None:
        """Return by which key the template writes the thinking of an answer, if possible by ``name``."""
        for key in (name, *THINKING):
            text = self._try(_conversation(calls, after_result, {key: _SIGN}, self.argument_type, self.empty_content))
            if text is not None and _SIGN in text:
                return key
        return None

    def _try_inline(self, calls: bool, after_result: bool) -> bool:
        plain, thinking = (
            self._try(_conversation(calls, after_result, {"content": content}, self.argument_type, ""))
            for content in (_OTHER_SIGN, inline(_SIGN, _OTHER_SIGN))
        )
        if plain is None or thinking is None:
            return True  # the row's own rendering tells what is wrong
        return _SIGN in thinking and thinking.count("</think>") == max(plain.count("</think>"), 1)

    @cached_property
    def parses_content(self) -> bool:
        """Whether the template looks for ``</think>`` in the content, so that it writes the space around it."""
        return any("</think>" in text for text in self._texts)

    # -------------------------------------------------------------------------------------------- keys and roles
    def _try_role(self, role: str) -> bool:
        """Return whether the template writes messages of a role."""
        text = self._of_role(role)
        return text is None or _SIGN in text

    def _of_role(self, role: str, **others: Any) -> str | None:
        """Return the text of a conversation with a message of a role."""
        message = {"role": role, "content": _SIGN, **others}
        if role == "user":
            return self._try([message])
        if role == "assistant":
            return self._try([_QUESTION, message])
        if role == "tool":
            calls = _conversation(True, False, {}, self.argument_type, self.empty_content)
            return self._try([*calls, {"tool_call_id": _CALL["id"], "name": "probe", **message}])
        return self._try([message, _QUESTION])

    def _try_key(self, role: str, key: str) -> bool:
        """Return whether the template reads a key of messages of a role."""
        if key not in self._names:
            return False
        text = self._of_role(role, **{key: _OTHER_SIGN})
        return text is None or text != self._of_role(role)

    @cached_property
    def part_separator(self) -> str:
        """What the template writes between two parts of text: its own, or a newline if it takes no parts, as vLLM."""
        parts = [{"type": "text", "text": sign} for sign in (_SIGN, _OTHER_SIGN)]
        text = self._try([{"role": "user", "content": parts}])
        between, written, _ = (text or "").partition(_SIGN)[2].partition(_OTHER_SIGN)
        joined = {"role": "user", "content": _SIGN + between + _OTHER_SIGN}
        return between if written and text == self._try([joined]) else "\n"

    @cached_property
    def _names(self) -> frozenset[str]:
        """Names that occur in the template as a key, an attribute or a text of its own."""
        from jinja2 import nodes
        from transformers.utils.chat_template_utils import _cached_compile_jinja_template

        env: Any = _cached_compile_jinja_template("").environment
        names: set[str] = set()
        for text in self._texts:
            tree = env.parse(text)
            names |= {node.attr for node in tree.find_all(nodes.Getattr)}
            names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return frozenset(names)

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes the tools that a row declares."""
        function = {"name": _SIGN, "description": _SIGN, "parameters": {"type": "object", "properties": {}}}
        text = self._try([_QUESTION], tools=[{"type": "function", "function": function, **function}])
        return text is None or _SIGN in text

    @cached_property
    def _texts(self) -> list[str]:
        """The template, and if the tokenizer has one for tools, that too."""
        if self.template is not None or not hasattr(self.tokenizer, "get_chat_template"):
            return [self.template or str(getattr(self.tokenizer, "chat_template", ""))]
        return list({self.tokenizer.get_chat_template(None, tools) for tools in (None, [_CALL])})

    def _try(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """Return the text of a conversation; None if the template refuses it."""
        try:
            given = {**self.kwargs, **options, "tokenize": False}
            return str(render(self.tokenizer, list(messages), template=self.template, **given))
        except Exception:  # whatever a template's expressions and its own raise_exception raise
            return None


def inline(thinking: str, content: str | None) -> str:
    """Return a content that begins with thinking, in the form of Qwen3 and DeepSeek-R1."""
    body = thinking.strip("\n")
    return f"<think>\n{body}\n</think>\n\n{content or ''}"


def _conversation(
    calls: bool, after_result: bool, answer: Mapping[str, Any], arguments: type | None, empty: str | None
) -> list[dict[str, Any]]:
    """Return a conversation that ends with an ``answer``, which may call a tool and come after the result of one."""
    function = {"name": "probe", "arguments": "{}" if arguments is str else {}}
    called: dict[str, Any] = {"role": "assistant", "content": empty, "tool_calls": [{**_CALL, "function": function}]}
    result = {"role": "tool", "content": "!", "tool_call_id": _CALL["id"], "name": "probe"}
    last = {**called, **answer} if calls else {"role": "assistant", "content": _OTHER_SIGN, **answer}
    before: list[dict[str, Any]] = [called, result] if after_result else []
    return [_QUESTION, *before, last]
