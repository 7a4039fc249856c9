"""Tasks that an agent works on in a sandbox, and the folders that they are read from: our own, and Harbor's.

Harbor's (https://harborframework.com), in which Terminal-Bench and SWE benchmarks are published::

    instruction.md     the text; a canary at its head is not shown
    task.toml          [agent] and [verifier] timeout_sec, [environment] cpus, memory_mb, storage_mb, workdir, env …
    environment/       the context of a Dockerfile, which makes what the agent finds
    tests/test.sh      leaves a reward in /logs/verifier, as reward.txt or reward.json
    solution/solve.sh  is not read

They are used as they are. What a sandbox here cannot give is one error that names the key: a task of several steps or
services, another user, a GPU. A network is never there: tests that install packages
leave no reward. Harbor's package is not imported, because it excludes the versions of the engines' server; a test
compares what is read here with what its own classes read.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridges.errors import BridgeError
from bridges.files import TEXT_BYTES, TREE_BYTES, read_inside, read_tree
from skyrl_megatron.config.schema.generator import TaskEnvConfig
from skyrl_megatron.errors import DataError, SandboxError
from skyrl_megatron_agents.sandboxes.dockerfile import NAME, is_path, own_folders, working_folder
from skyrl_megatron_agents.sandboxes.sandbox import WORKSPACE, Limits, SandboxSpec
from skyrl_megatron_agents.task_settings import Settings, TaskBounds, read_settings, read_text, shown_value

REWARDS = "/logs/verifier"
FOLDERS = ("/logs", "/logs/agent", REWARDS, "/logs/artifacts")
OVERHEAD_S = 1200.0
"""Time in seconds of a sandbox in addition to the limits of agent and tests."""
REWARD_BYTES = 1 << 20
"""Bytes that are read of a file with a reward."""
TIMEOUT_S = 600.0
"""Time in seconds of agent and tests where the task sets none."""
AGENT_TIMEOUT_S, TESTS_TIMEOUT_S = 600.0, 60.0
"""Those of a task of our own format that sets none."""
TEST = "test.sh"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,400}")
"""A name of an image of a container engine."""
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{0,6})?)([KMG])B?")
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class TestsPlace:
    """A sandbox of the tests' own: what it is made of, where the tests start, and the files and folders of the agent's
    that they see, at the same paths."""

    __test__ = False  # for pytest
    spec: SandboxSpec
    folder: str
    environment: Mapping[str, str]
    handed: Sequence[str]


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a text, files, and hidden tests.

    ``command``: runs the tests in ``folder``; exit code 0 means solved. ``expected``: what it has to print in
    addition, or None. ``spec``: the sandbox of agent and tests. ``folder``: where agent and tests start, and where
    ``files`` are put; "" is the image's. ``environment``, ``tests_environment``: variables of both, and of the tests.
    ``executable``: names in ``tests`` that can be executed.

    ``rewards``: a folder in which the tests leave the reward (:func:`reward_of`), instead of by their exit code. Such
    tests run in the agent's sandbox after the agent, as they look at more than its folder; with ``place``, in that.
    """

    name: str
    text: str
    files: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    command: Sequence[str]
    expected: bytes | None = None
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    agent_timeout_s: float = AGENT_TIMEOUT_S
    tests_timeout_s: float = TESTS_TIMEOUT_S
    folder: str = WORKSPACE
    environment: Mapping[str, str] = field(default_factory=dict)
    tests_environment: Mapping[str, str] = field(default_factory=dict)
    executable: Sequence[str] = ()
    rewards: str = ""
    place: TestsPlace | None = None


def read_task(folder: Path, bounds: TaskEnvConfig | None = None) -> Task:
    """Read a task from a folder::

        task.md        the text
        task.toml      [tests] command (words), timeout_s, expected = true: expected.txt is what they print;
                       [agent] timeout_s; [sandbox] image, setup, cpus, memory, disk, processes (each optional)
        files/         what the agent starts with
        tests/         put into /tests after the agent has ended

    A folder with ``instruction.md`` is one of Harbor (:func:`read_harbor_task`). ``bounds``: what it may ask for.
    Nothing outside of the folder is read, and no special file. Raises DataError that names the file and what is wrong.
    """
    if os.path.lexists(folder / "instruction.md"):
        return read_harbor_task(folder, bounds)
    most = TaskBounds(bounds or TaskEnvConfig())
    settings = read_settings(folder / "task.toml", folder)
    unknown = [
        f"{section}.{key}"
        for section, keys in settings.values.items()
        for key in (keys if isinstance(keys, dict) else [""])
        if key not in SETTINGS.get(section, ())
    ]
    if unknown:
        raise DataError(f"{folder / 'task.toml'}: unknown {', '.join(unknown)[:500]}: remove or correct it")
    tests, agent, sandbox = (settings.table(name) for name in ("tests", "agent", "sandbox"))
    if "command" not in tests:
        raise DataError(f"{folder / 'task.toml'}: tests.command is missing: give a list of words")
    limits = Limits(
        cpus=sandbox.number("cpus", Limits().cpus, most.cpus),
        memory=int(sandbox.number("memory", Limits().memory, most.memory)),
        disk=int(sandbox.number("disk", Limits().disk, most.disk)),
        processes=int(sandbox.number("processes", Limits().processes, most.processes)),
    )
    image = _image_named(sandbox, "image", "host", folder, most)
    expected = folder / "expected.txt"
    return Task(
        name=folder.name,
        text=read_text(folder / "task.md", folder, TEXT_BYTES),
        files=_files(folder / "files"),
        tests=_files(folder / "tests"),
        command=tests.words("command"),
        expected=_read(expected, folder) if tests.flag("expected") else None,
        spec=SandboxSpec(image, sandbox.text("setup"), limits=limits),
        agent_timeout_s=agent.number("timeout_s", AGENT_TIMEOUT_S, most.timeout_s),
        tests_timeout_s=tests.number("timeout_s", TESTS_TIMEOUT_S, most.timeout_s),
    )


SETTINGS = {
    "tests": ("command", "timeout_s", "expected"),
    "agent": ("timeout_s",),
    "sandbox": ("image", "setup", "cpus", "memory", "disk", "processes"),
}
"""Keys of ``task.toml`` by section."""


def _read(path: Path, folder: Path) -> bytes:
    try:
        return read_inside(path, folder, TREE_BYTES)
    except (OSError, BridgeError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from error


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder of a task; none if it has no such folder. Raises DataError."""
    if not os.path.lexists(folder):
        return {}
    try:
        return read_tree(folder)
    except (OSError, BridgeError) as error:
        raise DataError(f"{folder} of a task cannot be read: {error}") from error


def _image_named(settings: Settings, key: str, default: str, folder: Path, most: TaskBounds) -> str:
    """Return the image that a task names: a name of the provider, or a path in the task's folder, or one that the run
    allows. Raises DataError for any other path."""
    name, reason = settings.text(key, default), "a path outside of the task's folder: refused;"
    with contextlib.suppress(OSError, RuntimeError):  # no name of a file; links in a circle
        inside = (folder / name).resolve()
        if name not in ("", "host") and inside.is_relative_to(folder.resolve()):
            if inside.exists():
                return str(inside)
            if not name.startswith("~"):
                reason = (
                    f"a path in the task's folder, where nothing is ({inside}): add the image, or correct the path; or"
                )
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in most.images):
        return name
    if is_path(name):
        raise DataError(
            f"{settings.file}: {settings.name(key)}={name!r:.200} is {reason} list it in"
            " environment.skyrl_gym.task.images if tasks may use it"
        )
    if name and not _IMAGE.fullmatch(name):
        raise settings.wrong(key, "the name of an image, or a path in the task's folder")
    return name


def read_harbor_task(folder: Path, bounds: TaskEnvConfig | None = None) -> Task:
    """Read a task. Raises DataError that names the file and what is wrong or is not supported."""
    file, most = folder / "task.toml", TaskBounds(bounds or TaskEnvConfig())
    settings = read_settings(file, folder)
    agent, verifier, environment = (settings.table(name) for name in ("agent", "verifier", "environment"))
    if unsupported := _unsupported(folder, settings):
        raise DataError(f"{file}: {unsupported} is not supported: leave this task out")
    context, tests_folder = folder / "environment", folder / "tests"
    for path in (context, tests_folder):
        if path.is_symlink():
            raise DataError(f"{path} of a task is a link: refused; replace it with the folder")
    if not os.path.lexists(tests_folder / TEST):
        raise DataError(f"{tests_folder / TEST} of a task is missing: add it")
    times = [
        section.number("timeout_sec", TIMEOUT_S, most.timeout_s) if section.values.get("timeout_sec") else TIMEOUT_S
        for section in (agent, verifier)
    ]
    image, workdir, variables = _image(context, environment, folder, most)
    tests, separate = _files(tests_folder), None
    if _is_separate(verifier):
        its_environment = verifier.table("environment") if "environment" in verifier else environment
        bundled = os.path.lexists(tests_folder / NAME) or (
            "environment" in verifier and "docker_image" in its_environment
        )
        its_image, its_folder, its_variables = _image(
            tests_folder if bundled else context, its_environment, folder, most
        )
        handed = [
            artifact if isinstance(artifact, str) else artifact.text("source")
            for artifact in settings.tables_or_texts("artifacts")
        ]
        handed = [os.path.join(workdir or "/", path) for path in ("/logs/artifacts", *handed)]
        separate = TestsPlace(
            _spec(its_image, its_environment, (*own_folders(handed), its_folder), sum(times), most),
            its_folder,
            its_variables,
            handed,
        )
        tests = {} if bundled else tests
    return Task(
        name=folder.name,
        text=_without_canary(read_text(folder / "instruction.md", folder, TEXT_BYTES)),
        files={} if os.path.lexists(context / NAME) else _files(context),
        tests=tests,
        command=["sh", "-c", f"chmod +x /tests/{TEST}; /tests/{TEST}"],
        spec=_spec(image, environment, (workdir,), sum(times), most),
        agent_timeout_s=times[0],
        tests_timeout_s=times[1],
        folder=workdir,
        environment=variables,
        tests_environment=_variables(verifier),
        executable=[name for name in tests if os.access(tests_folder / name, os.X_OK)],
        rewards=REWARDS,
        place=separate,
    )


def _image(context: Path, environment: Settings, folder: Path, most: TaskBounds) -> tuple[str, str, dict[str, str]]:
    """Return the image of an environment, its working folder and its variables."""
    workdir, variables = "", dict[str, str]()
    if os.path.lexists(context / NAME):
        image = str(context.absolute())
        try:
            workdir, variables = working_folder(context / NAME)
        except SandboxError as error:
            raise DataError(f"a task cannot be read: {error}") from error
    elif not (image := _image_named(environment, "docker_image", "", folder, most)):
        why = f"{environment.file} has no environment.docker_image: add one of them"
        raise DataError(f"{context / NAME} is missing, and {why}")
    workdir = environment.text("workdir") or workdir
    if workdir and not workdir.startswith("/"):
        raise environment.wrong("workdir", "a path from the root of the sandbox on")
    return image, workdir, variables | _variables(environment)


def _spec(
    image: str, environment: Settings, folders: Sequence[str], lifetime_s: float, most: TaskBounds
) -> SandboxSpec:
    limits = replace(_limits(environment, most), lifetime_s=lifetime_s + OVERHEAD_S)
    return SandboxSpec(image, limits=limits, folders=(*FOLDERS, *filter(None, folders)))


def _is_separate(verifier: Settings) -> bool:
    return verifier.text("environment_mode", "separate" if "environment" in verifier else "shared") == "separate"


def reward_of(files: Mapping[str, bytes]) -> float:
    """Return the reward in the files that tests left: ``reward.json``, a number or an object whose ``reward``, or only
    number, it is; otherwise ``reward.txt``.

    Raises SandboxError if there is none, or it is no finite number.
    """
    name = next((name for name in ("reward.json", "reward.txt") if name in files), None)
    if name is None:
        raise SandboxError(f"the tests left no reward.txt or reward.json in {REWARDS}: let {TEST} write one")
    text = files[name][:REWARD_BYTES].decode(errors="replace")
    try:
        reward = json.loads(text) if name == "reward.json" else float(text)
        if isinstance(reward, dict):
            reward = reward["reward"] if "reward" in reward or len(reward) != 1 else next(iter(reward.values()))
        if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward):
            return float(reward)
    except (ValueError, KeyError, OverflowError, RecursionError):
        pass
    raise SandboxError(f"{REWARDS}/{name} has no reward, which is a finite number: {text[:200]!r}")


def _unsupported(folder: Path, settings: Settings) -> str:
    """Return the first setting of a task that no sandbox here can give, or nothing."""
    agent, verifier, environment = (settings.table(name).values for name in ("agent", "verifier", "environment"))
    artifacts = [
        artifact.values for artifact in settings.tables_or_texts("artifacts") if isinstance(artifact, Settings)
    ]
    asked = {
        "steps": bool(settings.values.get("steps")),
        "environment.os": settings.table("environment").text("os", "linux").lower() != "linux",
        "environment.gpus": bool(environment.get("gpus")),
        "environment.tpu": bool(environment.get("tpu")),
        "environment.mcp_servers": bool(environment.get("mcp_servers")),
        "environment.healthcheck": bool(environment.get("healthcheck")),
        "artifacts.service": any(artifact.get("service") not in (None, "main") for artifact in artifacts),
        "artifacts.exclude": any(artifact.get("exclude") for artifact in artifacts),
        "verifier.collect": bool(verifier.get("collect")),
        "agent.user": agent.get("user") not in (None, "root", 0),
        "verifier.user": verifier.get("user") not in (None, "root", 0),
        "environment/docker-compose.yaml": os.path.lexists(folder / "environment" / "docker-compose.yaml"),
    }
    return next((name for name, is_set in asked.items() if is_set), "")


def _limits(environment: Settings, most: TaskBounds) -> Limits:
    """Return the limits of ``[environment]``, in its present keys or its older ones (``memory = "2G"``)."""
    sizes: dict[str, int] = {}
    for ours, name, largest in (("memory", "memory", most.memory), ("disk", "storage", most.disk)):
        if environment.values.get(f"{name}_mb"):
            sizes[ours] = int(environment.number(f"{name}_mb", 1, largest / (1 << 20)) * (1 << 20))
        elif asked := environment.values.get(name):
            size = _SIZE.fullmatch(asked[:40].strip().upper()) if isinstance(asked, str) else None
            if size is None or not float(size[1]):
                fix = "write it as '2G' or '512M'"
                raise DataError(
                    f"{environment.file}: {environment.name(name)} = {shown_value(asked, repr)} is no size: {fix}"
                )
            sizes[ours] = int(environment.lowered(name, float(size[1]) * _UNITS[size[2]], largest)) or 1
        else:
            sizes[ours] = min(getattr(Limits(), ours), largest)
    cpus = (
        environment.number("cpus", 1, most.cpus) if environment.values.get("cpus") else min(Limits().cpus, most.cpus)
    )
    return Limits(cpus=cpus, processes=min(Limits().processes, most.processes), **sizes)


def _variables(settings: Settings) -> dict[str, str]:
    """Return the variables of a section. A template is its default: no variable of the run gets into a sandbox."""

    def default(match: re.Match[str]) -> str:
        if match[2] is None:
            name = settings.name("env")
            raise DataError(f"{settings.file}: {name} asks for {match[1]} of this machine: write its value there")
        return match[2]

    return {name: _TEMPLATE.sub(default, value) for name, value in settings.variables("env").items()}


def _without_canary(text: str) -> str:
    """Return the text without the lines at its head that mark it as data of a benchmark."""
    lines = text.split("\n")
    first = 0
    while first < len(lines) and _is_canary(lines[first].strip()):
        first += 1
    while first < len(lines) and not lines[first].strip():
        first += 1
    return "\n".join(lines[first:])


def _is_canary(line: str) -> bool:
    is_comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return is_comment and "canary" in line.lower()
