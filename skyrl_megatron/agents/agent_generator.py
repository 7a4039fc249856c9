"""A generator whose trajectories are made by agents: programs that call the policy through the capture gateway.

A subclass names its agent, a coroutine function that gets an :class:`AgentTask` and returns an :class:`Outcome` or a
reward. :class:`CommandAgent` is one that runs a command, and scores what it wrote. Register the subclass with
``register_generator`` (``docs/guides/agents.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import uuid4

from skyrl_megatron.agents.gateway import Access, Gateway, OpenTrajectory
from skyrl_megatron.agents.rows import Outcome, OutcomeKind, trajectory_of
from skyrl_megatron.agents.trajectory_records import TrajectoryRecords
from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.envs.env_pool import EnvPool
from skyrl_megatron.errors import DataError, with_origin
from skyrl_megatron.inference.http_endpoint import endpoint_token
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.rollout.episode import Trajectory
from skyrl_megatron.rollout.interface import (
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    SamplingClient,
    TrajectoryID,
    checked_reward,
)
from skyrl_megatron.rollout.outputs import make_generator_output
from skyrl_megatron.rollout.templates import ChatFormat, load_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_megatron.config import GeneratorConfig, SkyRLGymConfig

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


type Agent = Callable[[AgentTask], Awaitable[Outcome | float]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


class StartedSandbox(Protocol):
    """The verbs of a started sandbox that an agent uses."""

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> Any:
        """Run a command; return its ``exit_code``, ``stdout``, ``stderr`` and ``timed_out``."""

    async def put(self, archive: bytes) -> None:
        """Unpack a tar archive into the workspace."""

    async def get(self) -> bytes:
        """Return the workspace as a tar archive."""

    async def stop(self) -> None:
        """End it."""


class CommandAgent:
    """An agent that is a command. It gets the task as JSON on stdin (``prompt``, ``extras``), and these variables:
    :data:`PASSED` of this process, ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``,
    ``ANTHROPIC_API_KEY``, ``AGENT_MODEL``, ``HOME`` (its folder) and those of ``environment``.

    It runs in an empty folder, or in the sandbox that ``sandbox`` starts for a task. ``reward`` gets the task and how
    the command ended; by default the environment of the row scores stdout. An exit code other than 0 is a failure of
    the agent's program, so the trajectory is no sample, unless ``reward`` is given.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        reward: Callable[[AgentTask, Ended], Awaitable[Outcome | float]] | None = None,
        sandbox: Callable[[AgentTask], Awaitable[StartedSandbox]] | None = None,
    ) -> None:
        self.command, self.environment = list(command), dict(environment or {})
        self.reward, self.sandbox = reward, sandbox

    async def __call__(self, task: AgentTask) -> Outcome | float:
        """Run the command and return its outcome."""
        given = {name: os.environ[name] for name in PASSED if name in os.environ}
        variables = given | task.access.environment() | self.environment
        stdin = json.dumps({"prompt": task.prompt, "extras": dict(task.extras)}, default=str).encode()
        if self.sandbox is None:
            ended = await _run(self.command, variables, stdin, task.timeout_s)
        else:
            box = await self.sandbox(task)
            try:
                ended = await box.run(self.command, timeout_s=task.timeout_s, environment=variables, stdin=stdin)
            finally:
                await box.stop()
        if ended.timed_out:
            return Outcome(OutcomeKind.TIMED_OUT, why=f"the command ran for {task.timeout_s:g} s")
        if self.reward is not None:
            return await self.reward(task, ended)
        if ended.exit_code:
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
            return Outcome(OutcomeKind.INFRASTRUCTURE, why=f"the command ended with code {ended.exit_code}: {last}")
        return await task.score(ended.stdout.decode(errors="replace"))


async def _run(command: Sequence[str], variables: Mapping[str, str], stdin: bytes, timeout_s: float) -> Ended:
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
                return Ended(-1, b"", b"", timed_out=True)
            out, err = work.result()
            return Ended(process.returncode or 0, out, err)
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


@dataclass(slots=True)
class _Running:
    """The parts that live as long as the generator."""

    gateway: Gateway
    slots: asyncio.Semaphore
    finished: list[str] = field(default_factory=list)
    """Trajectories whose rows were returned."""


class AgentGenerator(GeneratorInterface):
    """Runs an agent for each trajectory. The arguments are those of any registered generator.

    A subclass sets :attr:`agent` and, as it needs, the other class attributes. ``generator.step_wise_trajectories``
    must be true where a trajectory may have several rows (:attr:`rule`). A trajectory that an agent's error ended is
    no sample; one with a call that failed or did not fit into the context is none either.
    """

    agent: ClassVar[Any]
    """An :data:`Agent`: a :class:`CommandAgent`, a method, or a function as a ``staticmethod``."""
    rule: ClassVar[Any] = "all"
    """Which paths are trained on: a name of :data:`~skyrl_megatron.agents.rows.RULES`, or a function
    (:data:`~skyrl_megatron.agents.rows.Rule`)."""
    timeout_s: ClassVar[float] = 3600.0
    """Time limit of a trajectory."""
    parallel: ClassVar[int] = 1024
    """Agents at the same time."""
    timed_out_reward: ClassVar[float | None] = None
    """Reward of trajectories that timed out. None: they are no samples."""
    tool_call_parser: ClassVar[str | None] = "hermes"
    """vLLM's parser of tool calls."""
    reasoning_parser: ClassVar[str | None] = None
    """vLLM's parser of thinking. None: thinking is a part of the text."""
    log_folder: str | Path | None = None
    """Folder of the log of calls; a run sets it. None: a temporary one, so that calls do not outlive the process."""
    records: TrajectoryRecords | None = None
    """Where the dashboard's trajectories are written; a run sets it. None: nowhere."""

    def __init__(
        self,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: SamplingClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int | None = None,
        nonfinite: str = "error",
        adapters: Sequence[str] = (),
    ) -> None:
        self.generator_cfg, self.skyrl_gym_cfg = generator_cfg, skyrl_gym_cfg
        self.client, self.tokenizer, self.seed, self.adapters = inference_engine_client, tokenizer, seed, adapters
        template = load_template(generator_cfg.chat_template)
        self.chat = ChatFormat(tokenizer, template, generator_cfg.chat_template_kwargs)
        self.pool = EnvPool(skyrl_gym_cfg.max_env_workers, skyrl_gym_cfg.env_timeout)
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self._temporary: Any = None

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the trajectories of a batch, in its order. Raises DataError as the built-in generator does, and
        JournalError if the log cannot be written."""
        running = await self.start()
        before, running.finished = running.finished, []
        await running.gateway.forget(before)
        ids = input_batch.get("trajectory_ids") or [TrajectoryID(uuid4().hex, 0) for _ in input_batch["prompts"]]
        extras = input_batch.get("env_extras") or [{} for _ in ids]
        arguments = zip(input_batch["prompts"], input_batch["env_classes"], extras, ids, strict=True)
        tasks = [asyncio.create_task(self._trajectory(running, input_batch, *each)) for each in arguments]
        try:
            trajectories = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=2 * END_S)
            raise
        output = make_generator_output(trajectories, input_batch["env_classes"], ids, self.generator_cfg)
        counts = running.gateway.counts
        output["rollout_metrics"] = {**(output["rollout_metrics"] or {}), **counts.metrics()}
        await self._keep(running, input_batch, ids)
        counts.judge(self.generator_cfg.min_token_in_rate)
        return output

    async def start(self) -> _Running:
        """Start the gateway, once."""
        async with self._starting:
            if self._running is None:
                self._running = _Running(await self._gateway(), asyncio.Semaphore(self.parallel))
            return self._running

    async def stop(self) -> None:
        """End the gateway."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.gateway.stop()
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
            reasoning_parser=self.reasoning_parser,
            chat_template=self.chat.template,
            adapters=self.adapters,
        )
        if self.log_folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="agent-calls-")
        folder = Path(self.log_folder or self._temporary.name)
        secret = endpoint_token(folder / "secret") if self.log_folder else secrets.token_urlsafe(32)
        gateway = Gateway(
            self.client,
            wire,
            folder / "calls",
            secret=secret,
            model="policy",
            sampling=sampling,
            adapters=self.adapters,
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
                name, sampling=batch.get("sampling_params"), adapter=str(extras.get(ADAPTER_KEY) or ""), seeds=seeds
            )
            started = time.perf_counter()
            score = self._scorer(prompt, env_class, extras, id)
            task = AgentTask(prompt, extras, env_class, id, opened.access, self.timeout_s, score)
            outcome = opened.outcome = await self._outcome(task, opened)
            graph = await running.gateway.close(name)
            seconds = time.perf_counter() - started
            made = trajectory_of(graph, outcome, type(self).rule, end_token=self.chat.end_token, seconds=seconds)
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
                args = metadata.global_step, id, opened.graph, opened.outcome, type(self).rule, opened.first_unmatched
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
            return Outcome(OutcomeKind.INFRASTRUCTURE, why=opened.failure)
        if opened.too_long:
            return Outcome(OutcomeKind.CONTEXT_FULL, why=opened.too_long)
        if made.kind is OutcomeKind.TIMED_OUT and made.reward is None:
            return Outcome(OutcomeKind.TIMED_OUT, self.timed_out_reward, made.why)
        return made

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
    return Outcome(OutcomeKind.SOLVED if reward > 0 else OutcomeKind.FAILED, reward)
