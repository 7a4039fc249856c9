"""Many texts as tokens at once: each word is tokenized the first time that it occurs.

A byte-level BPE tokenizer cuts a text at its added tokens, cuts the parts by a regular expression, and makes tokens
within each of these words alone. So the tokens of a text are those of its words. That is used where it is certain: for
the expressions of :data:`PATTERNS`, and for texts of ASCII characters, on which all engines of regular expressions
agree and no normalization has an effect. Other texts are encoded by the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PATTERNS = frozenset((_GPT2, *(_LLAMA3.replace("NUMBERS", numbers) for numbers in ("", "{1,3}"))))
"""The expressions of GPT-2 and its descendants, of Qwen2 and 3, and of Llama 3, OLMo 2 and GLM-4."""
_PLAIN = re.compile(r"[\t\n\r -~]*")
MOST_WORDS, LONGEST_WORD = 1_000_000, 64
"""Words that are remembered, and characters of the longest one of them."""


class WordMemo:
    """Encodes texts by their words. ``inner``: the tokenizer of a fast tokenizer of transformers."""

    def __init__(self, inner: Any, pattern: str, added: Sequence[str]) -> None:
        self.inner = inner
        in_class = re.sub(r"\[[^\]]*\]", lambda part: _ascii(part[0]), pattern)
        self._words = re.compile(_ascii(in_class, "[", "]"), re.ASCII)
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if added else r"((?!))")
        self._memo: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> WordMemo | None:
        """Return the memo of a tokenizer; None if it may not be used for it."""
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is None:
            return None
        described = json.loads(inner.to_str())
        model, normalizer, cutter = (described.get(name) or {} for name in ("model", "normalizer", "pre_tokenizer"))
        steps = cutter["pretokenizers"] if cutter.get("type") == "Sequence" else [cutter]
        bytes_of = steps[-1]
        if model.get("type") != "BPE" or model.get("dropout") or normalizer.get("type") not in (None, "NFC"):
            return None
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            return None
        if bytes_of.get("type") != "ByteLevel" or bytes_of.get("add_prefix_space"):
            return None
        if len(steps) == 1 and bytes_of.get("use_regex"):
            pattern = _GPT2
        elif len(steps) == 2 and steps[0].get("type") == "Split" and not bytes_of.get("use_regex"):
            if steps[0].get("behavior") != "Isolated" or steps[0].get("invert"):
                return None
            pattern = steps[0]["pattern"].get("Regex")
        else:
            return None
        added = described.get("added_tokens") or []
        if pattern not in PATTERNS or any(one[name] for one in added for name in _CONDITIONS):
            return None
        return cls(inner, pattern, [one["content"] for one in added])

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """Return the tokens of each text, as :meth:`~skyrl_megatron.data.encoding.Encoder.encodings` does."""
        inner = self.inner
        if inner.encode_special_tokens or inner.truncation is not None or inner.padding is not None:
            return [None] * len(texts)  # those of another call: its settings are not those of the words
        plain = [_PLAIN.fullmatch(text) is not None for text in texts]
        rest = [text for text, one in zip(texts, plain, strict=True) if not one]
        others = iter(inner.encode_batch(rest, add_special_tokens=False))
        return [self._by_words(text) if one else next(others) for text, one in zip(texts, plain, strict=True)]

    def _by_words(self, text: str) -> Words:
        memo, words = self._memo, list[str]()
        for number, part in enumerate(self._added.split(text)):
            if number % 2:
                words.append(part)  # an added token
            elif part:
                words += self._words.findall(part)
        try:
            ids = [memo[word] for word in words]
        except KeyError:
            ids = [memo.get(word) or self._learn(word) for word in words]
        return Words(self.inner, text, words, ids)

    def _learn(self, word: str) -> list[int]:
        ids: list[int] = self.inner.encode(word, add_special_tokens=False).ids
        if len(word) <= LONGEST_WORD:
            if len(self._memo) >= MOST_WORDS:
                self._memo.clear()
            self._memo[word] = ids
        return ids


_CONDITIONS = ("single_word", "lstrip", "rstrip", "normalized")
"""What makes an added token depend on the text around it."""


class Words:
    """The tokens of a text, with the interface of an encoding of the library ``tokenizers``."""

    def __init__(self, inner: Any, text: str, words: list[str], ids: list[list[int]]) -> None:
        self._inner, self._text, self._words, self._ids = inner, text, words, ids
        self.ids = [token for of_word in ids for token in of_word]

    def char_to_token(self, place: int) -> int | None:
        """Return the number of the token that has a character; None if none has it."""
        starts = self._starts
        word = bisect_left(starts, place)
        if starts[word] == place:  # the first character of a word
            return self._counts[word]
        if starts[word] == place + 1:  # its last one, which its last token has: one byte is one character
            return self._counts[word] - 1
        token: int | None = self._whole.char_to_token(place)
        return token

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(map(len, self._words))]

    @cached_property
    def _counts(self) -> list[int]:
        return [0, *accumulate(map(len, self._ids))]

    @cached_property
    def _whole(self) -> Any:
        return self._inner.encode(self._text, add_special_tokens=False)


def _ascii(pattern: str, before: str = "", after: str = "") -> str:
    """Return an expression with the ASCII characters of its Unicode classes."""
    return pattern.replace(r"\p{L}", f"{before}A-Za-z{after}").replace(r"\p{N}", f"{before}0-9{after}")
