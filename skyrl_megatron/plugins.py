"""Plugins: user modules that every process of a run imports, and the classes that they register.

A plugin is a module that registers its classes and functions on import. ``trainer.plugins`` names it, or an entry
point of an installed package does::

    [project.entry-points."skyrl_megatron.plugins"]
    mine = "my_package.my_module"

The packages around the core (``skyrl_megatron_agents`` and others) are plugins of this kind: their entry points
are in ``pyproject.toml``, and their ``__init__`` registers what they bring by path, so that nothing is imported before
it is used. The core names none of them.

The driver imports plugins before it checks the configuration. Ranks, engine actors and the processes of engines import
them at their start, or when they look up an unknown name. See docs/guides/plugins.md. Losses, estimators, environments
and model families have separate registries (:mod:`skyrl_megatron.algorithms`, :mod:`skyrl_megatron.envs`,
:mod:`bridges.families`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from skyrl_megatron import device
from skyrl_megatron.errors import ConfigError, Problem, set_up, with_origin

GROUP = "skyrl_megatron.plugins"
"""Entry point group of plugins."""
VARIABLE = "SKYRL_MEGATRON_PLUGINS"
"""Environment variable with the comma-separated ``trainer.plugins``. Every process of a run inherits it."""
FOLDERS = "SKYRL_MEGATRON_PLUGIN_FOLDERS"
"""Environment variable with the working directories of commands, which can contain plugins. Inherited as well."""


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, those named in the environment, and ``modules``.

    ``modules`` are added to the environment of the processes that this one starts. Repeated calls cost nothing. Raises
    ConfigError with every plugin that cannot be imported and the reason.
    """
    named = [*filter(None, os.environ.get(VARIABLE, "").split(",")), *modules]
    points: list[tuple[str, str, Callable[[], Any]]]
    points = [(f"entry point {GROUP}.{point.name}", point.value, point.load) for point in _installed()]
    points += [("trainer.plugins", name, partial(import_module, name)) for name in dict.fromkeys(named)]
    if named:
        _look_in_folders()
    problems = []
    for key, value, load in points:
        try:
            load()
        except Exception as error:
            fix = "name a module that is installed, on PYTHONPATH, in this folder, or in the folder of the script"
            problems.append(Problem(key, value, f"cannot be imported ({with_origin(error)}); {fix}"))
    if problems:
        raise ConfigError(problems)
    if named:
        os.environ[VARIABLE] = ",".join(dict.fromkeys(named))


def _look_in_folders() -> None:
    """Append the working directory of the command to ``sys.path``, after all installed packages."""
    folders = list(dict.fromkeys([*filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)), os.getcwd()]))
    os.environ[FOLDERS] = os.pathsep.join(folders)
    sys.path += [folder for folder in folders if folder not in sys.path]


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


class ClassRegistry:
    """Classes, or functions that make something, by name: the values of a configuration key, or of ``key`` in words.

    ``built_in``: values of the key that the package implements. ``reserved``: other names that cannot be registered.
    """

    def __init__(self, key: str, *built_in: str, reserved: tuple[str, ...] = ()) -> None:
        self.key, self.built_in, self.reserved = key, built_in, reserved
        self._classes: dict[str, Callable[..., Any]] = {}
        self._paths: dict[str, str] = {}

    def register[C: Callable[..., Any]](self, name: str) -> Callable[[C], C]:
        """Return a decorator that registers a class as ``name`` in this process.

        Registering the same class again changes nothing. Raises ConfigError if the name belongs to another class.
        """

        def decorate(cls: C) -> C:
            taken = self._paths.get(name) or (_path(self._classes[name]) if name in self._classes else None)
            if name in (*self.built_in, *self.reserved) or taken not in (None, _path(cls)):
                owner = taken or "built in"
                raise ConfigError([Problem(self.key, name, f"is taken ({owner}): register under another name")])
            self._classes[name] = cls
            return cls

        return decorate

    def register_path(self, name: str, path: str) -> None:
        """Register the class at ``path`` (``module:Class``), which is imported when it is looked up.

        Registering the same path again changes nothing. Raises ConfigError if the name is taken.
        """
        taken = self._paths.get(name) or (_path(self._classes[name]) if name in self._classes else None)
        if name in (*self.built_in, *self.reserved) or taken not in (None, path):
            owner = taken or "built in"
            raise ConfigError([Problem(self.key, name, f"is taken ({owner}): register under another name")])
        self._paths[name] = path

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the class registered as ``name``, or None. Loads all plugins first if the name is unknown."""
        if name not in (*self.built_in, *self._classes, *self._paths):
            load_plugins()
        if name in self._paths:
            registered: Callable[..., Any] = load_path(self._paths[name])
            return registered
        return self._classes.get(name)

    def require(self, name: str) -> Callable[..., Any]:
        """Return the class registered as ``name``. Raises ConfigError with the registered names if there is none."""
        if (registered := self.find(name)) is None:
            raise ConfigError(list(self.problems(name)))
        return registered

    def problems(self, name: str) -> Iterator[Problem]:
        """Yield a configuration problem if ``name`` is not registered. Loads all plugins first if it is unknown."""
        if name not in (*self.built_in, *self._paths, *self._classes):
            load_plugins()
        names = (*self.built_in, *self._paths, *self._classes)
        if name not in names:
            # an older installation of this package does not know the entry points of its newer parts
            none = f"no installed package registers one: install this package again ({set_up()})"
            yield Problem(self.key, name, f"not registered; known: {', '.join(names)}" if names else none)


class Additions[T]:
    """What acts in addition to the core at one place: functions or classes, in the order of registration."""

    def __init__(self) -> None:
        self._items: dict[str, T | str] = {}

    def register(self, item: T) -> T:
        """Add a function or class; a decorator. Registering the same one again changes nothing."""
        self._items.setdefault(f"{item.__module__}:{item.__qualname__}", item)  # type: ignore[attr-defined]
        return item

    def register_path(self, path: str) -> None:
        """Add the function or class at ``path`` (``module:name``), which is imported when :meth:`all` is called."""
        self._items.setdefault(path, path)

    def all(self) -> list[T]:
        """Return everything registered. Loads all plugins first."""
        load_plugins()
        return [load_path(item) if isinstance(item, str) else item for item in self._items.values()]


def load_path(path: str) -> Any:
    """Return the function or class at ``module:name``. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _path(cls: Callable[..., Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


METRICS: dict[str, dict[str, str]] = {}
"""Name or pattern of a metric that :func:`register_metric` added → ``better``, ``unit`` and ``meaning``."""


def register_metric(name: str, *, direction: str = "", unit: str = "", meaning: str = "") -> None:
    """Declare a metric of your own, which a trainer, a generator or a callback of yours measures.

    ``trainer.stop_when`` and ``trainer.best_metric`` take only names of docs/metrics.md and declared ones. ``name``:
    ``*`` matches anything without a slash. ``direction``: ``higher`` or ``lower`` values are better; "": neither.
    Raises ConfigError for another direction.
    """
    if direction not in ("higher", "lower", ""):
        raise ConfigError([Problem(f"metric {name}: direction", direction, 'must be "higher", "lower" or ""')])
    METRICS[name] = {"better": direction, "unit": unit, "meaning": meaning}


RULES: Additions[Callable[..., Any]] = Additions()
"""Rules of a configuration in addition to those of the core: functions of it, and of role → ``config.json`` of its
model, that yield a Problem for what is wrong and a text for what is questionable (``config/validate.py``). They open
no file and hold whatever starts the run."""
CHECKS: Additions[Callable[..., Any]] = Additions()
"""Checks before a run starts (:mod:`skyrl_megatron.checks`)."""
REPORTERS: Additions[Callable[..., Any]] = Additions()
"""Functions of (configuration, hardware) that yield lines for the report of ``--check``."""
DETAILS: Additions[Callable[..., Any]] = Additions()
"""The same of what ``--show-config`` adds to the report."""
RECORDERS: Additions[Callable[..., Any]] = Additions()
"""Classes that observe a run and write records of it (:mod:`skyrl_megatron.trainer.recorders`)."""
PARTS: Additions[type[Any]] = Additions()
"""Parts of a rank that act at the begin and end of its passes and steps (``runtime/parts.py``)."""

SINKS: Additions[Callable[..., Any]] = Additions()
"""Where the metrics of a run go in addition to ``metrics.jsonl`` and console: functions that return sinks."""

register_rule = RULES.register
register_check = CHECKS.register
register_reporter = REPORTERS.register
register_recorder = RECORDERS.register
register_part = PARTS.register
register_sink = SINKS.register

_RUN_FILES: dict[str, str] = {}


def register_run_file(name: str, file: str) -> None:
    """Let the last lines of a run name ``file``, a path in its folder, if it is there: ``name: path``."""
    _RUN_FILES[name] = file


def run_files() -> dict[str, str]:
    """Return name → path in the run's folder of the files that its last lines name. Loads all plugins first."""
    load_plugins()
    return dict(_RUN_FILES)


@dataclass(frozen=True, slots=True)
class Option:
    """An option that replaces what its command does, such as printing one row of the data."""

    value: str
    """What its value is called in ``--help``."""
    help: str
    """Its line in ``--help``."""
    path: str
    """``module:function`` of (arguments, class of the configuration), which returns the exit code."""

    def __call__(self, args: Sequence[str], config: type[Any]) -> int:
        """Run the option instead of the command. Returns the exit code."""
        code: int = load_path(self.path)(args, config)
        return code


OPTIONS: dict[str, Option] = {}
"""``--name`` → what it does in every command that takes ``key=value``."""


def register_option(name: str, path: str, *, value: str, help: str) -> None:
    """Register an option of the commands that take ``key=value``. Raises ConfigError if another has this name."""
    option = Option(value, help, path)
    if OPTIONS.setdefault(name, option) != option:
        raise ConfigError([Problem("option", name, f"is taken ({OPTIONS[name].path}): register another name")])


def option_lines() -> list[str]:
    """Return the lines of ``--help`` about registered options. A plugin that cannot be imported has none."""
    with contextlib.suppress(ConfigError):
        load_plugins()
    return [f"  {f'{name} {option.value}':<16}{option.help}" for name, option in OPTIONS.items()]


def requested_option(args: Iterable[str]) -> Option | None:
    """Return the first registered option among ``args``, or None. Loads all plugins if ``args`` have any option."""
    names = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
    if names:  # a plain run does not pay for the search
        load_plugins()
    return next((OPTIONS[name] for name in names if name in OPTIONS), None)


SCORERS = ClassRegistry("a scorer of batches")
"""What other models than policy, reference and critic say of a batch (``trainer/step_batch.py``)."""
OPTIMIZERS = ClassRegistry("optimizer_config.optimizer", "adam")
"""Optimizers that take Adam's place for some parameters (``runtime/partial_optimizer.py``)."""
ADAPTERS = ClassRegistry("trainer.policy.model.lora")
"""What is done with adapters: ``trained`` and ``saved`` (``runtime/adapters.py``), ``source`` and ``merged_source``
(``weight_sync/megatron_source.py``), ``sent`` (``workers/policy_rank.py``), ``served``
(``inference/vllm/settings.py``)."""
SOURCES = ClassRegistry("the source of a step's groups")
"""Subclasses of ``PromptRollouts``: where the groups of a step come from (``sources/source.py``)."""
FAMILY_LAYERS = ClassRegistry("a family's kind of layer", reserved=("attention", "window"))
"""Modules of layers that only some model families have, by what a family says of itself: an entry of
``ModelShape.mixers``, an attribute or a flag of its ``MegatronModelConfig`` (``runtime/model/layer_spec.py``)."""
RANK_ENGINES = ClassRegistry("the engine of a rank", "policy")
"""Subclasses of ``MegatronEngine``, by what the run trains (``engine_class`` of ``workers/megatron_worker.py``)."""

_ENGINE = "generator.inference_engine."
GENERATORS = ClassRegistry("generator.name", "skyrl_gym")
SAMPLERS = ClassRegistry("data.sampler", "shuffle", "in_order", "mixture", "list", "easy_to_hard", "pools")
ENGINES = ClassRegistry(f"{_ENGINE}backend", "vllm")
REMOTE_ENGINES = ClassRegistry(f"{_ENGINE}remote_urls")
"""Clients of engines that run elsewhere, by the scheme of their URL (``http``)."""
ENGINE_SERVICES = ClassRegistry("generator.inference_engine")
"""What a run serves next to its engines, by the setting that turns it on (``enable_http_endpoint``)."""
TEACHERS = ClassRegistry("trainer.teacher.models")
"""Clients of teachers that run elsewhere, by the scheme of their URL (``http``)."""
SANDBOXES = ClassRegistry("generator.agent.sandbox")
TRACKERS = ClassRegistry("trainer.logger", "console", "tensorboard")
TRANSPORTS = ClassRegistry(f"{_ENGINE}weight_sync_backend", device.NCCL, device.GLOO, reserved=("ipc",))
GATES = ClassRegistry("trainer.algorithm.dynamic_sampling.gates", "reward", "length", "staleness", "nonfinite")

register_generator = GENERATORS.register
register_sampler = SAMPLERS.register
register_gate = GATES.register
register_tracker = TRACKERS.register
register_engine = ENGINES.register
register_transport = TRANSPORTS.register
register_sandbox = SANDBOXES.register
register_optimizer = OPTIMIZERS.register
