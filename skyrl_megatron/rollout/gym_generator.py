"""The built-in generator: samples trajectories with an inference engine and environments."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from uuid import uuid4

from skyrl_megatron.data.messages import declared_tools
from skyrl_megatron.data.prompts import TOOLS
from skyrl_megatron.envs import base_text_env as registry
from skyrl_megatron.envs.base_text_env import ConversationType
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning
from skyrl_megatron.inference.protocol import Generation
from skyrl_megatron.inference.sampling_params import engine_sampling, request_seed
from skyrl_megatron.rollout.configured_generator import ConfiguredGenerator, adapter_of, ids_of
from skyrl_megatron.rollout.continuation import at_most, may_continue
from skyrl_megatron.rollout.conversation import (
    ChatConversation,
    OneMessageConversation,
    RetokenizedConversation,
    StepwiseConversation,
)
from skyrl_megatron.rollout.episode import (
    EarlyEnd,
    EarlyEndingLog,
    Episode,
    PartialTrajectory,
    RolloutConfig,
    Trajectory,
    TrajectoryLog,
)
from skyrl_megatron.rollout.interface import (
    BatchMetadata,
    GeneratorInput,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl_megatron.rollout.outputs import make_generator_output
from skyrl_megatron.rollout.templates import ChatFormat

INTERRUPT_S = 30.0
"""How long an interrupted trajectory may take until it has recorded what it has."""
ABORT_AGAIN_S = 0.2
"""A request may reach its engine after it was aborted there."""
ROUNDS = 16
"""Requests of a turn of the longest response, in a batch that is sampled in rounds."""


class SkyRLGymGenerator(ConfiguredGenerator):
    """Samples trajectories in environments of :mod:`skyrl_megatron.envs`.

    Engine requests and results are token ids, so the policy is trained on the tokens that it sampled
    (:mod:`skyrl_megatron.rollout.conversation`). Trajectories run independently of each other (:meth:`agent_loop`).
    With ``batched`` or a ``seed`` they run in lockstep: one request holds the next turn of all, in the order of the
    input. With a ``seed`` every request also has a separate seed. The arguments are those of
    :class:`ConfiguredGenerator`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        cfg = self.generator_cfg
        self.retokenizes = self.chat.marks_answers and cfg.use_conversation_multi_turn and cfg.max_turns > 1
        """Whether each turn tokenizes the whole conversation again (:class:`RetokenizedConversation`)."""
        self._chat_with = lru_cache(maxsize=64)(self._make_chat_with)
        self._own_loop = type(self).agent_loop is not SkyRLGymGenerator.agent_loop
        if problems := list(self._problems()):
            raise ConfigError(problems)
        if self._own_loop and self.seed is not None:
            warnings.warn(
                f"{type(self).__name__} overrides agent_loop: its requests have no seeds, so runs will differ",
                SkyRLMegatronWarning,
                stacklevel=2,
            )

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the trajectories of a batch, in its order.

        Raises DataError for unknown environments, for environments with invalid results, and if every trajectory of
        the batch failed. Passes on errors of the engine.
        """
        registry.require(input_batch["env_classes"], self.skyrl_gym_cfg)
        ids = ids_of(input_batch)
        # in one request per turn: only then is the order of the engine's work, and so each number, repeatable
        if (self.generator_cfg.batched or self.seed is not None) and not self._own_loop:
            sampled = await self._generate_batched(input_batch, ids)
        else:
            sampled = await self._generate_independently(input_batch, ids, disable_tqdm)
        log = input_batch.get("trajectory_log")
        complete_uids = set(log.complete) if isinstance(log, EarlyEndingLog) else {id.instance_id for id in ids}
        rows = zip(sampled, input_batch["env_classes"], ids, strict=True)
        taken = [
            (trajectory, env_class, id)
            for trajectory, env_class, id in rows
            if trajectory is not None and id.instance_id in complete_uids
        ]
        trajectories, env_classes, kept = zip(*taken, strict=True) if taken else ((), (), ())
        return make_generator_output(trajectories, env_classes, kept, self.generator_cfg)

    async def agent_loop(
        self,
        prompt: ConversationType,
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int,
        max_input_length: int,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: TrajectoryID | None = None,
        *,
        log: TrajectoryLog | None = None,
    ) -> Trajectory:
        """Sample one trajectory. Subclasses may override it, and the hooks below.

        ``max_tokens``: limit of sampled tokens per turn, if ``sampling_params`` is None. ``max_input_length``: limit
        of the prompt tokens of a turn. ``log``: stores the turns, and may hold turns of an earlier process or step; an
        overriding method does not get it. Raises EarlyEnd when a batch with an :class:`EarlyEndingLog` ends.
        """
        trajectory_id = trajectory_id or TrajectoryID(uuid4().hex, 0)
        config = self._rollout_config(sampling_params, max_tokens, max_input_length)
        extras = self._setup_env_extras(env_class, env_extras, prompt, sampling_params, max_tokens, max_input_length)
        config = self._with_tools(config, env_extras)
        episode = Episode(config, prompt, env_class, extras, trajectory_id, recording=log is not None)
        recorded = PartialTrajectory() if log is None else log.stored(trajectory_id)
        partial = log if isinstance(log, EarlyEndingLog) else None
        try:
            await episode.begin(recorded.turns, recorded.begun)
            if log is not None and (recorded.turns or recorded.begun):
                log.resumed(trajectory_id, episode.restarted)
            while (tokens := episode.request()) is not None:
                if partial is not None and partial.ended.is_set():
                    raise EarlyEnd
                session = trajectory_id.to_string()
                (generation,) = await self.inference_engine_client.generate(
                    [tokens], episode.sampling(config.sampling), [session], **self._adapters_of([env_extras])
                )
                # aborted by the end of the batch: what was sampled is kept for the next step
                if partial is not None and partial.ended.is_set() and generation.finish_reason == "abort":
                    episode.hold(generation)
                    partial.keep(trajectory_id, episode.begun)
                    raise EarlyEnd
                await episode.answer(generation)
                # the last turn is stored with the trajectory, so only turns that others follow are stored alone
                if log is not None and episode.goes_on:
                    await log.turn(trajectory_id, episode.turns - 1, episode.recorded[-1])
            trajectory = await episode.end()
        except BaseException:
            # also for a cancelled task: environments hold processes and connections
            await episode.close()
            raise
        return self._post_process_agent_loop_output(trajectory, trajectory_id)

    # Hooks
    def _setup_env_extras(
        self,
        env_class: str,
        env_extras: dict[str, Any],
        prompt: ConversationType,
        sampling_params: dict[str, Any] | None,
        max_tokens: int,
        max_input_length: int,
    ) -> dict[str, Any]:
        """Return the ``extras`` for the constructor of the environment."""
        return env_extras

    def _post_process_agent_loop_output(self, output: Trajectory, trajectory_id: TrajectoryID) -> Trajectory:
        """Return the trajectory to add to the batch."""
        return output

    # Two ways to sample a batch
    async def _generate_independently(
        self, batch: GeneratorInput, ids: Sequence[TrajectoryID], disable_tqdm: bool
    ) -> list[Trajectory | None]:
        """Return the trajectories, None for those that were interrupted."""
        from tqdm import tqdm

        extras = batch.get("env_extras") or [{} for _ in ids]
        sampling, limits, log = batch.get("sampling_params"), self._limits(), batch.get("trajectory_log")
        logged = {} if log is None or self._own_loop else {"log": log}
        with tqdm(total=len(ids), desc="trajectories", mininterval=5, disable=disable_tqdm or None) as progress:

            async def one(prompt: ConversationType, env_class: str, extra: dict[str, Any], id: TrajectoryID) -> Any:
                trajectory = None if log is None else log.stored(id).trajectory
                if trajectory is None:
                    try:
                        trajectory = await self.agent_loop(
                            prompt, env_class, extra, *limits, sampling_params=sampling, trajectory_id=id, **logged
                        )
                    except EarlyEnd:
                        return None
                    if log is not None:
                        await log.finished(id, trajectory)
                progress.update()
                return trajectory

            arguments = zip(batch["prompts"], batch["env_classes"], extras, ids, strict=True)
            try:
                async with asyncio.TaskGroup() as group:  # the first error cancels the other tasks before it is raised
                    tasks = [group.create_task(one(*argument)) for argument in arguments]
                    if isinstance(log, EarlyEndingLog):
                        await self._interrupt(dict(zip(tasks, ids, strict=True)), log)
            except BaseExceptionGroup as errors:
                # the caller expects the environment's or engine's own error, not a group of them
                raise errors.exceptions[0] from None
        return [None if task.cancelled() else task.result() for task in tasks]

    async def _interrupt(self, tasks: Mapping[asyncio.Task[Any], TrajectoryID], log: EarlyEndingLog) -> None:
        """Interrupt the tasks that are left when a batch may end. A request returns what it has sampled. A step of an
        environment may end within INTERRUPT_S. What is then left, and an overridden ``agent_loop``, is cancelled."""
        log.look()
        ended, over = asyncio.create_task(log.ended.wait()), asyncio.create_task(asyncio.wait(tasks))
        try:
            await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            over.cancel()
        left = {task for task in tasks if not task.done()}
        deadline = asyncio.get_running_loop().time() + (0 if self._own_loop else INTERRUPT_S)
        abort = getattr(self.inference_engine_client, "abort", None)
        # again and again: a trajectory between two requests has nothing to abort, and sends another one after
        # it
        while left and asyncio.get_running_loop().time() < deadline and abort is not None:
            await abort([tasks[task].to_string() for task in left])
            _, left = await asyncio.wait(left, timeout=ABORT_AGAIN_S)
        for task in left:
            task.cancel()

    async def _generate_batched(
        self, batch: GeneratorInput, ids: Sequence[TrajectoryID]
    ) -> Sequence[Trajectory | None]:
        extras = batch.get("env_extras") or [{} for _ in ids]
        sampling, metadata = batch.get("sampling_params"), batch.get("batch_metadata")
        limits, log = self._limits(), batch.get("trajectory_log")
        config = self._rollout_config(sampling, *limits)
        episodes = [
            Episode(
                self._with_tools(config, extra),
                prompt,
                env_class,
                self._setup_env_extras(env_class, extra, prompt, sampling, *limits),
                id,
            )
            for prompt, env_class, extra, id in zip(batch["prompts"], batch["env_classes"], extras, ids, strict=True)
        ]
        if isinstance(log, EarlyEndingLog):
            return await self._in_rounds(config, episodes, extras, metadata, log)
        try:
            await asyncio.gather(*(episode.begin() for episode in episodes))
            while waiting := [
                (e, extra, tokens)
                for e, extra in zip(episodes, extras, strict=True)
                if (tokens := e.request()) is not None
            ]:
                generations = await self.inference_engine_client.generate(
                    [tokens for *_, tokens in waiting],
                    [
                        e.sampling(self._request(config.sampling, e.trajectory_id, metadata, e.turns))
                        for e, *_ in waiting
                    ],
                    [e.trajectory_id.to_string() for e, *_ in waiting],
                    **self._adapters_of([extra for _, extra, _ in waiting]),
                )
                answers = zip(waiting, generations, strict=True)
                await asyncio.gather(*(episode.answer(generation) for (episode, *_), generation in answers))
            trajectories = await asyncio.gather(*(episode.end() for episode in episodes))
        except BaseException:
            await asyncio.gather(*(episode.close() for episode in episodes))
            raise
        return [self._post_process_agent_loop_output(t, id) for t, id in zip(trajectories, ids, strict=True)]

    async def _in_rounds(
        self,
        config: RolloutConfig,
        episodes: Sequence[Episode],
        extras: Sequence[Mapping[str, Any]],
        metadata: BatchMetadata | None,
        log: EarlyEndingLog,
    ) -> Sequence[Trajectory | None]:
        """Sample in rounds, each of at most a ROUNDS-th of a turn's tokens, until the batch may end after one of them:
        what the interrupted trajectories have does not depend on time. None: it was interrupted."""
        recorded = [log.stored(episode.trajectory_id) for episode in episodes]
        made = [stored.trajectory for stored in recorded]
        left = [number for number, trajectory in enumerate(made) if trajectory is None]
        most = config.sampling["max_tokens"]
        # rounded up, so that the last round of a turn is not longer than the others
        share = -(-most // ROUNDS) if may_continue(config.sampling) else most
        limits = dict.fromkeys(left, share)

        async def begin(episode: Episode, stored: PartialTrajectory) -> None:
            episode.recording = True
            await episode.begin(stored.turns, stored.begun)
            if stored.turns or stored.begun:
                log.resumed(episode.trajectory_id, episode.restarted)

        async def end(number: int) -> None:
            trajectory = await episodes[number].end()
            made[number] = self._post_process_agent_loop_output(trajectory, episodes[number].trajectory_id)

        async def answer(number: int, limit: int, generation: Generation) -> None:
            episode, sampled = episodes[number], len(generation.token_ids)
            before = 0 if episode.part is None else len(episode.part.token_ids)
            if generation.finish_reason == "length" and sampled == limit and before + sampled < most:
                episode.hold(generation)
                after = 0 if episode.part is None else len(episode.part.token_ids)
                # nothing was added, because a stop string was open: the next round needs the whole turn's
                # tokens
                limits[number] = share if after > before else most
                return
            await episode.answer(generation)
            if episode.goes_on:
                await log.turn(episode.trajectory_id, episode.turns - 1, episode.recorded[-1])

        try:
            await asyncio.gather(*(begin(episodes[number], recorded[number]) for number in left))
            while True:
                waiting = {number: tokens for number in left if (tokens := episodes[number].request()) is not None}
                done = [number for number in left if number not in waiting]
                await asyncio.gather(*map(end, done))
                for number in done:
                    trajectory = made[number]
                    assert trajectory is not None
                    # stored in order of rows, not of completion: what the log holds does not depend on time
                    await log.finished(episodes[number].trajectory_id, trajectory)
                left = list(waiting)
                if log.look() or not left:
                    break
                asked = []
                for number in left:
                    episode = episodes[number]
                    part = 0 if episode.part is None else len(episode.part.token_ids)
                    keys = self._request(config.sampling, episode.trajectory_id, metadata, episode.turns, part)
                    asked.append(at_most(episode.sampling(keys), limits[number]))
                generations = await self.inference_engine_client.generate(
                    list(waiting.values()),
                    asked,
                    [episodes[number].trajectory_id.to_string() for number in left],
                    **self._adapters_of([extras[number] for number in left]),
                )
                answers = zip(left, asked, generations, strict=True)
                await asyncio.gather(
                    *(answer(number, keys["max_tokens"], answered) for number, keys, answered in answers)
                )
        finally:
            await asyncio.gather(*(episodes[number].close() for number in left))
        for number in left:
            log.keep(episodes[number].trajectory_id, episodes[number].begun)
        return made

    # Parts
    def _limits(self) -> tuple[int, int]:
        """Return (limit of sampled tokens per turn, limit of prompt tokens per turn)."""
        limit = self.generator_cfg.max_input_length
        if limit is None:
            fix = "set it to the maximum number of prompt tokens of a turn"
            raise ConfigError([Problem("generator.max_input_length", None, fix)])
        return self.generator_cfg.sampling_params.max_generate_length, limit

    def _rollout_config(
        self, sampling: Mapping[str, Any] | None, max_tokens: int, max_input_length: int
    ) -> RolloutConfig:
        cfg = self.generator_cfg
        if sampling is None:
            sampling = {**engine_sampling(cfg.sampling_params), "max_tokens": max_tokens}
        if cfg.step_wise_trajectories:
            kind: type[ChatConversation] = StepwiseConversation
        elif self.retokenizes:
            kind = RetokenizedConversation
        else:
            kind = ChatConversation if cfg.use_conversation_multi_turn else OneMessageConversation
        conversation = partial(kind, append_end_token=cfg.append_eos_token_after_stop_str_in_multi_turn)
        skip, gym = self.nonfinite == "skip", self.skyrl_gym_cfg
        return RolloutConfig(self.chat, conversation, self.pool, gym, sampling, cfg.max_turns, max_input_length, skip)

    def _with_tools(self, config: RolloutConfig, extras: Mapping[str, Any]) -> RolloutConfig:
        """Return the settings of an episode whose row declares tools, which the template writes."""
        tools = declared_tools(extras.get(TOOLS))
        return replace(config, chat=self._chat_with(json.dumps(tools, default=str))) if tools else config

    def _make_chat_with(self, tools: str) -> ChatFormat:
        return self.chat.with_kwargs({**self.chat.kwargs, TOOLS: json.loads(tools)})

    def _request(
        self,
        sampling: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        metadata: BatchMetadata | None,
        turn: int,
        part: int = 0,
    ) -> Mapping[str, Any]:
        """Return the sampling keys of a request, with a seed of its own if requests have seeds. ``part``: tokens of
        the turn that earlier requests sampled."""
        if self.seed is None:
            return sampling
        step = metadata.global_step if metadata else 0
        uid = f"{trajectory_id.instance_id}/turn-{turn}" if turn else trajectory_id.instance_id
        uid = f"{uid}/token-{part}" if part else uid
        return {**sampling, "seed": request_seed(self.seed, uid, trajectory_id.repetition_id, step)}

    def _adapters_of(self, extras: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
        """Return the request option with the adapter of each prompt; {} without several adapters."""
        return {"adapters": [adapter_of(extra) for extra in extras]} if self.adapters else {}

    def _problems(self) -> Iterator[Problem]:
        cfg = self.generator_cfg
        if cfg.batched and cfg.max_turns > 1:
            yield Problem(
                "generator.batched",
                True,
                f"cannot be used with generator.max_turns={cfg.max_turns}: set generator.batched=false",
            )
        if cfg.step_wise_trajectories:
            for key, conflict in (
                ("batched", cfg.batched),
                ("use_conversation_multi_turn", not cfg.use_conversation_multi_turn),
                ("chat_template.name_or_path", self.retokenizes),
            ):
                if conflict:
                    fix = f"the template renders step-wise prompts: change generator.{key}, which conflicts with it"
                    yield Problem("generator.step_wise_trajectories", True, fix)
        elif cfg.merge_stepwise_output:
            yield Problem("generator.merge_stepwise_output", True, "needs generator.step_wise_trajectories=true")
        if self.retokenizes and cfg.sampling_params.logprobs is not None and not cfg.step_wise_trajectories:
            fix = (
                "a template that marks answers tokenizes them again, and the sampled log-probs do not match these"
                " tokens: set it to null, or use step_wise_trajectories with the tokenizer's template"
            )
            yield Problem("generator.sampling_params.logprobs", cfg.sampling_params.logprobs, fix)
