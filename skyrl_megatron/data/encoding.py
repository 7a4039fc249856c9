"""Texts as tokens: a whole text, a text that continues another one, and the places in a text where tokens must end.

Pieces of a text that are encoded alone are not its tokens. Tokenizers of sentencepiece put a space before each text
(``▁``), and a token may reach over the end of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from skyrl_megatron.errors import DataError

_BEFORE = ("\n", ".", "x")
"""Texts after which a text is encoded, to have its tokens without the space before the first one."""


class Encoder:
    """Encodes texts, without the special tokens that a tokenizer adds."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def whole(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a sequence."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def continued(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other tokens, without a space that the tokenizer puts before a
        text. Raises DataError if the tokenizer cannot show them."""
        if not text or not self._adds_space:
            return self.whole(text)
        for before in _BEFORE:
            first, both = self.whole(before), self.whole(before + text)
            if both[: len(first)] == first:
                return both[len(first) :]
        raise DataError(
            f"the tokenizer has no tokens for {text[:40]!r} in the middle of a text: use a chat template without it"
        )

    def divided(self, text: str, ends: Sequence[int], encoding: Any = None) -> tuple[list[int], list[int]]:
        """Return (tokens of the text, number of tokens up to each of ``ends``, ascending positions in the text).
        ``encoding``: that of the text in :meth:`encodings`, where several are encoded at once.

        Where a token would reach over one of ``ends``, the text before and the text after it are encoded one after the
        other: an engine gets the tokens of the text before, and samples those of the text after it.
        """
        encoding = encoding or self._encoding(text)
        if encoding is None:
            return self._divided_anew(text, ends, self.whole)
        ids: list[int] = encoding.ids
        counts: list[int] = []
        for end in ends:
            if end == len(text):
                counts.append(len(ids))
                continue
            count = encoding.char_to_token(end)
            if count is None or (end and count in (0, encoding.char_to_token(end - 1))):
                before = self.whole(text[:end])  # the span of no token has the character, or a token reaches over end
                count = len(before)
                if ids[:count] != before:
                    return self._divided_anew(text, ends, self.whole)
            counts.append(count)
        return ids, counts

    def _encoding(self, text: str) -> Any:
        """Return the tokens of a text with their spans; None if the tokenizer has no spans."""
        inner = self._with_spans
        return None if inner is None else inner.encode(text, add_special_tokens=False)

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """Return the tokens of each text with their spans, for :meth:`divided`; None if the tokenizer has no spans."""
        inner = self._with_spans
        if inner is None:
            return [None] * len(texts)
        encoded: list[Any] = inner.encode_batch(texts, add_special_tokens=False)
        return encoded

    @property
    def _with_spans(self) -> Any:
        inner = getattr(self.tokenizer, "backend_tokenizer", None)
        if inner is None or inner.truncation is not None or inner.padding is not None:
            return None  # those of another call, which transformers resets at its next one
        return inner

    def _divided_anew(self, text: str, ends: Sequence[int], encode: Any) -> tuple[list[int], list[int]]:
        """Implement :meth:`divided` by encoding beginnings of the text. ``encode``: of this text."""
        ids: list[int] = encode(text)
        counts: list[int] = []
        for number, end in enumerate(ends):
            before = encode(text[:end])
            if ids[: len(before)] != before:
                after, more = self._divided_anew(text[end:], [later - end for later in ends[number:]], self.continued)
                return [*before, *after], [*counts, *(len(before) + count for count in more)]
            counts.append(len(before))
        return ids, counts

    @cached_property
    def _adds_space(self) -> bool:
        return self.whole("\nx") != [*self.whole("\n"), *self.whole("x")]


def after_stop(after: Sequence[int], sampled: Sequence[int], closing: int | None) -> list[int]:
    """Return the tokens that follow a turn whose last sampled token is a stop token, of those that a template writes
    ``after`` an answer.

    Those that were sampled already are left out: one, or several where a template ends answers with several tokens. If
    there are none, the token that closes every answer (``closing``) is left out: the stop token takes its place.
    """
    longest = min(len(after), len(sampled))
    same = next((n for n in range(longest, 0, -1) if list(sampled[-n:]) == list(after[:n])), 0)
    return list(after[same or int(bool(after) and after[0] == closing) :])
