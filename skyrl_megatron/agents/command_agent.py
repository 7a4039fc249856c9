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

from skyrl_megatron.agents.gateway import Access
from skyrl_megatron.agents.rows import Outcome, OutcomeKind
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.rollout.interface import TrajectoryID
from skyrl_megatron.sandboxes.sandbox import CommandResult

PASSED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of this process that a command gets. Nothing else of its environment reaches an agent."""
END_S = 10.0
"""How long a command may take to end after SIGTERM."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent has to do, and how it calls the policy."""

    prompt: ConversationType
    """The messages of the dataset row."""
    extras: Mapping[str, Any]
    """The other columns of the row."""
    env_class: str
    trajectory_id: TrajectoryID
    access: Access
    timeout_s: float
    score: Callable[[str], Awaitable[float]]
    """Returns the reward that the environment ``env_class`` gives to a text."""
    context_full: Callable[[], bool] = lambda: False
    """Returns whether the last prompt did not fit into the context. Such a trajectory gets no reward."""

    def as_json(self) -> bytes:
        """Return what a command gets on stdin."""
        return json.dumps({"prompt": self.prompt, "extras": dict(self.extras)}, default=str).encode()


type Agent = Callable[[AgentTask], Awaitable[Outcome | float]]


class CommandAgent:
    """An agent that is a command. It gets the task as JSON on stdin (``prompt``, ``extras``), and these variables:
    :data:`PASSED` of this process, ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``,
    ``ANTHROPIC_API_KEY``, ``AGENT_MODEL``, ``HOME`` (its folder) and those of ``environment``.

    It runs in an empty folder, as this process may; in a sandbox with ``generator.name=agent``
    (:mod:`skyrl_megatron.agents.sandbox_agent`). ``reward`` gets the task and how the command ended; by default the
    environment of the row scores stdout. An exit code other than 0 is a failure of the agent's program, so the
    trajectory is no sample, unless ``reward`` is given.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        reward: Callable[[AgentTask, CommandResult], Awaitable[Outcome | float]] | None = None,
    ) -> None:
        self.command, self.environment, self.reward = list(command), dict(environment or {}), reward

    async def __call__(self, task: AgentTask) -> Outcome | float:
        """Run the command and return its outcome."""
        given = {name: os.environ[name] for name in PASSED if name in os.environ}
        variables = given | task.access.environment() | self.environment
        ended = await _run(self.command, variables, task.as_json(), task.timeout_s)
        if self.reward is None or ended.timed_out:
            return await outcome_of(task, ended)
        return await self.reward(task, ended)


async def outcome_of(task: AgentTask, ended: CommandResult) -> Outcome | float:
    """Return the outcome of a command whose output the environment of the row scores."""
    if ended.timed_out:
        return Outcome(OutcomeKind.TIMED_OUT, why=f"the command ran for {task.timeout_s:g} s")
    if why := why_it_failed(ended):
        return Outcome(OutcomeKind.INFRASTRUCTURE, why=why)
    return await task.score(ended.stdout.decode(errors="replace"))


def why_it_failed(ended: CommandResult) -> str:
    """Return exit code and last line of a command that failed; "" for one that did not."""
    if not ended.exit_code:
        return ""
    last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
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
