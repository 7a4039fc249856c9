"""Plain English: words of a private dialect appear in no docstring, comment, message or document.

Each pattern has the words to use instead. Quotations, names of keys and the English senses that everybody uses
("behind an endpoint") are excepted in the pattern itself.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.structure import source

ROOT = source.ROOT
INSTEAD = {
    r"\bbehind\b(?! (an?|the|its|one|some|this) ((\w|-)+ )?(endpoints?|prox(y|ies)|servers?|address(es)?|URLs?|gates?|"
    r"NAT|firewall|balancer|service|interface))": "after, following",
    r"\b(is|are|was|were|be|been|being|gets?) told\b": "reported, known from",
    r"\btold (by|of|in|what|how|why|as|apart|that)\b|\btells of\b": "reported, known from",
    r"\b(goes|go|going|went) on\b(?! (to|a|an|the)\b)": "continues, resumes",
    r"\b(lies|lie|lay|lying) (in|on|at|beside|next|between|within|there|so|apart)\b": "is, is stored",
    r"\bstands? (for itself|in the way|beside|behind|before|above|there|at|alone)\b": "is",
    r"\bsomebody\b": "a user, a caller, someone",
    r"\bbut for\b": "except",
    r"\bbeside\b": "next to, in addition to",
    r"\bhear(s|d|ing|ings)?\b": "measure, receive",
    r"\btaken down\b": "recorded",
    r"\bwhat there is\b": "name the thing",
    r"\bone of a user's own\b|\bof a user's own\b": "custom",
    r"\b(is|are|be|been|was) mended\b|\bmends?\b": "fix",
    r"\bforetells?\b": "predicts",
    r"\bby routes\b|\broutes of weights\b": "by the reshard plan",
}
"""Pattern → plain words."""
GENERATED = {
    "docs/errors.md",
    "docs/faults.md",
    "docs/metrics.md",
    "docs/families.md",
    "docs/options.md",
    "CONFIG.md",
    "CHANGELOG.md",
}
TESTS = ("tests/faults", "tests/mutations", "tests/support")
"""Folders of tests that other tests, and the pages of faults and errors, take their words from."""
DOCUMENTS = [
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.relative_to(ROOT).as_posix() not in GENERATED
]


def prose(text: str):
    """Line and text of each comment and string of a module; parts of f-strings count as strings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def offences(text: str, parts) -> list[str]:
    """Each forbidden word with what to write instead."""
    found = []
    for line, part in parts:
        flat = re.sub(r"\s+", " ", part)
        for pattern, instead in INSTEAD.items():
            for match in re.finditer(pattern, flat, re.IGNORECASE):
                found.append(
                    f"{line}: {match.group(0)!r} → {instead}: …{flat[max(0, match.start() - 30) : match.end() + 30]}…"
                )
    return list(dict.fromkeys(found))


def test_the_package_is_in_plain_english():
    broken = []
    for package in (*source.PACKAGES, *TESTS):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            broken += [f"{path.relative_to(ROOT)}:{each}" for each in offences(text, prose(text))]
    assert not broken, f"{len(broken)}:\n" + "\n".join(broken)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_is_in_plain_english(document: Path):
    text = document.read_text()
    broken = offences(text, enumerate(text.split("\n"), 1))
    assert not broken, "\n".join(broken)


def test_each_word_is_found_and_its_plain_senses_are_not():
    for text in (
        "a line behind the step",
        "it is told by a field",
        "the run goes on",
        "it lies in memory",
        "somebody",
    ):
        assert offences(text, [(1, text)]), text
    for text in ("a teacher behind an OpenAI-compatible endpoint", "it goes on a GPU", "the field stands in for it"):
        assert not offences(text, [(1, text)]), text
