"""One attempt of an agent at a task in sandboxes, and its outcome.

An attempt has two sandboxes, one after the other. In the first, the agent's command works on the files of the task.
Then its workspace moves into a second one, which has no process, no file outside the workspace and no relay of the
first. The hidden tests are put there and run. The agent cannot read the tests, because they are nowhere before it has
ended, and it cannot change how they run except by the files that it hands in.

``expected`` output goes further: the tests print results and this process compares them, so that not even the files
that are handed in can find out what is right.

What an agent's files, processes or requests can bring about is a failure of the agent with reward 0, so that a policy
cannot turn a failure into no sample. A sandbox that fails after the agent began is tried again with an agent that does
nothing: only if that fails too, the attempt is no sample.

Tests that leave a reward in a folder, as Harbor's do, look at all that the agent may have changed. So they run in the
first sandbox, when no process of the agent and no relay is left; or in one of their own, into which the files that the
task names move.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.errors import CommandStartError, SandboxError, SandboxLimitError, SandboxStartError
from skyrl_megatron_agents.outcome_counts import Cause
from skyrl_megatron_agents.sandboxes.relay import CONNECTIONS, Relay
from skyrl_megatron_agents.sandboxes.sandbox import TESTS, CommandResult, Sandbox, SandboxSpec, pack, unpack
from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue
from skyrl_megatron_agents.task import Task, reward_of

if TYPE_CHECKING:
    from skyrl_megatron_agents.rows import OutcomeKind

COPY_S = 120.0
"""Time in seconds to move files inside a sandbox."""
HANDED = "/tmp/handed"
"""Where the files that move from the agent's sandbox into that of the tests are packed."""
HOME = f"{TESTS}/.home"
"""Home of tests that run in the agent's sandbox."""
SIGNALLED = 128
"""Exit codes above it are those of a command that a signal ended."""
TESTS_DISK = 64 << 20
"""Bytes that the tests may write in addition to the disk limit of the agent."""
MOST_OVERHEAD_S = 600.0
"""Time in seconds of an attempt in addition to the limits of agent and tests, without the wait for a place."""


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """How an agent is started: a program that speaks to a model's API and works in the current folder.

    ``{text}`` and ``{url}`` in a word of ``command`` and in a value of ``environment`` are replaced by the task's text
    and the URL of the server. ``environment`` is all that the agent gets: no variable of the run is added except
    :data:`skyrl_megatron_agents.sandboxes.sandbox.PASSED`. ``mounts``: folders with the agent's program, read-only.
    ``stdin``: what the program can read there. ``connections``: those to the server that it may have at once.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    stdin: bytes = b""
    connections: int = CONNECTIONS

    def filled(self, text: str, url: str) -> tuple[list[str], dict[str, str]]:
        """Return command and environment for one attempt."""

        def fill(word: str) -> str:
            return text.join(part.replace("{url}", url) for part in word.split("{text}"))

        return [fill(word) for word in self.command], {name: fill(value) for name, value in self.environment.items()}


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Outcome of an attempt with its reason. ``reward``: what the tests gave; None if they gave none. ``agent``,
    ``tests``: how the commands ended, None if they did not run. ``workspace``: what was handed in, as a tar archive.
    ``seconds``: duration by phase. ``cause``: by which the outcome is counted."""

    outcome: OutcomeKind
    reason: str
    reward: float | None = None
    agent: CommandResult | None = None
    tests: CommandResult | None = None
    workspace: bytes = b""
    seconds: Mapping[str, float] = field(default_factory=dict)
    cause: Cause = Cause.TESTS


IDLE = AgentCommand(["true"])
"""An agent that does nothing."""


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
    from skyrl_megatron_agents.rows import OutcomeKind  # with torch, which is not needed to read a task

    done: dict[str, Any] = {"seconds": {}}
    try:
        await _tried(task, agent, queue, server, group, context_full, done)
    except SandboxError as error:
        return await _failed(task, queue, group, done, error)
    if done["agent"].timed_out:
        why = f"the agent took {task.agent_timeout_s:g} s"
        return AttemptResult(OutcomeKind.TIMED_OUT, why, **done, cause=Cause.TIME)
    if context_full():
        return AttemptResult(OutcomeKind.CONTEXT_FULL, "the agent's context was full", **done, cause=Cause.CONTEXT)
    reason = _why_failed(task, done["tests"], done.get("reward"))
    done["reward"] = reward = done.get("reward") or float(not reason)
    kind = OutcomeKind.of(0.0 if reason else reward)
    passed = "tests pass" if kind is OutcomeKind.SOLVED else f"the tests gave reward {reward:g}"
    return AttemptResult(kind, reason or passed, **done)


async def run_alone(
    task: Task, agent: AgentCommand, queue: SandboxQueue, *, server: tuple[str, int] | None = None, group: str = ""
) -> CommandResult | AttemptResult:
    """Run an agent on a task without tests. Returns how its command ended, or how the attempt did where its sandbox
    failed. The arguments are those of :func:`attempt`."""
    done: dict[str, Any] = {"seconds": {}}
    try:
        await _tried(task, agent, queue, server, group, lambda: False, done)
    except SandboxError as error:
        return await _failed(task, queue, group, done, error)
    ended: CommandResult = done["agent"]
    return ended


async def _tried(
    task: Task,
    agent: AgentCommand,
    queue: SandboxQueue,
    server: tuple[str, int] | None,
    group: str,
    context_full: Callable[[], bool],
    done: dict[str, Any],
) -> None:
    """Run an agent, and the tests if it ended by itself. Puts what happened into ``done``. Raises SandboxError."""
    seconds = done["seconds"]

    async def judged(sandbox: Sandbox) -> None:
        if done["agent"].timed_out or context_full() or not task.command:
            return
        with _timed(seconds, "tests"):
            done.update(await _tested(task, sandbox))

    in_place = (task.rewards and task.place is None) or not task.command
    with _timed(seconds, "agent"):
        ended = await run_agent(task, agent, queue, server, group, done, then=judged if in_place else None)
    seconds["agent"] -= seconds.get("tests", 0.0)
    if not (in_place or ended.timed_out or context_full()):
        with _timed(seconds, "tests"):
            done.update(await _run_tests(task, queue, group, done["workspace"]))


async def _failed(
    task: Task, queue: SandboxQueue, group: str, done: dict[str, Any], error: SandboxError
) -> AttemptResult:
    """Return the result of an attempt whose sandbox failed: a failure of the agent, if one that does nothing gets
    through. No agent can bring about that a sandbox or its own command does not start."""
    from skyrl_megatron_agents.rows import OutcomeKind

    why = str(error)
    unstarted = isinstance(error, CommandStartError) and "agent" not in done
    if not (unstarted or isinstance(error, SandboxStartError)):
        try:
            await _tried(task, IDLE, queue, None, group, lambda: False, {"seconds": {}})
        except SandboxError as repeated:
            why = why if str(repeated) == why else f"{why}; with an agent that does nothing: {repeated}"
        else:
            cause = Cause.LIMIT if isinstance(error, SandboxLimitError) else Cause.FILES
            return AttemptResult(OutcomeKind.FAILED, why, **{**done, "reward": 0.0, "cause": cause})
    return AttemptResult(OutcomeKind.INFRASTRUCTURE, why, **{**done, "reward": None, "cause": Cause.SANDBOX})


async def run_agent(
    task: Task,
    agent: AgentCommand,
    queue: SandboxQueue,
    server: tuple[str, int] | None,
    group: str,
    done: dict[str, Any],
    then: Callable[[Sandbox], Awaitable[None]] | None = None,
) -> CommandResult:
    """Run the agent in its sandbox, and put how it ended and its workspace into ``done``. With ``then``, call that
    instead of reading the workspace. The other arguments are those of :func:`attempt`. Raises SandboxError."""
    mounts = {**task.spec.mounts, **agent.mounts}
    spec = replace(
        _with_lifetime(task.spec, task.agent_timeout_s + task.tests_timeout_s + MOST_OVERHEAD_S),
        mounts=mounts,
        relay=server is not None,
    )
    async with queue.sandbox(spec, group) as sandbox:
        if task.files:
            await sandbox.put(pack(task.files), task.folder or "/")
        async with contextlib.AsyncExitStack() as stack:
            url = ""
            if server is not None:
                relay = Relay(sandbox, *server, at_once=agent.connections)
                url = (await stack.enter_async_context(relay)).url
            command, environment = agent.filled(task.text, url)
            ended: CommandResult
            ended = done["agent"] = await sandbox.run(
                command,
                timeout_s=task.agent_timeout_s,
                environment={**task.environment, **environment},
                folder=task.folder,
                stdin=agent.stdin,
            )
        if then is not None:
            await then(sandbox)
        elif task.place is not None:
            done["workspace"] = await _handed(task.place.handed, sandbox)
        else:
            done["workspace"] = await sandbox.get(task.folder)
    return ended


async def _handed(paths: Sequence[str], sandbox: Sandbox) -> bytes:
    """Return files and folders of a sandbox as an archive of :data:`HANDED`, which has them at their paths."""
    # A name with a new line or a backslash is another path, or several, in the list that tar reads.
    plain = "! -path '*\n*' ! -path '*\\\\*'"
    kinds = f"\\( -type f -o -type l \\) {plain} -print"
    listed = "; ".join(f"[ ! -e {path} ] || find {path} {kinds}" for path in map(shlex.quote, paths))
    command = f"mkdir -p {HANDED} && cd / && {{ {listed}; }} | tar -cf {HANDED}/files.tar -T -"
    packed = await sandbox.run(["sh", "-c", command], timeout_s=COPY_S, folder="/")
    if packed.exit_code:
        raise SandboxError(f"files of an agent cannot be read: {packed.stderr.decode(errors='replace')[:500]}")
    return await sandbox.get(HANDED)


async def _run_tests(task: Task, queue: SandboxQueue, group: str, workspace: bytes) -> dict[str, Any]:
    spec = _with_lifetime(task.place.spec if task.place else task.spec, task.tests_timeout_s + MOST_OVERHEAD_S)
    limits = replace(spec.limits, disk=spec.limits.disk + TESTS_DISK)  # an agent that filled its disk leaves no room
    spec = replace(spec, limits=limits, relay=False)
    async with queue.sandbox(spec, group) as sandbox:
        await sandbox.put(workspace, task.folder if task.place is None else HANDED)
        if task.place is not None:
            command = ["tar", "-xf", f"{HANDED}/files.tar", "-C", "/"]
            moved = await sandbox.run(command, timeout_s=COPY_S, folder="/")
            if moved.exit_code:
                said = moved.stderr.decode(errors="replace")[:500]
                raise SandboxError(f"the files of an agent cannot be put where its tests run: {said}")
        return await _tested(task, sandbox)


async def _tested(task: Task, sandbox: Sandbox) -> dict[str, Any]:
    """Put the tests into a sandbox and run them. Returns how they ended, and the reward that they left."""
    if task.rewards:  # the agent may have left any of these, or have handed them in
        left = task.rewards if task.place else f"{TESTS} {task.rewards}"
        command = ["sh", "-c", f"rm -rf {left} && mkdir -p {task.rewards}"]
        cleared = await sandbox.run(command, timeout_s=COPY_S, folder="/")
        if cleared.exit_code:
            raise SandboxError(f"{task.rewards} cannot be emptied: {cleared.stderr.decode(errors='replace')[:500]}")
    if task.tests:
        await sandbox.put(pack(task.tests, task.executable), TESTS)
    folder, environment = (
        (task.place.folder, task.place.environment) if task.place else (task.folder, task.environment)
    )
    variables = {**environment, **task.tests_environment}
    if task.rewards and task.place is None and (owned := getattr(sandbox, "owned", ())):
        await sandbox.put(pack({}), HOME)
        variables |= _out_of_reach(variables, owned)
    tested = await sandbox.run(task.command, timeout_s=task.tests_timeout_s, environment=variables, folder=folder)
    return {"tests": tested, "reward": await _left(task, sandbox, tested) if task.rewards else None}


def _out_of_reach(variables: Mapping[str, str], owned: Sequence[str]) -> dict[str, str]:
    """Return variables for tests in the agent's sandbox: an empty home, nothing of it that Python imports by itself,
    and the programs of folders that the agent may not write to before others of the same name."""
    changed = {"HOME": HOME, "PYTHONNOUSERSITE": "1"}
    if path := variables.get("PATH"):
        folders = path.split(":")
        changed["PATH"] = ":".join(
            sorted(folders, key=lambda each: any(Path(each).is_relative_to(at) for at in owned))
        )
    return changed


async def _left(task: Task, sandbox: Sandbox, tested: CommandResult) -> float | None:
    """Return the reward that the tests left; None if they did not end by themselves: what they ran may have ended them
    after it left a reward of its own. Of the two files, it counts only if the tests name it. Raises SandboxError if
    there is none."""
    if tested.timed_out or tested.out_of_memory or tested.exit_code > SIGNALLED:
        return None
    files = unpack(await sandbox.get(task.rewards))
    named = [name for name in files if any(name.encode() in content for content in task.tests.values())]
    if named:
        files = {name: files[name] for name in named}
    try:
        return reward_of(files)
    except SandboxError as error:
        said = (tested.stdout + tested.stderr).decode(errors="replace").strip()[-300:]
        raise SandboxError(f"{error}; the tests ended with exit code {tested.exit_code}: {said}") from error


def _with_lifetime(spec: SandboxSpec, seconds: float) -> SandboxSpec:
    return replace(spec, limits=replace(spec.limits, lifetime_s=min(spec.limits.lifetime_s, seconds)))


def _why_failed(task: Task, tested: CommandResult, reward: float | None) -> str:
    """Return why the tests do not pass, or nothing."""
    if tested.timed_out:
        return f"the tests took more than {task.tests_timeout_s:g} s"
    if tested.out_of_memory:
        return "the tests ran out of memory"
    if reward is not None:
        return "" if reward > 0 else f"the tests gave reward {reward:g}"
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
