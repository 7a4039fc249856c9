"""Generator ``agent``: a command drives each trajectory, in a sandbox whose only way out is the run's gateway.

The environment of a row says what it works on. One with a ``task`` (``environments/task_folder.py``) has files and
hidden tests, which decide (:mod:`skyrl_megatron_agents.attempt`). Any other one scores what the command prints, as it
does for a :class:`~skyrl_megatron_agents.command_agent.CommandAgent`.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron_agents.agent_generator import AgentGenerator
from skyrl_megatron_agents.attempt import AgentCommand, AttemptResult, attempt, run_alone
from skyrl_megatron_agents.command_agent import AgentTask, outcome_of, why_it_failed
from skyrl_megatron_agents.rows import Outcome, OutcomeKind, Rule
from skyrl_megatron_agents.sandboxes.relay import CONNECTIONS
from skyrl_megatron_agents.sandboxes.sandbox import Limits
from skyrl_megatron_agents.sandboxes.sandbox_queue import SandboxQueue, default_at_once, make_provider
from skyrl_megatron_agents.task import Task

DAY_S = 86400.0


class SandboxAgentGenerator(AgentGenerator):
    """Runs ``generator.agent.command`` in a sandbox for each trajectory.

    Without ``generator.step_wise_trajectories`` the path of the last call is the row of a trajectory; with it, every
    path is.
    """

    timeout_s = DAY_S  # the task and the queue of sandboxes have limits of their own

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings = self.generator_cfg.agent
        self.tool_call_parser = self.generator_cfg.inference_engine.tool_call_parser or type(self).tool_call_parser
        self.timed_out_reward = self.settings.timed_out_reward
        self.context_full_reward = self.settings.context_full_reward
        self.queue: SandboxQueue | None = None

    def rule_of_rows(self) -> str | Rule:
        """Return the rule by which a trajectory has as many rows as it may."""
        return "all" if self.generator_cfg.step_wise_trajectories else "final"

    async def begin(self) -> None:
        """Make the provider of sandboxes, and remove what an earlier run left. Raises SandboxError if it cannot run on
        this machine."""
        provider = await asyncio.to_thread(make_provider, self.settings.sandbox)
        at_once, ordinary = self.settings.at_once or default_at_once(Limits()), Limits()
        # Tasks that ask for more than an ordinary one wait for each other, so that they do not fill the machine.
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        memory = max(at_once * (ordinary.memory + ordinary.disk), half)
        self.queue = SandboxQueue(provider, at_once=at_once, memory=memory)

    async def end(self) -> None:
        """Stop all sandboxes."""
        if self.queue is not None:
            await self.queue.provider.close()

    async def agent(self, task: AgentTask) -> Outcome | float:
        """Run the command for a trajectory."""
        assert self.queue is not None
        # Below CONNECTIONS, the gateway's answer 429 says more than a connection that waits because others are idle.
        connections = max(CONNECTIONS, self.settings.max_connections)
        command, address = replace(self.command_of(task), connections=connections), urlsplit(task.access.url)
        server, group = (address.hostname or "", address.port or 0), task.trajectory_id.instance_id
        work = await self.pool.run(self._task_of, task)
        if not work.command:
            ended = await run_alone(work, command, self.queue, server=server, group=group)
            if isinstance(ended, AttemptResult):
                return Outcome(ended.outcome, ended.reward, ended.reason, ended.cause)
            return await outcome_of(replace(task, timeout_s=work.agent_timeout_s), ended)
        made = await attempt(work, command, self.queue, server=server, group=group, context_full=task.context_full)
        failed = made.outcome is OutcomeKind.FAILED and made.agent is not None and why_it_failed(made.agent)
        return Outcome(made.outcome, made.reward, f"{made.reason}; {failed}" if failed else made.reason, made.cause)

    def command_of(self, task: AgentTask) -> AgentCommand:
        """Return the command for a trajectory, which finds the gateway at the sandbox's end of the relay."""
        variables = replace(task.access, url="{url}" + urlsplit(task.access.url).path).environment()
        mounts = {inside: Path(outside) for inside, outside in self.settings.mounts.items()}
        stdin = task.as_json() if self.settings.stdin else b""
        return AgentCommand(self.settings.command, variables, mounts, stdin)

    def _task_of(self, task: AgentTask) -> Task:
        """Return the task of a row; one without files and tests if its environment has none."""
        config = registry.config_of(task.env_class, self.skyrl_gym_cfg)
        env = registry.make(task.env_class, env_config=config, extras={**task.extras, "max_turns": 1})
        try:
            found: Task | None = getattr(env, "task", None)
        finally:
            env.close()
        return found or Task(task.env_class, task.text, {}, {}, [])
