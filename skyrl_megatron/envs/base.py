"""The interface of environments, their tools, and the registry by id.

An environment reads the policy's text and answers with messages and a reward. Ids that are not registered here are
looked up in an installed ``skyrl_gym``.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, NotRequired, TypedDict

from skyrl_megatron.errors import DataError


class tool:
    """Marks a method of a :class:`ToolGroup` as a tool under its own name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self.function, instance)


class ToolGroup:
    """Tools with common state, such as a connection. Subclasses mark their tools with ``@tool``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tools = {
            marked.name: getattr(self, attribute)
            for attribute in dir(type(self))
            if isinstance(marked := getattr(type(self), attribute), tool)
        }

    def get_name(self) -> str:
        """Return the group's name."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the tool of that name, or None."""
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the names of all tools."""
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return tool name → group name."""
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool. Raises ValueError for a name that the group does not have."""
        if name not in self._tools:
            raise ValueError(f"tool group {self.name!r} has no tool {name!r}; it has {self.get_tool_names()}")
        return self._tools[name](*args, **kwargs)


def check_end_tags(action: str, tags: tuple[str, ...]) -> None:
    """Raise ValueError when anything follows the first of ``tags`` in the turn: they are not set as stop strings."""
    for tag in tags:
        before, found, after = action.partition(tag)
        if found and after:
            raise ValueError(
                f"the turn goes on after {tag}: list {' and '.join(tags)} in generator.sampling_params.stop"
            )
        if found:
            return


Message = dict[str, Any]
"""One chat message: ``role`` and ``content``."""
ConversationType = list[Message]


class BaseTextEnvStepOutput(TypedDict):
    """Answer to one turn of the policy."""

    observations: ConversationType
    """Messages that the conversation continues with; empty when done."""
    reward: float
    """Reward of this turn; put on its last token."""
    done: bool
    """Whether the episode is over."""
    metadata: dict[str, Any]
    """Anything worth keeping; not read by training."""
    postprocessed_action: NotRequired[str | None]
    """The turn's text as it is to stand in the conversation, where that is not what the policy said. Its tokens were
    not sampled and are not trained on."""


class BaseTextEnv:
    """One episode. Subclasses override :meth:`step`, and the rest where they need it.

    ``env_config``: the environment's section of ``environment.skyrl_gym``. ``extras``: the other columns of the
    dataset row, and ``max_turns``. The attribute ``ground_truth`` is ``extras["reward_spec"]["ground_truth"]``, None
    where the row has none. An instance serves one trajectory; its methods are called one at a time, in threads.
    """

    replayable: bool = True
    """Whether the same actions lead to the same state, so that an interrupted trajectory can go on in a new instance
    that is stepped through its recorded turns. False where a step has effects outside or answers by chance: such
    trajectories start anew. An answer that differs from the recorded one is noticed either way."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self.env_config = env_config
        self.extras = dict(extras or {})
        self.ground_truth: Any = (self.extras.get("reward_spec") or {}).get("ground_truth")
        self.turns = 0
        self.max_turns: int = self.extras.get("max_turns", 1)
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return (conversation to start from, metadata), before the first turn."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer the turn ``action``."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def close(self) -> None:
        """Release what the episode holds. Called once, also when the trajectory ends early."""

    def get_metrics(self) -> dict[str, Any]:
        """Return metrics of the episode; called once, at its end."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Reduce the metrics of a batch of episodes to one number a name: the mean."""
        values: dict[str, list[float]] = {}
        for episode in metrics:
            for name, value in episode.items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(float(value))
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Set the tools of this environment."""
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup.update(group.get_tool_to_group_mapping())

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Call a tool with the positional arguments ``tool_input``. Raises ValueError if it is unknown."""
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"no tool group {tool_group_name!r}; there are {[group.name for group in self.tool_groups]}")


def require_ground_truth(env: BaseTextEnv) -> Any:
    """Return the row's ground truth. Raises ValueError where there is none to compare with."""
    if env.ground_truth is None:
        raise ValueError(f"{type(env).__name__} compares with a known answer: the row has no reward_spec.ground_truth")
    return env.ground_truth


def answer_text(env: BaseTextEnv, answer: Any) -> str:
    """Return an answer that responses are compared with as text. Raises ValueError for one that is no text or
    number: what ``str`` makes of it, such as "True", is no right answer to any question."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise ValueError(f"{type(env).__name__} compares with text or a number: the row's answer is {answer!r:.80}")
    return str(answer)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How an environment is made."""

    id: str
    entry_point: str | Callable[..., Any]
    """``module:Class``, or the class itself."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class beside ``env_config`` and ``extras``."""
    config: str = ""
    """Its section of ``environment.skyrl_gym``. Empty: the one named like the id, if there is one."""

    def load(self) -> Callable[..., Any]:
        """Import the class. Raises DataError when the entry point leads nowhere."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, name = self.entry_point.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return loaded
        except (ImportError, AttributeError, ValueError) as error:
            raise DataError(
                f"environment {self.id!r}: entry point {self.entry_point!r} cannot be loaded ({error}); it must read"
                " module:Class"
            ) from error


_registry: dict[str, EnvSpec] = {}


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: str = "",
    override: bool = False,
) -> None:
    """Make an environment known under ``id`` in this process.

    ``entry_point``: ``"module:Class"`` or the class. ``override``: take the place of whatever has the id, one that
    comes with the package included. The same registration again changes nothing; another one under an id that is
    taken raises DataError. Register in the process that runs the rollouts: in a plugin
    (:mod:`skyrl_megatron.plugins`), or in the script that starts the run.
    """
    spec_ = EnvSpec(id, entry_point, dict(kwargs or {}), config)
    taken = _registry.get(id)
    if taken is not None and taken != spec_ and not override:
        whose = "comes with the package" if _is_ours(taken) else "is registered already"
        raise DataError(
            f"environment {id!r} {whose} ({taken.entry_point}): take another id, or replace it with"
            f" register({id!r}, ..., override=True)"
        )
    _registry[id] = spec_


def deregister(id: str) -> None:
    """Forget an environment. Raises DataError when there is none."""
    del _registry[spec(id).id]


def _is_ours(spec_: EnvSpec) -> bool:
    return isinstance(spec_.entry_point, str) and spec_.entry_point.startswith("skyrl_megatron.envs.")


def spec(id: str) -> EnvSpec:
    """Return the registration of an id, ours or ``skyrl_gym``'s. Raises DataError that lists what there is."""
    found = _registry.get(id) or _gym_specs().get(id)
    if found is None:
        known = sorted({*_registry, *_gym_specs()})
        raise DataError(f"no environment {id!r}: register it with skyrl_megatron.envs.register, or use one of {known}")
    return found


def registered() -> list[str]:
    """Return all ids."""
    return sorted({*_registry, *_gym_specs()})


def require(ids: Iterable[str]) -> None:
    """Raise DataError for the first id that cannot be made."""
    for id in dict.fromkeys(ids):
        spec(id).load()


def make(id: str, env_config: Any = None, extras: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Make an environment for one episode; see :class:`BaseTextEnv` for the arguments.

    Anything with ``init``, ``step`` and ``close`` is accepted. Raises DataError for unknown ids and for classes that
    lack one of them; what the constructor raises passes through.
    """
    spec_ = spec(id)
    env = spec_.load()(env_config=env_config, extras=extras or {}, **{**copy.deepcopy(dict(spec_.kwargs)), **kwargs})
    missing = [name for name in ("init", "step", "close") if not callable(getattr(env, name, None))]
    if missing:
        raise DataError(
            f"environment {id!r}: {type(env).__name__} has no {', '.join(missing)}: derive from BaseTextEnv"
        )
    return env


def config_of(id: str, gym_config: Any) -> Any:
    """Return the section of ``environment.skyrl_gym`` that an environment reads; an empty dict when it has none."""
    return getattr(gym_config, spec(id).config or id, {})


def aggregate_metrics(id: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Reduce the metrics of a batch of episodes of one environment."""
    aggregate = getattr(spec(id).load(), "aggregate_metrics", BaseTextEnv.aggregate_metrics)
    return dict(aggregate(list(metrics)))


def _gym_specs() -> Mapping[str, EnvSpec]:
    """Return the registrations of ``skyrl_gym``, where it is installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return {}
    gym = importlib.import_module("skyrl_gym.envs.registration")
    return {id: EnvSpec(id, found.entry_point, found.kwargs) for id, found in gym.registry.items()}
