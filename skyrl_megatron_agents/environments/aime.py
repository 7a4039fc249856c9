"""Competition maths (AIME, MATH): the answer follows ``Answer:`` and is compared after normalisation.

The normalisation is that of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, answer_text

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAIL = 300  # characters of a response that are searched; the longest answer of MATH-500 has 159
_SPELLINGS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units points feet minutes digits cents degrees cm gm pounds"
    " meters meals edges students childrentickets multiples"
).split()
_NOISE = ("\\ldots", "sue", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}")
_MARKUP = ("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots")
_COMMANDS = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")


def normalize(answer: str) -> str:
    """Strip units, LaTeX markup, thousands separators and everything up to the last ``=`` from an answer."""
    text = answer.rpartition("=")[2]
    for before, after in _SPELLINGS:
        text = text.replace(before, after)
    for part in (*_UNITS, *_NOISE, *_MARKUP):
        text = text.replace(part, "")
    if maths := re.search(r"\$(.*?)\$", text):
        text = maths[1]
    text = _BOXED.sub(r"\1", _COMMANDS.sub(r"\1", text))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)  # \frac12 → \frac{1}{2}
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()


class AIMEEnv(BaseTextEnv):
    """One turn with reward 1 for the right answer, else −1.

    The reference answer is the row's ``reward_model.ground_truth`` or ``reward_spec.ground_truth``. Metadata: ``acc``
    and ``pred``.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        known = (self.extras.get("reward_model") or {}).get("ground_truth", self.ground_truth)
        if known is None:
            raise ValueError("AIMEEnv needs a reference answer, but the row has no reward_model.ground_truth: add it")
        self.answer = normalize(answer_text(self, known))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answers = _ANSWER.findall(action.split("<|im_end|>")[0][-_TAIL:])
        found = normalize(answers[-1]) if answers else "[INVALID]"
        right = found == self.answer
        return {
            "observations": [],
            "reward": 1.0 if right else -1.0,
            "done": True,
            "metadata": {"acc": right, "pred": found},
        }
