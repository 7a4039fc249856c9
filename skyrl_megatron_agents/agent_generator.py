"""A generator whose trajectories are made by agents: programs that call the policy through the capture gateway.

A subclass names its agent, a coroutine function that gets an :class:`AgentTask` and returns an :class:`Outcome` or a
reward. :class:`CommandAgent` is one that runs a command, and scores what it wrote. Register the subclass with
``register_generator`` (``docs/guides/agents.md``). The built-in subclass runs commands in sandboxes
(:mod:`skyrl_megatron_agents.sandbox_agent`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from skyrl_megatron.config.rules.passthrough_keys import MASKS, WEIGHTS
from skyrl_megatron.config.rules.rollout_rules import returns_sampling_support
from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import DataError, with_origin
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.rollout.configured_generator import ConfiguredGenerator, adapter_of, ids_of
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import GeneratorInput, GeneratorOutput, TrajectoryID, checked_reward
from skyrl_megatron.rollout.outputs import make_generator_output
from skyrl_megatron_agents.command_agent import END_S, AgentTask, CommandAgent
from skyrl_megatron_agents.gateway import Gateway
from skyrl_megatron_agents.http_endpoint import endpoint_token
from skyrl_megatron_agents.open_trajectory import OpenTrajectory, TrajectoryLimits
from skyrl_megatron_agents.outcome_counts import Cause, OutcomeCounts
from skyrl_megatron_agents.rows import Outcome, OutcomeKind, Rule, trajectory_of
from skyrl_megatron_agents.trajectory_records import TrajectoryRecords

__all__ = ["AgentGenerator", "AgentTask", "CommandAgent"]


@dataclass(slots=True)
class _Running:
    """The parts that live as long as the generator."""

    gateway: Gateway
    slots: asyncio.Semaphore
    finished: list[str] = field(default_factory=list)
    """Trajectories whose rows were returned."""
    outcomes: OutcomeCounts = field(default_factory=OutcomeCounts)


class AgentGenerator(ConfiguredGenerator):
    """Runs an agent for each trajectory. The arguments are those of any registered generator.

    A subclass sets :attr:`agent` and, as it needs, the other class attributes. ``generator.step_wise_trajectories``
    must be true where a trajectory may have several rows (:attr:`rule`). A trajectory that an agent's error or
    a call that failed ended is no sample; one whose time or context was used up only if it is given a reward.
    """

    agent: ClassVar[Any]
    """An :data:`Agent`: a :class:`CommandAgent`, a method, or a function as a ``staticmethod``."""
    rule: ClassVar[Any] = "all"
    """Which paths are trained on: a name of :data:`~skyrl_megatron_agents.rows.RULES`, or a function
    (:data:`~skyrl_megatron_agents.rows.Rule`)."""
    timeout_s: ClassVar[float] = 3600.0
    """Time limit of a trajectory."""
    parallel: ClassVar[int] = 1024
    """Agents at the same time."""
    timed_out_reward: float | None = None
    """Reward of trajectories that timed out. None: they are no samples."""
    context_full_reward: float | None = None
    """Reward of trajectories whose last prompt did not fit into the context, after another did. None: they are no
    samples."""
    tool_call_parser: str | None = "hermes"
    """vLLM's parser of tool calls."""
    reasoning_parser: ClassVar[str | None] = None
    """vLLM's parser of thinking. None: ``generator.agent.reasoning_parser``."""
    log_folder: str | Path | None = None
    """Folder of the log of calls; a run sets it. None: a temporary one, so that calls do not outlive the process."""
    records: TrajectoryRecords | None = None
    """Where the dashboard's trajectories are written; a run sets it. None: nowhere."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self._temporary: Any = None

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the trajectories of a batch, in its order. Raises DataError as the built-in generator does, and
        JournalError if the log cannot be written."""
        running = await self.start()
        before, running.finished = running.finished, []
        await running.gateway.forget(before)
        ids = ids_of(input_batch)
        extras = input_batch.get("env_extras") or [{} for _ in ids]
        rows = zip(input_batch["prompts"], input_batch["env_classes"], extras, ids, strict=True)
        tasks = [asyncio.create_task(self._trajectory(running, input_batch, *row)) for row in rows]
        try:
            trajectories = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=2 * END_S)
            raise
        output = make_generator_output(trajectories, input_batch["env_classes"], ids, self.generator_cfg)
        counts = running.gateway.counts
        output["rollout_metrics"] = {
            **(output["rollout_metrics"] or {}),
            **counts.metrics(),
            **running.outcomes.metrics(),
        }
        await self._keep(running, input_batch, ids)
        counts.judge(self.generator_cfg.min_token_in_rate)
        running.outcomes.judge(self.generator_cfg.max_infrastructure_share)
        return output

    # Hooks
    def rule_of_rows(self) -> str | Rule:
        """Return which paths are trained on."""
        return type(self).rule  # type: ignore[no-any-return]

    def limits(self) -> TrajectoryLimits:
        """Return what the agent of a trajectory may use."""
        agent = self.generator_cfg.agent
        return TrajectoryLimits(agent.max_calls, agent.max_samples, agent.max_tokens, agent.max_connections)

    def thinking_parser(self) -> str | None:
        """Return vLLM's parser of thinking."""
        return self.reasoning_parser or self.generator_cfg.agent.reasoning_parser

    async def begin(self) -> None:
        """Start what the agents need besides the gateway. Called once, before the first of them."""

    async def end(self) -> None:
        """Stop what :meth:`begin` started."""

    # Parts
    async def start(self) -> _Running:
        """Start the gateway, once."""
        async with self._starting:
            if self._running is None:
                await self.begin()
                self._running = _Running(await self._gateway(), asyncio.Semaphore(self.parallel))
            return self._running

    async def stop(self) -> None:
        """End the gateway."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.gateway.stop()
            await self.end()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _gateway(self) -> Gateway:
        from skyrl_megatron.inference.vllm.wire_app import WireApp

        cfg = self.generator_cfg
        sampling = engine_sampling(cfg.sampling_params)
        wire = await WireApp.create(
            self.tokenizer.name_or_path,
            "policy",
            max_model_len=(cfg.max_input_length or 0) + cfg.sampling_params.max_generate_length or None,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.thinking_parser(),
            chat_template=self.chat.template,
            adapters=self.adapters,
        )
        if self.log_folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="agent-calls-")
        folder = Path(self.log_folder or self._temporary.name)
        secret = endpoint_token(folder / "secret") if self.log_folder else secrets.token_urlsafe(32)
        gateway = Gateway(
            self.inference_engine_client,
            wire,
            folder / "calls",
            secret=secret,
            model="policy",
            sampling=sampling,
            adapters=self.adapters,
            limits=self.limits(),
            may_set=self._may_set(),
        )
        await gateway.start()
        return gateway

    async def _trajectory(
        self,
        running: _Running,
        batch: GeneratorInput,
        prompt: ConversationType,
        env_class: str,
        extras: dict[str, Any],
        id: TrajectoryID,
    ) -> Trajectory:
        metadata = batch.get("batch_metadata")
        step = metadata.global_step if metadata else 0
        name = _name(batch, id)
        seeds = None if self.seed is None else (self.seed, id.instance_id, id.repetition_id, step)
        log = batch.get("trajectory_log")
        if log is not None and (stored := log.stored(id).trajectory) is not None:
            return stored  # type: ignore[no-any-return]
        async with running.slots:
            opened = running.gateway.open(
                name,
                sampling=batch.get("sampling_params"),
                adapter=adapter_of(extras),
                seeds=seeds,
                trained=metadata is None or metadata.training_phase == "train",
            )
            started = time.perf_counter()
            score = self._scorer(prompt, env_class, extras, id)
            task = AgentTask(
                prompt, extras, env_class, id, opened.access, self.timeout_s, score, lambda: bool(opened.too_long)
            )
            try:
                outcome = opened.outcome = await self._outcome(task, opened)
            finally:
                graph = await running.gateway.close(name)
            if not graph.calls and outcome.reward is not None:  # the policy did nothing, so this is no failure of it
                why = "; ".join(filter(None, ("the agent made no call to the model", opened.refused, outcome.why)))
                outcome = opened.outcome = Outcome(OutcomeKind.INFRASTRUCTURE, why=why, cause=Cause.NO_CALL)
            running.outcomes.add(outcome)
            seconds = time.perf_counter() - started
            made = trajectory_of(graph, outcome, self.rule_of_rows(), end_token=self.chat.end_token, seconds=seconds)
        if len(made.rows) > 1 and not self.generator_cfg.step_wise_trajectories:
            raise DataError(
                f"trajectory {id.to_string()} has {len(made.rows)} rows, as its agent forked or edited its history:"
                " set generator.step_wise_trajectories=true, or let the generator's rule be 'final'"
            )
        if log is not None:
            await log.finished(id, made)
        running.finished.append(name)
        return made

    async def _keep(self, running: _Running, batch: GeneratorInput, ids: Sequence[TrajectoryID]) -> None:
        """Write some trajectories of a training batch for the dashboard."""
        metadata = batch.get("batch_metadata")
        if self.records is None or metadata is None or metadata.training_phase != "train":
            return
        for id in self.records.chosen(metadata.global_step, ids):
            opened = running.gateway.trajectories.get(_name(batch, id))
            if opened is not None and opened.outcome is not None:
                args = (
                    metadata.global_step,
                    id,
                    opened.graph,
                    opened.outcome,
                    self.rule_of_rows(),
                    opened.first_unmatched,
                )
                await asyncio.to_thread(self.records.write, *args)

    async def _outcome(self, task: AgentTask, opened: OpenTrajectory) -> Outcome:
        """Run the agent. A last call that failed or was too long decides over what the agent returned."""
        try:
            async with asyncio.timeout(task.timeout_s + 2 * END_S):
                made = _as_outcome(await self.agent(task), task)
        except TimeoutError:
            made = Outcome(OutcomeKind.TIMED_OUT, why=f"the agent ran for {task.timeout_s:g} s")
        except Exception as error:
            made = Outcome(OutcomeKind.INFRASTRUCTURE, why=f"the agent raised {with_origin(error)}")
        if opened.failure:
            return Outcome(OutcomeKind.INFRASTRUCTURE, why=opened.failure, cause=Cause.CALL)
        if opened.agents_failure:
            return Outcome(OutcomeKind.FAILED, 0.0, opened.agents_failure, Cause.LIMIT)
        if opened.too_long:
            reward = self.context_full_reward if opened.graph.calls else None  # the first prompt is not the agent's
            return Outcome(OutcomeKind.CONTEXT_FULL, reward, opened.too_long)
        if made.kind is OutcomeKind.TIMED_OUT and made.reward is None:
            return Outcome(OutcomeKind.TIMED_OUT, self.timed_out_reward, made.why)
        return made

    def _may_set(self) -> tuple[str, ...]:
        """Return the parameters that change the distribution of samples and that requests may set in training."""
        if self.generator_cfg.unaccounted_sampling == "warn":
            return (*MASKS, *WEIGHTS)
        return MASKS if returns_sampling_support(self.generator_cfg) else ()

    def _scorer(
        self, prompt: ConversationType, env_class: str, extras: Mapping[str, Any], id: TrajectoryID
    ) -> Callable[[str], Awaitable[float]]:
        def score(text: str) -> float:
            config = registry.config_of(env_class, self.skyrl_gym_cfg)
            env = registry.make(env_class, env_config=config, extras={**extras, "max_turns": 1})
            try:
                env.init(prompt)
                return checked_reward(env.step(text)["reward"], env_class, id.to_string())
            finally:
                env.close()

        async def run(text: str) -> float:
            return float(await self.pool.run(score, text))

        return run


def _name(batch: GeneratorInput, id: TrajectoryID) -> str:
    """Return the name of a trajectory in the gateway."""
    metadata = batch.get("batch_metadata")
    step, phase = (metadata.global_step, metadata.training_phase) if metadata else (0, "train")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{phase}-{step}-{id.to_string()}")


def _as_outcome(found: Outcome | float, task: AgentTask) -> Outcome:
    """Return what an agent returned as an outcome. Raises DataError for a reward that is no finite number."""
    if isinstance(found, Outcome):
        return found
    reward = checked_reward(found, task.env_class, task.trajectory_id.to_string())
    return Outcome(OutcomeKind.of(reward), reward)
