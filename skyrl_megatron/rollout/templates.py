"""Chat templates: the tokens before, between and after those that the policy samples.

A conversation is never tokenized again as a whole, because decoding and tokenizing do not reproduce the sampled
tokens. Instead the tokens that a template puts *between* two turns are computed separately: a placeholder conversation
whose answer is a marker is rendered, and the text after the marker is tokenized. This is also correct for templates
that treat the last answer, or earlier thinking, differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import ChatTemplateConfig
from skyrl_megatron.data.tokenizer import render
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.answer_ends import AnswerEnds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "HEREstandsANobservation"
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
            raise DataError(
                f"generator.chat_template.name_or_path={name}: {error}; give a text file, or set source=name"
            ) from error
    if name not in BUILT_IN:
        raise DataError(
            f"generator.chat_template.name_or_path={name}: unknown template; choose one of {', '.join(BUILT_IN)}"
        )
    return BUILT_IN[name]


class ChatFormat(AnswerEnds):
    """A tokenizer with its chat template and the template's arguments.

    ``stop_token_ids``: the tokens at which the engines stop, by default those of the tokenizer's model folder
    (:func:`~skyrl_megatron.data.tokenizer.stop_tokens_of`).

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
        super().__init__(tokenizer, template, kwargs or {}, stop_token_ids)
        self.marks_answers = template is not None and _GENERATION_TAG.search(template) is not None
        """Whether the template marks the text of the assistant (``{% generation %}``)."""
        self._writes_role = cache(self._try_role)
        self._after_answer = lru_cache(maxsize=1024)(self._tokenize_after_answer)
        self._prompt = lru_cache(maxsize=256)(self._tokenize_prompt)  # each sample of a prompt renders it again

    def __reduce__(self) -> Any:
        made = partial(ChatFormat, stop_token_ids=self.stop_token_ids)
        return made, (self.tokenizer, self.template, self.kwargs)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatFormat:
        """Return the same format with other arguments of the template."""
        return ChatFormat(self.tokenizer, self.template, kwargs, stop_token_ids=self.stop_token_ids)

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
        rendered = render(
            self.tokenizer,
            messages,
            template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.kwargs,
        )
        ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
        if ids[: len(prompt)] != prompt:
            raise DataError(
                "generator.chat_template renders the prompt differently when answers follow: use another template"
            )
        return prompt, ids[len(prompt) :], mask[len(prompt) :]

    def _tokenize_prompt(self, messages: _Pairs, generation_prompt: bool) -> tuple[int, ...]:
        return tuple(self._text_prompt(_messages(messages), generation_prompt))

    def _text_prompt(self, messages: ConversationType, generation_prompt: bool) -> list[int]:
        return self.encoder.whole(self.text(messages, generation_prompt=generation_prompt))

    def _tokenize_after_answer(self, observations: _Pairs) -> tuple[int, ...]:
        return tuple(self._text_after_answer(_messages(observations)))

    def _text_after_answer(self, observations: ConversationType) -> list[int]:
        for role in dict.fromkeys(message["role"] for message in observations):
            if not self._writes_role(role):
                raise DataError(
                    f"the chat template leaves out an observation of the role {role!r}: use another role, or set"
                    " generator.chat_template"
                )
        return self.encoder.continued(self.after_marker(observations))

    def _try_role(self, role: str) -> bool:
        try:
            text = self.after_marker([{"role": role, "content": _PROBE, "tool_call_id": "0", "name": "?"}])
        except DataError:  # it wants other messages around: the template itself says what is wrong
            return True
        return _PROBE in text


type _Pairs = tuple[tuple[str, str], ...]
"""(role, text) of each message, hashable for the cache."""


def _is_plain(messages: ConversationType) -> bool:
    return all(m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages)


def _pairs(messages: ConversationType) -> _Pairs:
    return tuple((message["role"], message["content"]) for message in messages)


def _messages(pairs: _Pairs) -> ConversationType:
    return [{"role": role, "content": text} for role, text in pairs]
