"""Chat templates: the tokens before, between and after those that the policy samples.

A conversation is never tokenized again as a whole, because decoding and tokenizing do not reproduce the sampled
tokens. Instead the tokens that a template puts *between* two turns are computed separately: a placeholder conversation
whose answer is a marker is rendered, and the text after the marker is tokenized. This is also correct for templates
that treat the last answer, or earlier thinking, differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import ChatTemplateConfig
from skyrl_megatron.data.tokenizer import render, require_template, stop_tokens_of
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "HEREstandsTHEanswer"
_STAND_IN = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER})
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
        self._after_answer = lru_cache(maxsize=1024)(self._tokenize_after_answer)
        self._prompt = lru_cache(maxsize=256)(self._tokenize_prompt)  # each sample of a prompt renders it again

    @cached_property
    def end_token(self) -> int:
        """Token that ends an answer: that of the template, else the tokenizer's end-of-sequence token."""
        after = self.after_answer([])
        ends = after and after[0] in self.tokenizer.all_special_ids
        return int(after[0] if ends else self.tokenizer.eos_token_id)

    def prompt(self, messages: ConversationType, *, generation_prompt: bool = True) -> list[int]:
        """Tokenize a conversation, by default with the generation prompt of the next answer."""
        if _is_plain(messages):
            return list(self._prompt(_pairs(messages), generation_prompt))
        return self._text_prompt(messages, generation_prompt)

    def after_answer(self, observations: ConversationType) -> list[int]:
        """Return the tokens between two turns: end of the answer, observations, and the next generation prompt.

        The first one is the end token, if the template has one. Skip it if it was sampled.
        """
        if _is_plain(observations):
            return list(self._after_answer(_pairs(observations)))
        return self._text_after_answer(observations)

    def observation(self, observations: ConversationType) -> list[int]:
        """Tokenize the texts without the template, for conversations inside one assistant message."""
        texts = (message["content"] for message in observations)
        return [token for text in texts for token in self.tokenizer.encode(text, add_special_tokens=False)]

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
    ) -> list[tuple[list[int], list[int], list[int]]]:
        """Return (prompt, response, mask) of each sequence that trains the assistant's messages. ``trained``: for each
        message whether it is trained, of which only those of the assistant may be; None: all of the assistant. The
        mask is 1 on the tokens of a trained answer and on its end token.

        The tokens are those of a rollout: the prompt of an answer is tokenized with its generation prompt, and the
        answer alone. An answer continues the sequence of the answers before it, unless the template renders these
        differently in its prompt, for example without their thinking. Then it begins a new sequence.
        """
        ending = self.tokenizer.decode([self.end_token])
        sequences: list[list[tuple[list[int], int]]] = []
        known = ""  # the text of the current sequence
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or not (trained is None or trained[place]):
                continue
            before = self._render(messages[:place], True, tools)
            through = self._render(messages[: place + 1], False, tools)
            if not through.startswith(before):
                raise DataError(
                    "the chat template renders an answer differently from what follows its generation prompt: set"
                    " generator.chat_template, or chat_template_kwargs"
                )
            if not sequences or not before.startswith(known):
                sequences.append([])
                known = ""
            answer, ended, rest = through[len(before) :].rpartition(ending)
            pieces = [(before[len(known) :], 0), (answer if ended else rest, 1)]
            sequences[-1] += [(self.tokenizer.encode(text, add_special_tokens=False), mask) for text, mask in pieces]
            sequences[-1].append(([self.end_token], 1))
            known = through[: len(through) - len(rest)] if ended else through
        return [_joined(pieces) for pieces in sequences]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, tools: Sequence[Any] | None = None
    ) -> str:
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
        ids: list[int] = self.tokenizer.encode(self._render(messages, generation_prompt), add_special_tokens=False)
        return ids

    def _tokenize_after_answer(self, observations: _Pairs) -> tuple[int, ...]:
        return tuple(self._text_after_answer(_messages(observations)))

    def _text_after_answer(self, observations: ConversationType) -> list[int]:
        text = self._render([*_STAND_IN, *observations], True)
        _, found, after = text.partition(_MARKER)
        if not found:
            raise DataError(
                "the chat template omits assistant messages, so it cannot render several turns: set another"
                " generator.chat_template"
            )
        ids: list[int] = self.tokenizer.encode(after, add_special_tokens=False)
        return ids


def _joined(pieces: Sequence[tuple[list[int], int]]) -> tuple[list[int], list[int], list[int]]:
    """Return (prompt, response, mask) of (tokens, whether they are trained) in order; the first are the prompt."""
    (prompt, _), *rest = pieces
    response = [token for tokens, _ in rest for token in tokens]
    return prompt, response, [trained for tokens, trained in rest for _ in tokens]


type _Pairs = tuple[tuple[str, str], ...]
"""(role, text) of each message, hashable for the cache."""


def _is_plain(messages: ConversationType) -> bool:
    return all(m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages)


def _pairs(messages: ConversationType) -> _Pairs:
    return tuple((message["role"], message["content"]) for message in messages)


def _messages(pairs: _Pairs) -> ConversationType:
    return [{"role": role, "content": text} for role, text in pairs]
