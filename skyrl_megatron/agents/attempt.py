"""One attempt of an agent at a task in sandboxes, and its outcome.

An attempt has two sandboxes, one after the other. In the first, the agent's command works on the files of the task.
Then its workspace moves into a second one, which has no process, no file outside the workspace and no relay of the
first. The hidden tests are put there and run. The agent cannot read the tests, because they are nowhere before it has
ended, and it cannot change how they run except by the files that it hands in.

``expected`` output goes further: the tests print results and this process compares them, so that not even the files
that are handed in can find out what is right.
"""

from __future__ import annotations

import contextlib
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import DataError, SandboxError, SandboxLimitError
from skyrl_megatron.sandboxes.relay import Relay
from skyrl_megatron.sandboxes.sandbox import TESTS, CommandResult, Limits, SandboxSpec, pack, read_folder
from skyrl_megatron.sandboxes.sandbox_queue import SandboxQueue

if TYPE_CHECKING:
    from skyrl_megatron.agents.rows import OutcomeKind

TESTS_DISK = 64 << 20
"""Bytes that the tests may write in addition to the disk limit of the agent."""
MOST_OVERHEAD_S = 600.0
"""Time in seconds of an attempt in addition to the limits of agent and tests, without the wait for a place."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a text, files, and hidden tests.

    ``command``: runs the tests in the workspace; exit code 0 means solved. ``expected``: what it has to print in
    addition, or None. ``spec``: the sandbox of agent and tests.
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


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """How an agent is started: a program that speaks to a model's API and works in the current folder.

    ``{text}`` and ``{url}`` in a word of ``command`` and in a value of ``environment`` are replaced by the task's text
    and the URL of the server. ``environment`` is all that the agent gets: no variable of the run is added except
    :data:`skyrl_megatron.sandboxes.sandbox.PASSED`. ``mounts``: folders with the agent's program, read-only.
    ``stdin``: what the program can read there.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    stdin: bytes = b""

    def filled(self, text: str, url: str) -> tuple[list[str], dict[str, str]]:
        """Return command and environment for one attempt."""

        def fill(word: str) -> str:
            return text.join(part.replace("{url}", url) for part in word.split("{text}"))

        return [fill(word) for word in self.command], {name: fill(value) for name, value in self.environment.items()}


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Outcome of an attempt with its reason. ``agent``, ``tests``: how the commands ended, None if they did not run.
    ``workspace``: what was handed in, as a tar archive. ``seconds``: duration by phase."""

    outcome: OutcomeKind
    reason: str
    agent: CommandResult | None = None
    tests: CommandResult | None = None
    workspace: bytes = b""
    seconds: Mapping[str, float] = field(default_factory=dict)


async def attempt(
    task: Task,
    agent: AgentCommand,
    queue: SandboxQueue,
    *,
    server: tuple[str, int] | None = None,
    group: str = "",
    context_full: Callable[[], bool] = lambda: False,
) -> AttemptResult:
    """Let an agent try a task once, and return the outcome. Raises nothing but cancellation and errors of the caller.

    ``server``: host and port that the agent's ``{url}`` leads to; None: it has no network at all. ``group``: the name
    for fairness in ``queue``, for example the prompt. ``context_full``: called after the agent ended; whether it was
    refused a sample because its context was full.
    """
    from skyrl_megatron.agents.rows import OutcomeKind  # with torch, which is not needed to read a task

    seconds: dict[str, float] = {}
    done: dict[str, Any] = {"seconds": seconds}
    try:
        with _timed(seconds, "agent"):
            ended = await run_agent(task, agent, queue, server, group, done)
        if ended.timed_out:
            return AttemptResult(OutcomeKind.TIMED_OUT, f"the agent took {task.agent_timeout_s:g} s", **done)
        if context_full():
            return AttemptResult(OutcomeKind.CONTEXT_FULL, "the agent's context was full", **done)
        with _timed(seconds, "tests"):
            tested = done["tests"] = await _run_tests(task, queue, group, done["workspace"])
    except SandboxLimitError as error:
        return AttemptResult(OutcomeKind.FAILED, str(error), **done)
    except SandboxError as error:
        return AttemptResult(OutcomeKind.INFRASTRUCTURE, str(error), **done)
    reason = _why_failed(task, tested)
    return AttemptResult(OutcomeKind.FAILED if reason else OutcomeKind.SOLVED, reason or "tests pass", **done)


async def run_agent(
    task: Task,
    agent: AgentCommand,
    queue: SandboxQueue,
    server: tuple[str, int] | None,
    group: str,
    done: dict[str, Any],
) -> CommandResult:
    """Run the agent in its sandbox, and put how it ended and its workspace into ``done``. The arguments are those of
    :func:`attempt`. Raises SandboxError."""
    mounts = {**task.spec.mounts, **agent.mounts}
    spec = replace(
        _with_lifetime(task.spec, task.agent_timeout_s + MOST_OVERHEAD_S), mounts=mounts, relay=server is not None
    )
    async with queue.sandbox(spec, group) as sandbox, contextlib.AsyncExitStack() as stack:
        await sandbox.put(pack(task.files))
        url = "" if server is None else (await stack.enter_async_context(Relay(sandbox, *server))).url
        command, environment = agent.filled(task.text, url)
        ended = done["agent"] = await sandbox.run(
            command, timeout_s=task.agent_timeout_s, environment=environment, stdin=agent.stdin
        )
        done["workspace"] = await sandbox.get()
    return ended


async def _run_tests(task: Task, queue: SandboxQueue, group: str, workspace: bytes) -> CommandResult:
    spec = _with_lifetime(task.spec, task.tests_timeout_s + MOST_OVERHEAD_S)
    limits = replace(spec.limits, disk=spec.limits.disk + TESTS_DISK)  # an agent that filled its disk leaves no room
    spec = replace(spec, limits=limits, relay=False)
    async with queue.sandbox(spec, group) as sandbox:
        await sandbox.put(workspace)
        await sandbox.put(pack(task.tests), TESTS)
        return await sandbox.run(task.command, timeout_s=task.tests_timeout_s)


def _with_lifetime(spec: SandboxSpec, seconds: float) -> SandboxSpec:
    return replace(spec, limits=replace(spec.limits, lifetime_s=min(spec.limits.lifetime_s, seconds)))


def _why_failed(task: Task, tested: CommandResult) -> str:
    """Return why the tests do not pass, or nothing."""
    if tested.timed_out:
        return f"the tests took more than {task.tests_timeout_s:g} s"
    if tested.out_of_memory:
        return "the tests ran out of memory"
    if tested.exit_code:
        return f"the tests ended with exit code {tested.exit_code}"
    if task.expected is not None and tested.stdout != task.expected:
        return "the tests printed other results"
    return ""


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record the duration of a block, also if it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = time.monotonic() - began


def read_task(folder: Path) -> Task:
    """Read a task from a folder::

        task.md        the text
        task.toml      [tests] command (words), timeout_s, expected = true: expected.txt is what they print;
                       [agent] timeout_s; [sandbox] image, setup, cpus, memory, disk, processes (each optional)
        files/         what the agent starts with
        tests/         put into /tests after the agent has ended

    Raises DataError that names the file and what is wrong.
    """
    settings = _read(folder / "task.toml", lambda path: tomllib.loads(path.read_text()))
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
        text=_read(folder / "task.md", lambda path: path.read_text()),
        files=read_folder(folder / "files"),
        tests=read_folder(folder / "tests"),
        command=tests["command"],
        expected=_read(folder / "expected.txt", lambda path: path.read_bytes()) if tests.get("expected") else None,
        spec=spec,
        **limits,
    )


SETTINGS = {
    "tests": ("command", "timeout_s", "expected"),
    "agent": ("timeout_s",),
    "sandbox": ("image", "setup", "cpus", "memory", "disk", "processes"),
}
"""Keys of ``task.toml`` by section."""


def _read[T](path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from error
