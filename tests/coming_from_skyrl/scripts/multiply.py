"""Rows of a data set and the environment that grades them."""

import random
import re

from skyrl_megatron.envs import BaseTextEnv, BaseTextEnvStepOutput

NUM_DIGITS = 2
SYSTEM_PROMPT = {"role": "system", "content": r"Give the product in \boxed{}."}


def generate_multiplication_problem(num_digits):
    first, second = (random.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
    return f"{first} * {second}", str(first * second)


def rows(num_examples, split_name):
    examples = []
    for _ in range(num_examples):
        question, answer = generate_multiplication_problem(NUM_DIGITS)
        examples.append(
            {
                "data_source": "synthetic_multiply",
                "prompt": [SYSTEM_PROMPT, {"role": "user", "content": question}],
                "env_class": "multiply",
                "reward_spec": {"method": "rule", "ground_truth": answer},
                "extra_info": {"num_digits": NUM_DIGITS, "split": split_name},
            }
        )
    return examples


class MultiplyEnv(BaseTextEnv):
    def _parse_action(self, action: str) -> str:
        boxed = re.search(r"\\boxed\{([^}]+)\}", action)
        return boxed.group(1) if boxed else None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        given = self._parse_action(action)
        right = given is not None and given.strip() == str(self.ground_truth).strip()
        return BaseTextEnvStepOutput(
            observations=[], reward=1.0 if right else 0.0, done=True, metadata={"parsed_answer": given}
        )
