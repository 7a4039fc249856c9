"""Grade-school maths (GSM8K, arXiv:2110.14168): the answer stands behind ``####``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_megatron.envs.base import BaseTextEnv, BaseTextEnvStepOutput, answer_text, require_ground_truth

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_answer(text: str, *, strict: bool = True) -> str | None:
    """Return the number after the first ``####`` without thousands separators; None where there is none.

    With ``strict=False`` the last number in the text.
    """
    if strict:
        found = _STRICT.search(text)
        return found[1].replace(",", "") if found else None
    return next((n.replace(",", "") for n in reversed(_NUMBER.findall(text)) if n.strip(".,")), None)


class GSM8kEnv(BaseTextEnv):
    """One turn; 1 for the right number after ``####``, else 0."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.answer = answer_text(self, require_ground_truth(self))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        found = extract_answer(action)
        return {
            "observations": [],
            "reward": float(found == self.answer),
            "done": True,
            "metadata": {"parsed_answer": found},
        }


class GSM8kMultiTurnEnv(GSM8kEnv):
    """Several attempts. Each turn gets 1 for the right answer, 0.2/max_turns for a number in the right form, else 0;
    the first right answer ends the episode. Metric ``steps``: turns taken."""

    FORMAT_REWARD = 0.2
    THINK = (
        "Think it through step by step once more, and end with a tentative answer in exactly this form: '#### ANSWER'."
    )
    ANSWER = "This is the last turn: give only the final answer, in exactly this form: '#### ANSWER'."

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        wanted = self.extras.get("max_turns") or (self.extras.get("extra_info") or {}).get("max_turns") or 5
        self.max_turns = int(wanted)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        found = extract_answer(action)
        right = found == self.answer
        reward = 1.0 if right else self.FORMAT_REWARD / self.max_turns if found is not None else 0.0
        left = self.max_turns - self.turns
        done = right or left <= 0
        request = self.THINK if left > 1 else self.ANSWER
        return {
            "observations": [] if done else [{"role": "user", "content": request}],
            "reward": reward,
            "done": done,
            "metadata": {"parsed_answer": found},
        }

    def get_metrics(self) -> dict[str, Any]:
        """Return ``steps``: turns taken."""
        return {"steps": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: Any) -> dict[str, float]:
        """Return ``avg_steps``: mean turns."""
        steps = [float(episode.get("steps", 0)) for episode in metrics]
        return {"avg_steps": sum(steps) / len(steps)} if steps else {}
