"""Where answers end in what a chat template writes: with which token, and what decides it.

A model stops at one of several tokens. Most templates close every answer with one of them. Others leave it to the next
message: in GLM's, a user's message begins with ``<|user|>`` and a tool's with ``<|observation|>``, at which the model
stops. Others close earlier answers and the last one with different tokens: gpt-oss has ``<|end|>`` and ``<|return|>``.
What a template writes around an answer is found by rendering a marker in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from skyrl_megatron.data.encoding import Encoder
from skyrl_megatron.data.tokenizer import render, require_template, stop_tokens_of
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "HEREstandsTHEanswer"
_STAND_IN = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER})
_USER: ConversationType = [{"role": "user", "content": "?"}]
_TOOL: ConversationType = [{"role": "tool", "content": "?", "tool_call_id": "0", "name": "?"}]
_STAND_IN_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]


class AnswerEnds:
    """A tokenizer with its chat template (None: the tokenizer's own), the template's arguments, and the tokens at
    which the engines stop (None: those of the tokenizer's folder).

    Raises DataError if there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        kwargs: Mapping[str, Any],
        stop_token_ids: Sequence[int] | None,
    ) -> None:
        require_template(tokenizer, template)
        self.tokenizer: Any = tokenizer  # its type hints are narrower than what templates take
        self.template, self.kwargs = template, dict(kwargs)
        self.encoder = Encoder(tokenizer)
        self.stop_token_ids = tuple(stop_tokens_of(tokenizer) if stop_token_ids is None else stop_token_ids)
        """The tokens at which the engines stop, first the tokenizer's end-of-sequence token."""
        self._stop_before = cache(self._find_stop_before)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> AnswerEnds:
        """Return the same with other arguments of the template."""
        return AnswerEnds(self.tokenizer, self.template, kwargs, self.stop_token_ids)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Render a conversation. Raises DataError if the template cannot."""
        try:
            text: str = render(
                self.tokenizer,
                messages,
                template=self.template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **({"tools": list(tools)} if tools else {}),
                **self.kwargs,
            )
            return text
        except Exception as error:  # whatever a template's expressions and its own raise_exception raise
            roles = [message.get("role") for message in messages]
            raise DataError(
                f"the chat template cannot render a conversation with roles {roles}: {error}; set "
                "generator.chat_template to one that does"
            ) from error

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the model; and, if the template ends answers with none of them, the
        special tokens that it writes there instead, as ChatML does with a base model and GLM with the next message."""
        model = frozenset(self.stop_token_ids)
        stops = re.compile(self._names(model)) if model else None
        at_end = self._text_after([], generation_prompt=False) or ""
        before_others = [self._text_after([]) or "", self._text_after(_USER) or ""]
        written = stops and (stops.search(at_end) or any(stops.match(text.lstrip()) for text in before_others))
        if written:
            return model
        return model | {first for following in (_USER, _TOOL) if (first := self._special_after(following)) is not None}

    @cached_property
    def stops(self) -> re.Pattern[str]:
        """Finds a token of :attr:`stop_ids` in a text. Raises DataError if there is none."""
        if not self.stop_ids:
            raise DataError("the model has no end-of-sequence token: set eos_token_id in its generation_config.json")
        return re.compile(self._names(self.stop_ids))

    @cached_property
    def next_stop(self) -> re.Pattern[str]:
        """Matches such a token, its first group, after white space."""
        return re.compile(rf"\s*({self.stops.pattern})")

    def _names(self, tokens: Iterable[int]) -> str:
        known = [name for name in map(self.tokenizer.convert_ids_to_tokens, tokens) if name is not None]
        names = sorted(map(str, known), key=len, reverse=True)
        return "|".join(map(re.escape, names))

    def id_of(self, stop: str) -> int:
        """Return the id of a token of :attr:`stop_ids`."""
        return int(self.tokenizer.convert_tokens_to_ids(stop))

    @cached_property
    def closing_token(self) -> int | None:
        """The special token that the template writes after every answer before another message (``<|im_end|>``,
        ``<|end|>`` of gpt-oss); None if it is the next message that ends an answer (GLM)."""
        written = [following for following in (_USER, _TOOL, []) if self._text_after(following) is not None][:2]
        firsts = {self._special_after(following) for following in written}
        return firsts.pop() if len(firsts) == 1 else None

    def _special_after(self, following: ConversationType) -> int | None:
        """Return the special token with which the text after an answer begins; None if there is none."""
        first = self.encoder.continued(self._text_after(following) or "")[:1]
        special = bool(first) and (first[0] in self.stop_token_ids or first[0] in self.tokenizer.all_special_ids)
        return int(first[0]) if special else None

    @cached_property
    def end_token(self) -> int:
        """The stop token of an answer without tool calls that ends a conversation."""
        written = self.next_stop.match(self._text_after([], generation_prompt=False) or "")
        return self.id_of(written[1]) if written else self.stop_before("user")

    def stop_before(self, role: str) -> int:
        """Return the token with which an answer stops before a message of a role, or the tokenizer's
        end-of-sequence token if the template writes none."""
        return self._stop_before(role)

    def _find_stop_before(self, role: str) -> int:
        text = self._text_after(_TOOL if role == "tool" else [{"role": role, "content": "?"}])
        written = None if text is None else self.next_stop.match(text)
        return self.id_of(written[1]) if written else (*self.stop_token_ids, *self.stop_ids)[0]

    @cached_property
    def rest_after_stop(self) -> str:
        """What the template writes after the stop token of an answer that ends a conversation. Raises DataError if it
        omits answers."""
        text = self.after_marker([], generation_prompt=False)
        written = self.stops.search(text)
        return text[written.end() :] if written else ""

    def _text_after(self, following: ConversationType, *, generation_prompt: bool = True) -> str | None:
        """Implement :meth:`after_marker`; None if the template cannot render it."""
        try:
            return self.after_marker(following, generation_prompt=generation_prompt)
        except DataError:
            return None

    def after_marker(self, following: ConversationType, *, generation_prompt: bool = True) -> str:
        """Return what the template writes after an answer that ``following`` messages and a generation prompt
        follow."""
        messages = [*_STAND_IN, *following]
        try:
            text = self.text(messages, generation_prompt=generation_prompt)
        except DataError:  # of a template for tools alone
            text = self.text(messages, generation_prompt=generation_prompt, tools=_STAND_IN_TOOLS)
        _, marked, after = text.partition(_MARKER)
        if not marked:
            raise DataError(
                "the chat template omits assistant messages, so it cannot render several turns: set another"
                " generator.chat_template"
            )
        return after
