"""Train in an environment of one's own: it grades how near an answer is, not only whether it is right.

    python launch/examples/own_environment.py [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. An environment is a class with ``step``: the text of a turn
in, a reward out. It runs in threads of the driver, so it needs no installed module.
"""

import sys

from skyrl_megatron.envs import BaseTextEnv, BaseTextEnvStepOutput, register
from skyrl_megatron.envs.gsm8k import extract_answer


class Nearness(BaseTextEnv):
    """1 for the right number behind ``####``, less the further off it is, 0 from 10 on and without a number."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        said = extract_answer(action)
        try:
            distance = abs(float(said or "nan") - float(self.ground_truth))
        except ValueError:  # such as "1.2.3"
            distance = float("nan")
        reward = max(0.0, 1.0 - distance / 10) if distance == distance else 0.0
        self.exact = distance == 0
        return {"observations": [], "reward": reward, "done": True, "metadata": {"said": said}}

    def get_metrics(self) -> dict[str, float]:
        """Return ``exact``, which becomes the metric ``environment/exact``: the share of right answers."""
        return {"exact": float(self.exact)}


register("nearness", Nearness)

if __name__ == "__main__":
    from skyrl_megatron.entrypoints.main_base import main

    sys.exit(main(["environment.env_class=nearness", *sys.argv[1:]]))
