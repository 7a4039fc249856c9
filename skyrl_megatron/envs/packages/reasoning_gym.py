"""``reasoning-gym:NAME``: the tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym).

A task is made from the row's ``extra_info``: ``index``, ``seed`` and ``config``, the arguments of the data set.
:func:`rows` makes such rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_megatron.envs.packages import import_package
from skyrl_megatron.errors import DataError

gym = import_package("reasoning_gym", "reasoning-gym")
texts = import_package("reasoning_gym.utils", "reasoning-gym")


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    try:
        return gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning-gym:{name} with {config}: {error}") from error


def rows(name: str, count: int, *, seed: int = 0, system: str = "default", **config: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of a data set of the package. ``system``: a name of its system prompts. ``config``: arguments of the
    data set. Raises DataError for an unknown name or argument."""
    data = _dataset(name, seed, count, json.dumps(config))
    for index in range(count):
        prompt = [
            {"role": "system", "content": texts.SYSTEM_PROMPTS[system]},
            {"role": "user", "content": data[index]["question"]},
        ]
        made = {"index": index, "seed": seed, "size": count, "config": json.dumps(config)}
        yield {"prompt": prompt, "env_class": f"reasoning-gym:{name}", "extra_info": made}


class ReasoningGym(BaseTextEnv):
    """One task. The answer is what the last ``<answer>`` of the response holds; the package scores it, in 0 to 1."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, name: str) -> None:
        super().__init__(env_config, extras)
        made = self.extras.get("extra_info") or {}
        if "index" not in made or "seed" not in made:
            raise ValueError(f"reasoning-gym:{name} needs index and seed in extra_info, the row has {sorted(made)}")
        index = int(made["index"])
        self.data = _dataset(name, int(made["seed"]), int(made.get("size", index + 1)), made.get("config") or "{}")
        self.entry = self.data[index]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the response."""
        answer = texts.extract_answer(action)
        reward = float(self.data.score_answer(answer, entry=self.entry))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"answer": answer})
