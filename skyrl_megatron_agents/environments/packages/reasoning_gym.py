"""``reasoning-gym:NAME``: the tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym).

A task is made from the row's ``extra_info``: ``index``, ``seed`` and ``config``, the arguments of the data set.
:func:`rows` makes such rows. They keep the whole task as ``entry``, because some data sets of the package make another
one in each process (they iterate over sets, or draw from the global random numbers). A row without it is refused where
the task made here asks another question than its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron_agents.environments.packages import import_package

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
        entry = data[index]
        prompt = [
            {"role": "system", "content": texts.SYSTEM_PROMPTS[system]},
            {"role": "user", "content": entry["question"]},
        ]
        made = {"index": index, "seed": seed, "size": count, "config": json.dumps(config)}
        if (kept := _kept(entry)) is not None:
            made["entry"] = kept
        yield {"prompt": prompt, "env_class": f"reasoning-gym:{name}", "extra_info": made}


class ReasoningGym(BaseTextEnv):
    """One task. The answer is what the last ``<answer>`` of the response holds; the package scores it, in 0 to 1."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, name: str) -> None:
        super().__init__(env_config, extras)
        self.name = name
        made = self.extras.get("extra_info") or {}
        if "index" not in made or "seed" not in made:
            raise ValueError(f"reasoning-gym:{name} needs index and seed in extra_info, the row has {sorted(made)}")
        index = int(made["index"])
        self.data = _dataset(name, int(made["seed"]), int(made.get("size", index + 1)), made.get("config") or "{}")
        self.kept = made.get("entry")
        self.entry = self.data[index] if self.kept is None else _restored(json.loads(self.kept))

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the prompt. Raises DataError if it does not ask what the task does."""
        said = [str(message.get("content")) for message in prompt]
        if self.kept is None and not any(self.entry["question"] in text for text in said):
            raise DataError(
                f"reasoning-gym:{self.name}: the package makes another question here than the row asks, so no answer"
                " can be scored: make the rows anew with rows(), which keep the task as extra_info.entry. It asks"
                f" {self.entry['question'][:200]!r}"
            )
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the response."""
        answer = texts.extract_answer(action)
        reward = float(self.data.score_answer(answer, entry=self.entry))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"answer": answer})


def _kept(entry: Any) -> str | None:
    """Return a task as JSON from which :func:`_restored` makes an equal one; None for one with other kinds of
    values."""
    try:
        text = json.dumps(_tagged(entry))
    except (TypeError, ValueError):
        return None
    return text if _restored(json.loads(text)) == entry else None


def _tagged(value: Any) -> Any:
    """Return a value with the kind of each collection, as JSON has lists and keys of text only."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return ["dict", *([_tagged(key), _tagged(each)] for key, each in value.items())]
    if type(value) in (list, tuple, set):
        return [type(value).__name__, *map(_tagged, value)]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _restored(tagged: Any) -> Any:
    if not isinstance(tagged, list):
        return tagged
    kind, *rest = tagged
    if kind == "dict":
        return {_restored(key): _restored(each) for key, each in rest}
    return {"list": list, "tuple": tuple, "set": set}[kind](_restored(each) for each in rest)
