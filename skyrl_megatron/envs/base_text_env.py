"""The interface of environments and tools, and the registry of environments by id.

An environment gets the policy's text and returns messages and a reward. An id that is not registered yet is looked up
in the plugins (:mod:`skyrl_megatron.plugins`), then in ``skyrl_gym`` if it is installed.
"""

from __future__ import annotations

import copy
import fnmatch
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, NotRequired, TypedDict

from skyrl_megatron.errors import DataError, SkyRLMegatronWarning
from skyrl_megatron.plugins import load_plugins


class tool:
    """Decorator that makes a method of a :class:`ToolGroup` a tool with the method's name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else partial(self.function, instance)


class ToolGroup:
    """Tools that share state, such as a connection. Subclasses mark their tools with ``@tool``."""

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
        """Call a tool. Raises ValueError for an unknown name."""
        if name not in self._tools:
            raise ValueError(f"tool group {self.name!r} has no tool {name!r}; it has {self.get_tool_names()}")
        return self._tools[name](*args, **kwargs)


def check_end_tags(action: str, tags: tuple[str, ...]) -> None:
    """Raise ValueError if text follows the first of ``tags`` in the turn, because the tags are not stop strings."""
    for tag in tags:
        before, found, after = action.partition(tag)
        if found and after:
            raise ValueError(
                f"text follows {tag} in the turn: add {' and '.join(tags)} to generator.sampling_params.stop"
            )
        if found:
            return


Message = dict[str, Any]
"""One chat message: ``role`` and ``content``."""
ConversationType = list[Message]


class BaseTextEnvStepOutput(TypedDict):
    """The result of one turn of the policy."""

    observations: ConversationType
    """Messages to append to the conversation; empty when done."""
    reward: float
    """Reward of this turn, assigned to its last token."""
    done: bool
    """Whether the episode is over."""
    metadata: dict[str, Any]
    """Additional data, which training does not read. Evaluation reads ``parsed_answer``, for majority votes."""
    postprocessed_action: NotRequired[str | None]
    """Text that replaces the turn in the conversation, if it differs from the policy's text. Its tokens were not
    sampled and are not trained on."""


class BaseTextEnv:
    """One episode. Subclasses must override :meth:`step` and may override the other methods.

    ``env_config``: the environment's section of ``environment.skyrl_gym``. ``extras``: the other columns of the
    dataset row, and ``max_turns``. The attribute ``ground_truth`` is ``extras["reward_spec"]["ground_truth"]``, or
    None if the row has none. An instance serves one trajectory. Its methods are called one at a time, from any thread.
    """

    replayable: bool = True
    """Whether the same actions always lead to the same state. If so, an interrupted trajectory can continue in a new
    instance, which first repeats the recorded turns. Set it to False if a step has external effects or is random: such
    trajectories restart. A result that differs from the recorded one is detected in any case."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        self.env_config = env_config
        self.extras = dict(extras or {})
        self.ground_truth: Any = (self.extras.get("reward_spec") or {}).get("ground_truth")
        self.turns = 0
        self.max_turns: int = self.extras.get("max_turns", 1)
        self.tool_groups: list[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return (initial conversation, metadata). Called before the first turn."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Return the result of the turn ``action``, the policy's text."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    def close(self) -> None:
        """Release resources. Called once, also when the trajectory ends early."""

    def get_metrics(self) -> dict[str, Any]:
        """Return metrics of the episode. Called once, at its end."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the mean of each metric over a batch of episodes."""
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
        raise ValueError(f"no tool group {tool_group_name!r}; known: {[group.name for group in self.tool_groups]}")


def require_ground_truth(env: BaseTextEnv) -> Any:
    """Return the row's ground truth. Raises ValueError if the row has none."""
    if env.ground_truth is None:
        raise ValueError(
            f"{type(env).__name__} needs a reference answer, but the row has no reward_spec.ground_truth: add it to"
            " the data, or choose another environment"
        )
    return env.ground_truth


def answer_text(env: BaseTextEnv, answer: Any) -> str:
    """Return a reference answer as text. Raises ValueError if it is neither text nor a number.

    The ``str`` of any other value, such as "True", would match no response.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        raise ValueError(
            f"{type(env).__name__} needs text or a number as answer, the row has {answer!r:.80}: write"
            " reward_spec.ground_truth as text"
        )
    return str(answer)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The registration of an environment."""

    id: str
    entry_point: str | Callable[..., Any]
    """``module:Class``, or the class itself."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the class, in addition to ``env_config`` and ``extras``."""
    config: str = ""
    """Its section of ``environment.skyrl_gym``. Empty: the section with the name of the id, if there is one."""
    override: bool = field(default=False, compare=False)
    """Whether it replaces a built-in environment, also one that is registered later."""

    def load(self) -> Callable[..., Any]:
        """Import the class. Raises DataError if the entry point cannot be loaded."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        module, _, name = self.entry_point.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
            return loaded
        except DataError:  # of a package that is not installed
            raise
        except (ImportError, AttributeError, ValueError) as error:
            raise DataError(
                f"environment {self.id!r}: entry point {self.entry_point!r} cannot be loaded ({error}): write it as"
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
    """Register an environment as ``id`` in this process.

    ``entry_point``: ``"module:Class"`` or the class. ``override``: replace an existing environment with this id, also
    a built-in one. Repeating a registration changes nothing; a different one under a taken id raises DataError.
    Register in the process that runs the rollouts: in a plugin (:mod:`skyrl_megatron.plugins`), or in the script that
    starts the run.
    """
    new, existing = EnvSpec(id, entry_point, dict(kwargs or {}), config, override), _registry.get(id)
    if existing is not None and existing.override and not override and _is_built_in(new):
        return  # a script registers before plugins are loaded: what it replaces may come after it
    if existing is not None and existing != new and not override:
        built_in = next(filter(_is_built_in, (existing, new)), None)
        whose = "is registered already" if built_in is None else "is built in"
        raise DataError(
            f"environment {id!r} {whose} ({(built_in or existing).entry_point}): choose another id, or replace it with"
            f" register({id!r}, ..., override=True)"
        )
    _registry[id] = new


def deregister(id: str) -> None:
    """Remove an environment. Raises DataError if it is not registered."""
    del _registry[spec(id).id]


def _is_built_in(spec_: EnvSpec) -> bool:
    """Return whether an environment comes with this package or with one around it, such as skyrl_megatron_agents."""
    return isinstance(spec_.entry_point, str) and spec_.entry_point.startswith("skyrl_megatron")


def spec(id: str) -> EnvSpec:
    """Return the registration of an id, from this registry or that of ``skyrl_gym``. Raises DataError if unknown.

    Loads all plugins first if the id is not in this registry.
    """
    if id not in _registry and _of_package(id) is None:
        load_plugins()
    if id.endswith(":") and id in _registry:
        raise DataError(f"environment {id!r} needs a name: write {id}NAME")
    registration = _registry.get(id) or _of_package(id) or _gym_specs().get(id)
    if registration is None:
        raise DataError(
            f"no environment {id!r}: register it with skyrl_megatron.envs.register, or use one of {registered()}"
        )
    return registration


def _of_package(id: str) -> EnvSpec | None:
    """Return the registration of ``PACKAGE:NAME`` where ``PACKAGE:`` is registered: its class gets ``name``."""
    package, colon, name = id.partition(":")
    of_all = _registry.get(package + colon) if name else None
    return of_all and EnvSpec(id, of_all.entry_point, {**of_all.kwargs, "name": name}, of_all.config)


def registered() -> list[str]:
    """Return all ids. Loads all plugins first."""
    load_plugins()
    return sorted({*_registry, *_gym_specs()})


def require(ids: Iterable[str], gym_config: Any = None) -> None:
    """Raise DataError for the first id that is unknown, not allowed (:func:`config_of`), or cannot be loaded."""
    for id in dict.fromkeys(ids):
        config_of(id, gym_config)
        spec(id).load()


def make(id: str, env_config: Any = None, extras: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Make an environment for one episode; see :class:`BaseTextEnv` for the arguments.

    Accepts any class with ``init``, ``step`` and ``close``. Raises DataError for an unknown id and for a class without
    one of these methods, and passes on errors of the constructor.
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
    """Return the section of ``environment.skyrl_gym`` for an environment; {} if there is none.

    Raises DataError for ``PACKAGE:NAME`` that its ``packages`` does not list: the name in a row decides which server
    the run asks for rewards, or which module it imports.
    """
    registration = spec(id)
    allowed = getattr(gym_config, "packages", None)
    is_of_package = id not in _registry and _of_package(id) is not None
    if is_of_package and allowed is not None and not any(fnmatch.fnmatchcase(id, pattern) for pattern in allowed):
        raise DataError(
            f"environment {id!r:.300} is not in environment.skyrl_gym.packages={list(allowed)}: list it there if rows"
            " may name it"
        )
    return getattr(gym_config, registration.config or id, {})


def aggregate_metrics(id: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Reduce the metrics of a batch of episodes of one environment."""
    aggregate = getattr(spec(id).load(), "aggregate_metrics", BaseTextEnv.aggregate_metrics)
    return dict(aggregate(list(metrics)))


def _gym_specs() -> Mapping[str, EnvSpec]:
    """Return the registrations of ``skyrl_gym``, or {} if it is not installed."""
    if importlib.util.find_spec("skyrl_gym") is None:
        return {}
    gym = importlib.import_module("skyrl_gym.envs.registration")
    return {id: EnvSpec(id, found.entry_point, found.kwargs) for id, found in gym.registry.items()}


def is_built_in(environment: Callable[..., Any]) -> bool:
    """Return whether the class of an environment is of this project: the core, or a package around it."""
    package = getattr(environment, "__module__", "").partition(".")[0]
    return package == "skyrl_megatron" or package.startswith("skyrl_megatron_")


def names_built_in(env_class: str) -> bool | None:
    """Return whether the environment registered as ``env_class`` is of this project; None if it cannot be loaded."""
    try:
        return is_built_in(spec(env_class).load())
    except DataError:
        return None


def warn_of_missing_answers(name: str, counts: Mapping[str, int], rows: int) -> None:
    """Warn of rows without ``reward_spec`` for environments of users, which may find their answers elsewhere.

    ``name``: the data set. ``counts``: environment → number of rows without ``reward_spec``. ``rows``: of all.
    """
    for env_class, count in counts.items():
        if count and names_built_in(env_class) is False:
            warnings.warn(
                f"{name}: {count} of {rows} rows have no reward_spec, so environment {env_class} cannot compute their "
                "reward from an answer in the row",
                SkyRLMegatronWarning,
                stacklevel=1,
            )
