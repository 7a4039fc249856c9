"""A run's policy on its own layout and one eager engine, with the weights of one of its versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.config.hf_model import model_dimensions, read_hf_config
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.pool import EnginePool
from skyrl_megatron.inference.sampling import engine_sampling
from skyrl_megatron.inference.vllm.settings import engine_settings
from skyrl_megatron.inference.vllm.watched import WatchedEngine
from skyrl_megatron.progress import under_way
from skyrl_megatron.trainer.checkpoints import run_checkpointer
from skyrl_megatron.trainer.loop_thread import LoopThread
from skyrl_megatron.types import TokenSupport, TrainingBatch
from skyrl_megatron.workers.engine_actor import RayEngine
from skyrl_megatron.workers.placement import create_placement
from skyrl_megatron.workers.policy_rank import weight_synchronizer
from skyrl_megatron.workers.sync_calls import EnginesDisagree
from skyrl_megatron.workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

Hidden = dict[str, np.ndarray]
"""Name of a place (``runtime/recording.py``) → [n, H] of one sample."""


class Replay:
    """Both sides of a run, for the time of ``with``; Ray must be up. ``logs``: a folder for their output.

    ``cfg``: of :func:`run_config`. The model's routers can be told where to go where it has experts, and the engine
    says where it went, unless its layout keeps it from that.
    """

    def __init__(self, cfg: SkyRLTrainConfig, logs: Path, say: Callable[[str], None]) -> None:
        self.cfg, self.logs, self.say = cfg, logs, say
        dims = model_dimensions(read_hf_config(cfg) or {})
        engine, megatron = cfg.generator.inference_engine, cfg.trainer.policy.megatron_config
        self.replays = megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "rollout"
        """Whether the run's trainer takes the routes that came with its samples."""
        if dims is not None and dims.num_experts:
            fused = megatron.transformer_config_kwargs.get("moe_router_fusion")
            megatron.moe_enable_routing_replay = not fused
            engine.enable_return_routed_experts = engine.pipeline_parallel_size == 1 and not fused
            engine.enable_prefix_caching = engine.enable_prefix_caching or engine.enable_return_routed_experts
        self.version: int | None = None
        self.loop = LoopThread()

    def __enter__(self) -> Replay:
        self.closing: list[Callable[[], Any]] = []
        self.loop.__enter__()
        self.closing.append(self.loop.__exit__)
        try:
            with under_way("start ranks and engine"):
                self._start(self.cfg)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, cfg: SkyRLTrainConfig) -> None:
        placement = create_placement(cfg)
        self.closing.append(placement.remove)
        settings = engine_settings(cfg, log_file=self.logs / "engine.log")
        place = placement["engines"]
        options = place.options(0, settings.workers)
        environment = place.engine_environment(0, settings.workers)
        settings = dataclasses.replace(
            settings, distributed_executor_backend=place.engine_executor(0, settings.workers)
        )
        make: Any = partial(RayEngine, settings, kind=WatchedEngine, environment=environment, **options)
        self.pool, self.dtype = EnginePool([make], wait_s=cfg.trainer.phase_timeout_s), settings.dtype
        half = cfg.trainer.bf16 and placement["policy"].on_gpus
        self.dtypes = (settings.dtype, "bfloat16" if half else "float32")
        """Of the engine's weights and of the trainer's."""
        self.client = InferenceClient(self.pool)
        self.policy = WorkerGroup(cfg, "policy", placement["policy"])
        self.closing += [lambda: self._run(self.pool.shutdown()), self.policy.stop]
        shared = cfg.trainer.placement.colocate_all
        if shared:
            self._run(self.pool.start())
            self._run(self.pool.sleep(cfg.trainer.phase_timeout_s))
        self.policy.start_building(1, str(self.logs))
        if not shared:
            self._run(self.pool.start())
        self.policy.finish_building()
        self.weights = weight_synchronizer(cfg, self.policy, self.pool, dtype=self.dtype)
        self.checkpoints = run_checkpointer(cfg, self.policy.checkpointed())
        self.closing.append(self.checkpoints.close)
        self.version = 0

    def __exit__(self, *_: object) -> None:
        for close in reversed(self.closing):
            try:
                close()
            except Exception as error:
                self.say(f"not closed well: {error}")
        self.closing = []

    @property
    def routed(self) -> bool:
        """Whether the trainer's routers can be told where to go."""
        return bool(self.cfg.trainer.policy.megatron_config.moe_enable_routing_replay)

    # ------------------------------------------------------------------ weights
    def load(self, version: int, folder: str) -> None:
        """Give the trainer the weights of a checkpoint."""
        if version != self.version:
            self.checkpoints.load("from_path", folder)
            self.version = version

    def sync(self) -> str | None:
        """Give the engine the trainer's weights; return what is wrong where its probe does not agree. The engine has
        them all the same, and answers."""
        self._run(self.weights.begin_training())
        try:
            self._run(self.weights.sync(str(self.version)))
        except WeightSyncError as error:
            if not isinstance(error.__cause__, EnginesDisagree):
                raise
            self._run(self._engine.resume())
            return str(next(iter(error.__cause__.causes.values())))
        return None

    def leave_to_trainer(self) -> None:
        """Let the engine leave GPUs that both are on."""
        if self.cfg.trainer.placement.colocate_all:
            self._run(self.weights.begin_training())

    # ------------------------------------------------------------------ the trainer
    def trainer(self, batch: TrainingBatch, **options: Any) -> tuple[np.ndarray, list[Hidden]]:
        """Return log-probs [B, T], and what was recorded of each row (``WorkerGroup.compute_recorded``)."""
        logprobs, found = self.policy.compute_recorded(batch, **options)
        return logprobs.numpy(), found

    # ------------------------------------------------------------------ the engine
    def engine(self, batch: TrainingBatch, watched: int) -> tuple[np.ndarray, list[np.ndarray | None], Hidden]:
        """Return log-probs [B, T] over the whole vocabulary at temperature 1, the experts of each row, and what the
        layers give for the row ``watched``."""
        scores, hidden = np.zeros(batch.response_mask.shape, np.float32), Hidden()
        routes: list[np.ndarray | None] = []
        for row, tokens in enumerate(rows_of(batch)):
            logprobs, chosen, outputs = self._run(self._engine.replay(tokens, layers=row == watched))
            kept = min(len(logprobs), scores.shape[1])
            scores[row, -kept:] = logprobs[-kept:]
            routes.append(None if chosen is None else np.asarray(chosen)[: len(tokens)])
            hidden |= outputs
        return scores, routes, hidden

    def engine_support(self, batch: TrainingBatch) -> list[TokenSupport]:
        """Return what the engine samples each response token from, as the run does: it is asked for one token after
        every beginning of a response."""
        sampling = engine_sampling(self.cfg.generator.sampling_params) | {"max_tokens": 1}
        found = []
        for row, tokens in enumerate(rows_of(batch)):
            count = int(batch.response_mask[row].sum())
            starts = [tokens[: len(tokens) - left] for left in range(count, 0, -1)]
            answers = self._run(self.client.generate(starts, sampling))
            found.append(TokenSupport.joined([a.support or TokenSupport.none(1) for a in answers]))
        return found

    def engine_weights(self, layer: int | None) -> list[dict[str, np.ndarray]]:
        """Return what the engine's workers hold of a layer; None: of no layer."""
        if self.cfg.trainer.placement.colocate_all:
            self.sync()
        held: list[dict[str, np.ndarray]] = self._run(self._engine.layer_weights(layer))
        return held

    @property
    def _engine(self) -> Any:
        return self.pool.slots[0].engine

    def _run(self, work: Any) -> Any:
        return self.loop.run(work, "explain", timeout_s=2 * self.cfg.trainer.phase_timeout_s)


def rows_of(batch: TrainingBatch) -> list[list[int]]:
    """Return the tokens of each row, without padding."""
    lengths: Sequence[int] = batch.lengths.tolist()
    return [batch.sequences[row, -length:].tolist() for row, length in enumerate(lengths)]
