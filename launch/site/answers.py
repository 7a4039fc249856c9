"""Write ``docs/answers.md``: what is trained after each kind of answer, with the templates of released models.

It shows ``tests/data/trained_answers.json``, which ``tests/supervised/test_released_templates.py`` records and
compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/data/trained_answers.json"
HEAD = """\
# What is trained

What `sft`, `dpo` and `reward` train of a conversation, with chat templates of released models: each answer from the
end of the generation prompt up to the token at which the model stops. `⏎` is a new line, `·` a space at an edge.
Where a template does not write what a message has, or does not begin an answer as its own generation prompt does, the
row is an error.
`skyrl-megatron sft --show-row N` shows a row of your own data.
"""


def cell(text: str) -> str:
    """Return a text as code in a table."""
    inner = text.strip(" ")
    edges = "·" * (len(text) - len(text.lstrip(" "))), "·" * (len(text) - len(text.rstrip(" ")) if inner else 0)
    return "`" + f"{edges[0]}{inner}{edges[1]}".replace("\n", "⏎").replace("|", "\\|") + "`"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, to the path in ``argv`` or to ``docs/answers.md``; return 0."""
    arguments = sys.argv[1:] if argv is None else argv
    path = Path(arguments[0]) if arguments else ROOT / "docs/answers.md"
    lines = [HEAD]
    for family, conversations in json.loads(RECORD.read_text()).items():
        lines += [f"## {family}\n", "| conversation | trained of each answer |", "|---|---|"]
        for title, answers in conversations.items():
            shown = f"error: {answers['error']}".replace("|", "\\|") if isinstance(answers, dict) else ""
            lines.append(f"| {title} | {shown or ' '.join(cell(text) for text in answers)} |")
        lines.append("")
    path.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
