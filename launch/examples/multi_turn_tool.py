"""Train a policy to use a tool over several turns: a calculator.

    python launch/examples/multi_turn_tool.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. The policy writes ``<calc>17*23</calc>``, which ends the
turn because ``</calc>`` is a stop string; the environment calls the tool and answers with a message, whose tokens are
not trained on. What the policy says without a call is its answer.
"""

import re
import sys
from typing import Any

from skyrl_megatron.envs import BaseTextEnv, BaseTextEnvStepOutput, ToolGroup, register, tool


class Calculator(ToolGroup):
    """One tool. A group holds what its tools share; here nothing but a count."""

    def __init__(self) -> None:
        super().__init__("calculator")
        self.calls = 0

    @tool
    def multiply(self, first: str, second: str) -> str:
        """Return the product of two whole numbers. Raises ValueError for anything else."""
        self.calls += 1
        return str(int(first) * int(second))


class CalculatorEnv(BaseTextEnv):
    """1 for the right answer, whether or not the tool was called; the last turn must answer."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.calculator = Calculator()
        self.init_tool_groups([self.calculator])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        call = re.search(r"<calc>(.*?)\*(.*?)</calc>", action)
        if call is None or self.turns >= self.max_turns:
            reward = float(action.strip() == str(self.ground_truth))
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        try:
            found = self._execute_tool("calculator", "multiply", [call[1], call[2]])
        except ValueError as error:  # what the policy wrote is no number: it may learn from that
            found = f"error: {error}"
        observation = {"role": "user", "content": f"<result>{found}</result>"}
        return {"observations": [observation], "reward": 0.0, "done": False, "metadata": {}}

    def get_metrics(self) -> dict[str, float]:
        """Return ``tool_calls``, which becomes the metric ``environment/tool_calls``."""
        return {"tool_calls": float(self.calculator.calls)}


register("calculator", CalculatorEnv)

if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    keys = ["environment.env_class=calculator", "generator.max_turns=3", "generator.max_input_length=512"]
    sys.exit(main([*keys, "generator.sampling_params.stop=['</calc>']", *sys.argv[1:]]))
