"""What an agent gets, and the agent that is a command of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron_agents.gateway import Access
from skyrl_megatron_agents.outcome_counts import Cause
from skyrl_megatron_agents.rows import Outcome, OutcomeKind
from skyrl_megatron_agents.sandboxes.sandbox import CommandResult

PASSED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of this process that a command gets. Nothing else of its environment reaches an agent."""
END_S = 10.0
"""How long a command may take to end after SIGTERM."""
COLUMN = "agent"
"""Column of a row with all that its agent may see besides the prompt: an object, or JSON text of one."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent has to do, and how it calls the policy."""

    prompt: ConversationType
    """The messages of the dataset row."""
    extras: Mapping[str, Any]
    """The other columns of the row. They are the judge's: an agent's program gets :attr:`shown` only."""
    env_class: str
    trajectory_id: TrajectoryID
    access: Access
    timeout_s: float
    score: Callable[[str], Awaitable[float]]
    """Returns the reward that the environment ``env_class`` gives to a text."""
    context_full: Callable[[], bool] = lambda: False
    """Returns whether the last prompt did not fit into the context. Such a trajectory gets
    ``context_full_reward``."""

    @property
    def shown(self) -> dict[str, Any]:
        """All of the row that an agent's program may see, on any way: ``prompt``, and as ``extras`` what the column
        :data:`COLUMN` holds. A list of what is allowed, because any other column may have the answer or lead to it.
        Raises DataError for a column that is no object."""
        declared = self.extras.get(COLUMN)
        try:
            declared = json.loads(declared) if isinstance(declared, str) and declared else declared
        except (ValueError, RecursionError) as error:
            raise DataError(f"column {COLUMN}={declared:.80} of a row is no JSON object: {error}") from error
        if declared and not isinstance(declared, Mapping):
            raise DataError(f"column {COLUMN}={declared!r:.80} of a row must be an object: what its agent may see")
        return {"prompt": self.prompt, "extras": dict(declared or {})}

    @property
    def text(self) -> str:
        """``{text}`` of a command for a row without a task folder: the last message of the prompt."""
        return str(self.shown["prompt"][-1].get("content"))

    def as_json(self) -> bytes:
        """Return what a command that asks for it gets on stdin."""
        return json.dumps(self.shown, default=str).encode()


type Agent = Callable[[AgentTask], Awaitable[Outcome | float]]


class CommandAgent:
    """An agent that is a command. ``{text}`` in a word is :attr:`AgentTask.text`. It gets these variables:
    :data:`PASSED` of this process, ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``,
    ``ANTHROPIC_API_KEY``, ``AGENT_MODEL``, ``HOME`` (its folder) and those of ``environment``. With ``stdin``, it can
    read :attr:`AgentTask.shown` there as JSON; otherwise stdin is empty, because what a program does not read is
    left for each command of the policy.

    It runs in an empty folder, as this process may; in a sandbox with ``generator.name=agent``
    (:mod:`skyrl_megatron_agents.sandbox_agent`). ``reward`` gets the task and how the command ended; by default the
    environment of the row scores stdout. An exit code other than 0 is reward 0, unless ``reward`` is given: the
    policy's commands can end the program that runs them. (Without any call to the model the trajectory is no sample.)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        reward: Callable[[AgentTask, CommandResult], Awaitable[Outcome | float]] | None = None,
        stdin: bool = False,
    ) -> None:
        self.command, self.environment, self.reward = list(command), dict(environment or {}), reward
        self.stdin = stdin

    async def __call__(self, task: AgentTask) -> Outcome | float:
        """Run the command and return its outcome."""
        given = {name: os.environ[name] for name in PASSED if name in os.environ}
        variables = given | task.access.environment() | self.environment
        command = [task.text.join(word.split("{text}")) if "{text}" in word else word for word in self.command]
        ended = await _run(command, variables, task.as_json() if self.stdin else b"", task.timeout_s)
        if self.reward is None or ended.timed_out:
            return await outcome_of(task, ended)
        return await self.reward(task, ended)


async def outcome_of(task: AgentTask, ended: CommandResult) -> Outcome | float:
    """Return the outcome of a command whose output the environment of the row scores."""
    if ended.timed_out:
        return Outcome(OutcomeKind.TIMED_OUT, why=f"the command ran for {task.timeout_s:g} s")
    if why := why_it_failed(ended):
        return Outcome(OutcomeKind.FAILED, 0.0, why, Cause.PROGRAM)
    return await task.score(ended.stdout.decode(errors="replace"))


def why_it_failed(ended: CommandResult) -> str:
    """Return exit code and last lines of a command that failed; "" for one that did not."""
    if not ended.exit_code:
        return ""
    # Many agents write their errors to standard output.
    outputs = {"": ended.stderr, "stdout: ": ended.stdout}
    lines = {name: output.decode(errors="replace").strip().rpartition("\n")[2] for name, output in outputs.items()}
    last = "; ".join(f"{name}{line[:300]}" for name, line in lines.items() if line)
    return f"the command ended with code {ended.exit_code}: {last}"


async def _run(command: Sequence[str], variables: Mapping[str, str], stdin: bytes, timeout_s: float) -> CommandResult:
    """Run a command in an empty folder. Its process group ends with it, also when this is cancelled."""
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"HOME": folder, "TMPDIR": folder, **variables},
            cwd=folder,
            start_new_session=True,
        )
        work = asyncio.ensure_future(process.communicate(stdin))
        try:
            done, _ = await asyncio.wait([work], timeout=timeout_s)
            if not done:
                return CommandResult(-1, b"", b"", timed_out=True)
            out, err = work.result()
            return CommandResult(process.returncode or 0, out, err)
        finally:
            await _end_group(process.pid, work)


async def _end_group(leader: int, work: asyncio.Future[Any]) -> None:
    """End the processes of a group: with SIGTERM, and with SIGKILL after a while."""
    for number, wait_s in ((signal.SIGTERM, 0.0 if work.done() else END_S), (signal.SIGKILL, END_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
        if not work.done():
            await asyncio.wait([work], timeout=wait_s)
    work.cancel()
