"""Chat templates: the tokens before, between and after those that the policy samples.

A conversation is never tokenized again as a whole, because decoding and tokenizing do not reproduce the sampled
tokens. Instead the tokens that a template puts *between* two turns are computed separately: a placeholder conversation
whose answer is a marker is rendered, and the text after the marker is tokenized. This is also correct for templates
that treat the last answer, or earlier thinking, differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import ChatTemplateConfig
from skyrl_megatron.data.encoding import Encoder
from skyrl_megatron.data.tokenizer import render, require_template, stop_tokens_of
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.trained_answers import TrainedSequence, trained_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "HEREstandsTHEanswer"
_STAND_IN = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER})
_USER: ConversationType = [{"role": "user", "content": "?"}]
_TOOL: ConversationType = [{"role": "tool", "content": "?", "tool_call_id": "0", "name": "?"}]
_STAND_IN_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")

_CHATML_OTHERS = (
    "{% for message in messages %}{% if message['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' }}"
)
_CHATML_END = (
    "{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BUILT_IN = {
    # ChatML; assistant messages are unchanged, including thinking.
    "qwen3_with_thinking": (
        _CHATML_OTHERS + "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}" + _CHATML_END
    ),
    # ChatML; only the last message keeps its thinking, as in the template of Qwen3.
    "qwen3_without_thinking": (
        _CHATML_OTHERS
        + "{% generation %}{% if loop.last %}{{ message['content'] }}"
        + "{% else %}{{ message['content'].split('</think>')[-1].lstrip('\n') }}{% endif %}"
        + "{{ '<|im_end|>' }}{% endgeneration %}"
        + _CHATML_END
    ),
}


def load_template(config: ChatTemplateConfig) -> str | None:
    """Return the Jinja text of ``generator.chat_template``; None for the template of the tokenizer.

    Raises DataError for unknown names and for files that cannot be read.
    """
    name = config.name_or_path
    if not name:
        return None
    if config.source == "file":
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"generator.chat_template.name_or_path={name}: {error}") from error
    if name not in BUILT_IN:
        raise DataError(
            f"generator.chat_template.name_or_path={name}: unknown template; choose one of {', '.join(BUILT_IN)}"
        )
    return BUILT_IN[name]


class ChatFormat:
    """A tokenizer with its chat template and the template's arguments.

    Raises DataError if there is no template, or if it cannot render a conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        require_template(tokenizer, template)
        self.stop_token_ids = tuple(stop_tokens_of(tokenizer) if stop_token_ids is None else stop_token_ids)
        self.tokenizer: Any = tokenizer  # its type hints are narrower than what templates take
        self.template, self.kwargs = template, dict(kwargs or {})
        self.marks_answers = template is not None and _GENERATION_TAG.search(template) is not None
        """Whether the template marks the text of the assistant (``{% generation %}``)."""
        self.encoder = Encoder(tokenizer)
        self._stop_before = cache(self._find_stop_before)
        self._after_answer = lru_cache(maxsize=1024)(self._tokenize_after_answer)
        self._prompt = lru_cache(maxsize=256)(self._tokenize_prompt)  # each sample of a prompt renders it again

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatFormat:
        """Return the same format with other arguments of the template."""
        return ChatFormat(self.tokenizer, self.template, kwargs, stop_token_ids=self.stop_token_ids)

    # ------------------------------------------------------------------ where answers end
    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the model; and, if the template ends answers with none of them, the
        special tokens that it writes there instead, as ChatML does with a base model and GLM with the next message."""
        model = frozenset(self.stop_token_ids)
        after = [self._text_after([]), self._text_after(_USER), self._text_after([], generation_prompt=False)]
        stops = re.compile(rf"\s*(?:{self._names(model)})") if model else None
        if stops and any(text and stops.match(text) for text in after):
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
        names = sorted((str(self.tokenizer.convert_ids_to_tokens(token)) for token in tokens), key=len, reverse=True)
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
        text = self._after_marker([], generation_prompt=False)
        written = self.stops.search(text)
        return text[written.end() :] if written else ""

    def _text_after(self, following: ConversationType, *, generation_prompt: bool = True) -> str | None:
        """Implement :meth:`_after_marker`; None if the template cannot render it."""
        try:
            return self._after_marker(following, generation_prompt=generation_prompt)
        except DataError:
            return None

    # ------------------------------------------------------------------ tokens
    def prompt(self, messages: ConversationType, *, generation_prompt: bool = True) -> list[int]:
        """Tokenize a conversation, by default with the generation prompt of the next answer."""
        if _is_plain(messages):
            return list(self._prompt(_pairs(messages), generation_prompt))
        return self._text_prompt(messages, generation_prompt)

    def after_answer(self, observations: ConversationType) -> list[int]:
        """Return the tokens between two turns: end of the answer, observations, and the next generation prompt.

        The first one ends the answer. :func:`~skyrl_megatron.data.encoding.after_stop` leaves it out if a stop token
        was sampled.
        """
        if _is_plain(observations):
            return list(self._after_answer(_pairs(observations)))
        return self._text_after_answer(observations)

    def observation(self, observations: ConversationType) -> list[int]:
        """Tokenize the texts without the template, for conversations inside one assistant message."""
        return self.encoder.continued("".join(message["content"] for message in observations))

    def answers(self, messages: ConversationType, start: int) -> tuple[list[int], list[int], list[int]]:
        """Return (prompt, response, mask) of a whole conversation.

        The prompt has the tokens of the first ``start`` messages, the response those of the others. The mask is 1 on
        response tokens that the template marks as the assistant's.
        """
        prompt = self.prompt(messages[:start], generation_prompt=False)
        whole = render(
            self.tokenizer,
            messages,
            template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.kwargs,
        )
        ids, mask = list(whole["input_ids"]), list(whole["assistant_masks"])
        if ids[: len(prompt)] != prompt:
            raise DataError(
                "generator.chat_template renders the prompt differently when answers follow: use another template"
            )
        return prompt, ids[len(prompt) :], mask[len(prompt) :]

    def trained_sequences(
        self,
        messages: ConversationType,
        *,
        trained: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[TrainedSequence]:
        """Return (prompt, response, mask) of each sequence that trains the assistant's messages. ``trained``: for each
        message whether it is trained, of which only those of the assistant may be; None: all of the assistant. The
        mask is 1 on the tokens of a trained answer and on its end token.

        A sequence is what the template writes, tokenized once, up to the stop token of its last answer
        (:mod:`skyrl_megatron.rollout.trained_answers`). An answer continues the sequence of the answers before it,
        unless the template renders these differently in its prompt, for example without their thinking. Then it begins
        a new sequence. Raises DataError, with the number of the message, if the tokens of an answer are ambiguous.
        """
        return trained_sequences(self, messages, trained, tools)

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
            raise DataError(f"the chat template cannot render a conversation with roles {roles}: {error}") from error

    def _tokenize_prompt(self, messages: _Pairs, generation_prompt: bool) -> tuple[int, ...]:
        return tuple(self._text_prompt(_messages(messages), generation_prompt))

    def _text_prompt(self, messages: ConversationType, generation_prompt: bool) -> list[int]:
        return self.encoder.whole(self.text(messages, generation_prompt=generation_prompt))

    def _tokenize_after_answer(self, observations: _Pairs) -> tuple[int, ...]:
        return tuple(self._text_after_answer(_messages(observations)))

    def _text_after_answer(self, observations: ConversationType) -> list[int]:
        return self.encoder.continued(self._after_marker(observations))

    def _after_marker(self, following: ConversationType, *, generation_prompt: bool = True) -> str:
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


type _Pairs = tuple[tuple[str, str], ...]
"""(role, text) of each message, hashable for the cache."""


def _is_plain(messages: ConversationType) -> bool:
    return all(m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages)


def _pairs(messages: ConversationType) -> _Pairs:
    return tuple((message["role"], message["content"]) for message in messages)


def _messages(pairs: _Pairs) -> ConversationType:
    return [{"role": role, "content": text} for role, text in pairs]
