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

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import DataError, SandboxError
from skyrl_megatron.sandboxes.dockerfile import NAME, own_folders, working_folder
from skyrl_megatron.sandboxes.sandbox import WORKSPACE, Limits, SandboxSpec, read_folder

REWARDS = "/logs/verifier"
FOLDERS = ("/logs", "/logs/agent", REWARDS, "/logs/artifacts")
OVERHEAD_S = 1200.0
"""Time in seconds of a sandbox in addition to the limits of agent and tests."""
TIMEOUT_S = 600.0
"""Time in seconds of agent and tests where the task sets none."""
TEST = "test.sh"
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
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
    agent_timeout_s: float = 600.0
    tests_timeout_s: float = 60.0
    folder: str = WORKSPACE
    environment: Mapping[str, str] = field(default_factory=dict)
    tests_environment: Mapping[str, str] = field(default_factory=dict)
    executable: Sequence[str] = ()
    rewards: str = ""
    place: TestsPlace | None = None


def read_task(folder: Path) -> Task:
    """Read a task from a folder::

        task.md        the text
        task.toml      [tests] command (words), timeout_s, expected = true: expected.txt is what they print;
                       [agent] timeout_s; [sandbox] image, setup, cpus, memory, disk, processes (each optional)
        files/         what the agent starts with
        tests/         put into /tests after the agent has ended

    A folder with ``instruction.md`` is one of Harbor (:func:`read_harbor_task`). Raises DataError that
    names the file and what is wrong.
    """
    if (folder / "instruction.md").is_file():
        return read_harbor_task(folder)
    settings = read_file(folder / "task.toml", lambda path: tomllib.loads(path.read_text()))
    unknown = [
        f"{section}.{key}"
        for section, keys in settings.items()
        for key in (keys if isinstance(keys, dict) else [""])
        if key not in SETTINGS.get(section, ())
    ]
    if unknown:
        raise DataError(f"{folder / 'task.toml'}: unknown {', '.join(unknown)}: remove or correct it")
    tests, sandbox = settings.get("tests", {}), settings.get("sandbox", {})
    limits = {f"{name}_timeout_s": part["timeout_s"] for name, part in settings.items() if "timeout_s" in part}
    if not isinstance(tests.get("command"), list):
        raise DataError(f"{folder / 'task.toml'}: tests.command is missing: give a list of words")
    given = {name: sandbox[name] for name in ("cpus", "memory", "disk", "processes") if name in sandbox}
    spec = SandboxSpec(sandbox.get("image", "host"), sandbox.get("setup", ""), limits=Limits(**given))
    return Task(
        name=folder.name,
        text=read_file(folder / "task.md", lambda path: path.read_text()),
        files=read_folder(folder / "files"),
        tests=read_folder(folder / "tests"),
        command=tests["command"],
        expected=read_file(folder / "expected.txt", lambda path: path.read_bytes()) if tests.get("expected") else None,
        spec=spec,
        **limits,
    )


SETTINGS = {
    "tests": ("command", "timeout_s", "expected"),
    "agent": ("timeout_s",),
    "sandbox": ("image", "setup", "cpus", "memory", "disk", "processes"),
}
"""Keys of ``task.toml`` by section."""


def read_file[T](path: Path, read: Callable[[Path], T]) -> T:
    """Return what ``read`` makes of a file. Raises DataError that names the file."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from error


def read_harbor_task(folder: Path) -> Task:
    """Read a task. Raises DataError that names the file and what is wrong or is not supported."""
    file = folder / "task.toml"
    settings = read_file(file, lambda path: tomllib.loads(path.read_text()))
    agent, verifier, place = (settings.get(name, {}) for name in ("agent", "verifier", "environment"))
    if unsupported := _unsupported(folder, settings):
        raise DataError(f"{file}: {unsupported} is not supported: leave this task out")
    context, own = folder / "environment", folder / "tests"
    if not (own / TEST).is_file():
        raise DataError(f"{own / TEST} of a task is missing: add it")
    times = agent.get("timeout_sec") or TIMEOUT_S, verifier.get("timeout_sec", TIMEOUT_S)
    image, workdir, environment = _image(file, context, place)
    tests, separate = read_folder(own), None
    if _is_separate(verifier):
        given = verifier.get("environment", place)
        bundled = (own / NAME).is_file() or "docker_image" in verifier.get("environment", {})
        its_image, its_folder, its_environment = _image(file, own if bundled else context, given)
        handed = [each if isinstance(each, str) else each["source"] for each in settings.get("artifacts", [])]
        handed = [os.path.join(workdir or "/", each) for each in ("/logs/artifacts", *handed)]
        separate = TestsPlace(
            _spec(file, its_image, given, (*own_folders(handed), its_folder), sum(times)),
            its_folder,
            its_environment,
            handed,
        )
        tests = {} if bundled else tests
    return Task(
        name=folder.name,
        text=_without_canary(read_file(folder / "instruction.md", lambda path: path.read_text())),
        files={} if (context / NAME).is_file() or not context.is_dir() else read_folder(context),
        tests=tests,
        command=["sh", "-c", f"chmod +x /tests/{TEST}; /tests/{TEST}"],
        spec=_spec(file, image, place, (workdir,), sum(times)),
        agent_timeout_s=times[0],
        tests_timeout_s=times[1],
        folder=workdir,
        environment=environment,
        tests_environment=_variables(file, "verifier", verifier),
        executable=[name for name in tests if os.access(own / name, os.X_OK)],
        rewards=REWARDS,
        place=separate,
    )


def _image(file: Path, context: Path, place: Mapping[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Return the image of an environment, its working folder and its variables."""
    workdir, environment = "", dict[str, str]()
    if (context / NAME).is_file():
        image = str(context.absolute())
        workdir, environment = read_file(context / NAME, working_folder)
    elif not (image := place.get("docker_image", "")):
        raise DataError(f"{context / NAME} is missing, and {file} has no environment.docker_image: add one of them")
    return image, place.get("workdir") or workdir, environment | _variables(file, "environment", place)


def _spec(file: Path, image: str, place: Mapping[str, Any], folders: Sequence[str], lifetime_s: float) -> SandboxSpec:
    limits = replace(_limits(file, place), lifetime_s=lifetime_s + OVERHEAD_S)
    return SandboxSpec(image, limits=limits, folders=(*FOLDERS, *filter(None, folders)))


def _is_separate(verifier: Mapping[str, Any]) -> bool:
    mode = verifier.get("environment_mode", "separate" if "environment" in verifier else "shared")
    return bool(mode == "separate")


def reward_of(files: Mapping[str, bytes]) -> float:
    """Return the reward in the files that tests left: ``reward.json``, a number or an object whose ``reward``, or only
    number, it is; otherwise ``reward.txt``.

    Raises SandboxError if there is none, or it is no finite number.
    """
    name = next((name for name in ("reward.json", "reward.txt") if name in files), None)
    if name is None:
        raise SandboxError(f"the tests left no reward.txt or reward.json in {REWARDS}")
    text = files[name].decode(errors="replace")
    try:
        found = json.loads(text) if name == "reward.json" else float(text)
        if isinstance(found, dict):
            found = found["reward"] if "reward" in found or len(found) != 1 else next(iter(found.values()))
        if isinstance(found, int | float) and math.isfinite(found):
            return float(found)
    except (ValueError, KeyError):
        pass
    raise SandboxError(f"{REWARDS}/{name} has no reward, which is a finite number: {text[:200]!r}")


def _unsupported(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the first setting of a task that no sandbox here can give, or nothing."""
    agent, verifier, place = (settings.get(name, {}) for name in ("agent", "verifier", "environment"))
    artifacts = [each for each in settings.get("artifacts", []) if not isinstance(each, str)]
    found = {
        "steps": bool(settings.get("steps")),
        "environment.os": place.get("os", "linux").lower() != "linux",
        "environment.gpus": bool(place.get("gpus")),
        "environment.tpu": bool(place.get("tpu")),
        "environment.mcp_servers": bool(place.get("mcp_servers")),
        "environment.healthcheck": bool(place.get("healthcheck")),
        "artifacts.service": any(each.get("service") not in (None, "main") for each in artifacts),
        "artifacts.exclude": any(each.get("exclude") for each in artifacts),
        "verifier.collect": bool(verifier.get("collect")),
        "agent.user": agent.get("user") not in (None, "root", 0),
        "verifier.user": verifier.get("user") not in (None, "root", 0),
        "environment/docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").is_file(),
    }
    return next((name for name, is_set in found.items() if is_set), "")


def _limits(file: Path, place: Mapping[str, Any]) -> Limits:
    """Return the limits of ``[environment]``, in its present keys or its older ones (``memory = "2G"``)."""
    given: dict[str, Any] = {"cpus": place["cpus"]} if place.get("cpus") else {}
    for ours, name in (("memory", "memory"), ("disk", "storage")):
        if place.get(f"{name}_mb"):
            given[ours] = place[f"{name}_mb"] << 20
        elif found := re.fullmatch(r"([\d.]+)([KMG])B?", str(place.get(name, "")).strip().upper()):
            given[ours] = int(float(found[1]) * _UNITS[found[2]])
        elif place.get(name):
            raise DataError(f"{file}: environment.{name} = {place[name]!r} is no size: write it as '2G' or '512M'")
    return Limits(**given)


def _variables(file: Path, section: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a section. A template is its default: no variable of the run gets into a sandbox."""

    def default(match: re.Match[str]) -> str:
        if match[2] is None:
            raise DataError(f"{file}: {section}.env asks for {match[1]} of this machine: write its value there")
        return match[2]

    return {name: _TEMPLATE.sub(default, str(value)) for name, value in settings.get("env", {}).items()}


def _without_canary(text: str) -> str:
    """Return the text without the lines at its head that mark it as data of a benchmark."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)
