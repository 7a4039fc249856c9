"""Arithmetic with known answers: ``multiply`` (one or several turns) and ``addition``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, answer_text, require_ground_truth

_BOXED = re.compile(r"\\boxed\{([^}]+)\}")


class MultiplyEnv(BaseTextEnv):
    r"""Multiplication with the answer in ``\boxed{}``.

    With one turn (``max_turns=1``) the reward is 1 for the right answer, else 0. With several turns a wrong answer
    gets feedback and another turn, and the first right answer ends the episode. The reward of the last turn is 1 for
    the right answer, 0.5 for a wrong answer in the right form, else 0.
    """

    WRONG_BUT_WELL_FORMED = 0.5

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.answer = answer_text(self, require_ground_truth(self)).strip()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        boxed = _BOXED.search(action)
        answer = boxed[1].strip() if boxed else None
        right = answer == self.answer
        done = right or self.turns >= self.max_turns
        reward = float(right)
        if done and not right and answer is not None and self.max_turns > 1:
            reward = self.WRONG_BUT_WELL_FORMED
        if answer is None:
            feedback = "There is no answer yet: give it in the form \\boxed{your_answer}."
        else:
            feedback = f"The answer '{answer}' is wrong. Try again."
        return {
            "observations": [] if done else [{"role": "user", "content": feedback}],
            "reward": reward,
            "done": done,
            "metadata": {"parsed_answer": answer},
        }


class AdditionEnv(BaseTextEnv):
    """Addition. The reward is 1 if the response is the answer, apart from white space, else 0.

    With several turns a wrong number gets the feedback ``higher`` or ``lower`` and another turn, and the first right
    answer ends the episode; what is no number gets ``number``.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.answer = answer_text(self, require_ground_truth(self)).strip()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = action.strip()
        right = answer == self.answer
        done = right or self.turns >= self.max_turns
        feedback = "number"
        if answer.isdecimal() and self.answer.isdecimal():
            feedback = "higher" if int(answer) < int(self.answer) else "lower"
        return {
            "observations": [] if done else [{"role": "user", "content": feedback}],
            "reward": float(right),
            "done": done,
            "metadata": {"parsed_answer": answer},
        }
