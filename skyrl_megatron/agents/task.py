"""Tasks that an agent works on in a sandbox, and the folders that they are read from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_megatron.errors import DataError
from skyrl_megatron.sandboxes.sandbox import WORKSPACE, Limits, SandboxSpec, read_folder


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a text, files, and hidden tests.

    ``command``: runs the tests in ``folder``; exit code 0 means solved. ``expected``: what it has to print in
    addition, or None. ``spec``: the sandbox of agent and tests. ``folder``: where agent and tests start, and where
    ``files`` are put; "" is the image's. ``environment``, ``tests_environment``: variables of both, and of the tests.
    ``executable``: names in ``tests`` that can be executed.

    ``rewards``: a folder in which the tests leave the reward (:func:`skyrl_megatron.agents.harbor_task.reward_of`),
    instead of by their exit code. Such tests run in the agent's sandbox after the agent, as they look at more than its
    folder.
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


def read_task(folder: Path) -> Task:
    """Read a task from a folder::

        task.md        the text
        task.toml      [tests] command (words), timeout_s, expected = true: expected.txt is what they print;
                       [agent] timeout_s; [sandbox] image, setup, cpus, memory, disk, processes (each optional)
        files/         what the agent starts with
        tests/         put into /tests after the agent has ended

    A folder with ``instruction.md`` is one of Harbor (:mod:`skyrl_megatron.agents.harbor_task`). Raises DataError that
    names the file and what is wrong.
    """
    if (folder / "instruction.md").is_file():
        from skyrl_megatron.agents.harbor_task import read_harbor_task  # which makes tasks of this module

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
