"""``verifiers:TASKSET``: tasks of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers), version 1.

A row names its task by ``extra_info``: ``index``, and ``config`` with the taskset's settings as JSON. :func:`rows`
makes such rows. The task's own rewards and judges score a conversation of one answer. A task that needs a container,
tools of its own or a simulated user is driven by its own harness; it is refused here.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from skyrl_megatron.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron_agents.environments.packages import import_package

vf = import_package("verifiers.v1", "verifiers")
loaders = import_package("verifiers.v1.utils.loaders", "verifiers")
traces = import_package("verifiers.v1.trace", "verifiers")
graph = import_package("verifiers.v1.graph", "verifiers")
messages = import_package("verifiers.v1.types", "verifiers")
states = import_package("verifiers.v1.state", "verifiers")


class _Tasks:
    """The tasks of a taskset, read as far as they are needed."""

    def __init__(self, name: str, config: str) -> None:
        try:
            made = loaders.taskset_config_type(name).model_validate({"id": name, **json.loads(config)})
            self.taskset = loaders.load_taskset(made)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"verifiers:{name} with {config}: {error}") from error
        kind = self.taskset.task_type()
        if self.taskset.toolsets(made) or kind.toolsets(kind.config_type()()) or kind.NEEDS_CONTAINER:
            raise DataError(f"verifiers:{name} has tools or a container of its own: use a taskset of texts")
        self._reading, self._rest, self._known = threading.Lock(), iter(self.taskset), list[Any]()

    def __getitem__(self, index: int) -> Any:
        with self._reading:
            missing = index + 1 - len(self._known)
            self._known += itertools.islice(self._rest, max(missing, 0))
        if index >= len(self._known):
            raise ValueError(
                f"the taskset has {len(self._known)} tasks, the row asks for index {index}: use "
                "indices below that number"
            )
        return self._known[index]


@lru_cache(maxsize=64)
def _tasks(name: str, config: str) -> _Tasks:
    return _Tasks(name, config)


def rows(name: str, count: int, **config: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of the first tasks of a taskset. ``config``: settings of the taskset. Raises DataError for a taskset
    that is not installed or not of texts, and ValueError for more rows than it has."""
    settings = json.dumps(config)
    for index in range(count):
        data = _tasks(name, settings)[index].data
        prompt = data.prompt if isinstance(data.prompt, list) else [messages.UserMessage(content=data.prompt or "")]
        if data.system_prompt is not None:
            prompt = [messages.SystemMessage(content=data.system_prompt), *prompt]
        said = [message.model_dump(exclude_none=True) for message in prompt]
        made = {"index": index, "config": settings}
        yield {"prompt": said, "env_class": f"verifiers:{name}", "extra_info": made}


class Verifiers(BaseTextEnv):
    """One task with one answer. The reward is the weighted sum that the package makes of the task's rewards."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, name: str) -> None:
        super().__init__(env_config, extras)
        made = self.extras.get("extra_info") or {}
        if "index" not in made:
            raise ValueError(f"verifiers:{name} needs index in extra_info, the row has {sorted(made)}")
        self.task = _tasks(name, made.get("config") or "{}")[int(made["index"])]
        for function in (*self.task.hooks("reward"), *(judge.score for judge in self.task.plugged_judges())):
            parameter = inspect.signature(function).parameters.get("runtime")
            if parameter is not None and parameter.default is inspect.Parameter.empty:
                raise ValueError(f"verifiers:{name}: its reward {function.__name__} needs a runtime of the package")
        self.prompt: ConversationType = []

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Take the conversation that the trace of the package begins with."""
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the answer. Raises what the task's rewards raise."""
        trace = self._trace(action)
        asyncio.run(self.task.score(trace))
        metadata = {"rewards": {name: each.value for name, each in trace.rewards.items()}, "metrics": trace.metrics}
        return BaseTextEnvStepOutput(observations=[], reward=float(trace.reward), done=True, metadata=metadata)

    def _trace(self, answer: str) -> Any:
        kinds = {"system": messages.SystemMessage, "user": messages.UserMessage}
        said = [
            kinds.get(str(message["role"]), messages.AssistantMessage)(content=message["content"])
            for message in self.prompt
        ]
        said.append(messages.AssistantMessage(content=answer))
        last = len(said) - 1
        nodes = [
            graph.MessageNode(parent=position - 1 if position else None, message=message, sampled=position == last)
            for position, message in enumerate(said)
        ]
        task = traces.TraceTask(
            type=type(self.task).__name__, data=self.task.data, key=self.task.key, hash=self.task.hash
        )
        agent = traces.AgentInfo(config=vf.AgentConfig())
        return traces.Trace(
            task=task, agent=agent, nodes=nodes, state=states.state_cls(type(self.task))(), is_completed=True, ok=True
        )
