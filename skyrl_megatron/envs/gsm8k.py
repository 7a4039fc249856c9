"""Grade-school maths (GSM8K, arXiv:2110.14168), graded by rule or by a language model with an OpenAI-style API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import httpx

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, answer_text, require_ground_truth

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_answer(text: str, *, strict: bool = True) -> str | None:
    """Return the number after the first ``####`` without thousands separators, or None.

    With ``strict=False`` return the last number of the text.
    """
    if strict:
        found = _STRICT.search(text)
        return found[1].replace(",", "") if found else None
    return next((n.replace(",", "") for n in reversed(_NUMBER.findall(text)) if n.strip(".,")), None)


class GSM8kEnv(BaseTextEnv):
    """One turn with reward 1 for the right number after ``####``, else 0."""

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
    """Several attempts. The first right answer ends the episode.

    The reward of a turn is 1 for the right answer, 0.2/max_turns for a wrong number in the right form, else 0. Metric
    ``steps``: number of turns.
    """

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
        answer = extract_answer(action)
        right = answer == self.answer
        reward = 1.0 if right else self.FORMAT_REWARD / self.max_turns if answer is not None else 0.0
        left = self.max_turns - self.turns
        done = right or left <= 0
        request = self.THINK if left > 1 else self.ANSWER
        return {
            "observations": [] if done else [{"role": "user", "content": request}],
            "reward": reward,
            "done": done,
            "metadata": {"parsed_answer": answer},
        }

    def get_metrics(self) -> dict[str, Any]:
        """Return ``steps``, the number of turns."""
        return {"steps": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: Any) -> dict[str, float]:
        """Return ``avg_steps``, the mean number of turns."""
        steps = [float(episode.get("steps", 0)) for episode in metrics]
        return {"avg_steps": sum(steps) / len(steps)} if steps else {}


_SCORE = re.compile(r"final score:\s*([01])(?:\.0)?\b", re.IGNORECASE)
_INSTRUCTIONS = """\
You grade answers to maths problems. Below are the reference solution and a student's solution.
The score is 1 if the student's solution ends with a line of the form "#### <number>" and that number equals the final
answer of the reference, and 0 in every other case. You may reason first. End with exactly one line:
### Final Score: <0 or 1>"""
TIMEOUT_S = 60.0
RETRIES = 2


class GSM8kLLMJudgeEnv(BaseTextEnv):
    """One turn, graded 0 or 1 by a language model.

    ``env_config`` has ``model`` and ``base_url`` of the endpoint (None: ``OPENAI_BASE_URL``, else OpenAI). The API key
    is ``OPENAI_API_KEY``. If the judge cannot be reached or returns no score, the trajectory fails; it does not get 0.
    """

    replayable = False  # the judge may return another score for the same text

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.reference = answer_text(self, require_ground_truth(self))
        url = env_config.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        self.url = f"{url.rstrip('/')}/chat/completions"

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Ask the judge. Raises RuntimeError with the endpoint."""
        content = f"{_INSTRUCTIONS}\n\nReference solution:\n{self.reference}\n\nStudent's solution:\n{action}"
        reply = self._ask([{"role": "user", "content": content}]).strip()
        found = _SCORE.findall(reply)
        if not found and reply not in {"0", "1"}:
            raise RuntimeError(f"the judge at {self.url} returned no score: {reply[-200:]!r}; use another model")
        score = float(found[-1] if found else reply)
        return {"observations": [], "reward": score, "done": True, "metadata": {"judge": reply}}

    def _ask(self, messages: list[dict[str, str]]) -> str:
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self.env_config.model, "messages": messages}
        with httpx.Client(transport=httpx.HTTPTransport(retries=RETRIES), timeout=TIMEOUT_S) as client:
            try:
                response = client.post(self.url, json=body, headers=headers)
                response.raise_for_status()
                return str(response.json()["choices"][0]["message"]["content"])
            except (httpx.HTTPError, LookupError, ValueError) as error:
                raise RuntimeError(
                    f"the judge at {self.url} (model {self.env_config.model}): {error}; check OPENAI_API_KEY and"
                    " environment.skyrl_gym.llm_as_a_judge"
                ) from error
