"""Replay recorded samples on the run's policy and on one eager engine, and compare their weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skyrl_megatron.config.hf_model import model_dimensions, read_hf_config
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.inference.client import InferenceClient
from skyrl_megatron.inference.engine_pool import EnginePool
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.inference.vllm.compat import unpacked
from skyrl_megatron.inference.vllm.requests import sampling_parameters
from skyrl_megatron.inference.vllm.settings import engine_settings
from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
from skyrl_megatron.progress import current_task
from skyrl_megatron.trainer.checkpoints import run_checkpointer
from skyrl_megatron.trainer.event_loop import LoopThread
from skyrl_megatron.types import TokenSupport, TrainingBatch
from skyrl_megatron.workers.engines import RayEngine
from skyrl_megatron.workers.placement import create_placement
from skyrl_megatron.workers.policy_rank import weight_synchronizer
from skyrl_megatron.workers.sync_calls import EnginesDisagree
from skyrl_megatron.workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig


EXPERT = re.compile(r"experts\.(\d+)\.|experts\..*\.(\d+)$")


def differing_tensors(trainer: Mapping[str, np.ndarray], engine: Mapping[str, np.ndarray], dtype: str) -> list[str]:
    """Return a line for each tensor of ``trainer`` (HF names) whose values ``engine`` (vLLM names) does not contain.

    vLLM fuses tensors. So a matrix is searched for row by row, and a vector as a part of another vector. Experts that
    a kernel has packed are compared value by value with the same expert. ``dtype``: the engine's weight dtype, in
    which both are compared.
    """
    rows = {row.tobytes() for tensor in engine.values() for row in _matrix(tensor)}
    vectors = [tensor.tobytes() for tensor in engine.values() if tensor.ndim == 1]
    packed = [tensor for tensor in engine.values() if tensor.ndim == 3]
    differing = []
    for name, plain in trainer.items():
        forms = [plain, rounded(plain, dtype)]  # an engine may keep some tensors, such as a router, in fp32
        if plain.ndim == 1:
            if not any(form.tobytes() in vector for form in forms for vector in vectors):
                differing.append(f"{name} differs: the engine has no such vector")
            continue
        missing, count, what = min((_missing(form, rows) for form in forms), key=lambda result: result[0])
        if missing and (expert := EXPERT.search(name)) and packed:
            number = int(expert[1] or expert[2])
            values = [tensor[number] for tensor in packed if number < len(tensor)]
            missing, count, what = min(_missing_values(form, expert_rows) for form in forms for expert_rows in values)
        if missing:
            differing.append(f"{name} differs: {missing} of its {count} {what} are not in the engine")
    return differing


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round fp32 values [any shape] to another dtype and back."""
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype)).float().numpy()


def _matrix(tensor: np.ndarray) -> Sequence[np.ndarray]:
    return [] if tensor.ndim < 2 else list(tensor.reshape(-1, tensor.shape[-1]) + np.float32(0.0))  # no −0


def _missing(tensor: np.ndarray, rows: set[bytes]) -> tuple[int, int, str]:
    own = _matrix(tensor)
    return sum(row.tobytes() not in rows for row in own), len(own), "rows"


def _missing_values(tensor: np.ndarray, among: np.ndarray) -> tuple[int, int, str]:
    return int((~np.isin(tensor, among)).sum()), tensor.size, "values"


class ReplayEngine(VLLMEngine):
    """An eager engine that replays one sample at a time and records its layers."""

    async def replay(
        self, token_ids: Sequence[int], *, layers: bool = False
    ) -> tuple[list[float], np.ndarray | None, dict[str, np.ndarray]]:
        """Return log-probs of tokens 1 … n−1 in nats, experts [n, L, K], and layer outputs [n, H] by name.

        The log-probs are at temperature 1 over the whole vocabulary. The experts are None if the engine does not
        return them. The layer outputs are empty without ``layers``.
        """
        from skyrl_megatron.inference.vllm import compat

        await self.reset_prefix_cache()
        if layers:
            await compat.on_every_worker(self._llm, "skyrl_watch_layers")
        one = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": None}
        parameters = sampling_parameters("replay", one, support=self.settings.return_support)
        final, _ = await self._finished("replay", token_ids, parameters, "")
        outputs: dict[str, np.ndarray] = {}
        for worker in await compat.on_every_worker(self._llm, "skyrl_layer_outputs") if layers else ():
            outputs |= unpacked(worker)
        scored = zip(token_ids[1:], final.prompt_logprobs[1:], strict=True)
        return [at[token].logprob for token, at in scored], final.outputs[0].routed_experts, outputs

    async def layer_weights(self, layer: int | None) -> list[dict[str, np.ndarray]]:
        """Return each worker's float32 tensors of a layer by vLLM's names. None: tensors outside of the layers."""
        from skyrl_megatron.inference.vllm import compat

        return [unpacked(each) for each in await compat.on_every_worker(self._llm, "skyrl_layer_weights", layer)]


Hidden = dict[str, np.ndarray]
"""Place (``runtime/recording.py``) → hidden states [n, H] of one sample."""


class Replay:
    """The policy and the engine of a run, as a context manager. Ray must be initialized.

    ``cfg``: from :func:`run_config`. ``logs``: a folder for the output of ranks and engine. For a MoE model, the
    trainer replays routes and the engine returns them, if layout and router fusion permit it.
    """

    def __init__(self, cfg: SkyRLTrainConfig, logs: Path, say: Callable[[str], None]) -> None:
        self.cfg, self.logs, self.say = cfg, logs, say
        dims = model_dimensions(read_hf_config(cfg) or {})
        engine, megatron = cfg.generator.inference_engine, cfg.trainer.policy.megatron_config
        self.replays = megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "rollout"
        """Whether the run's trainer replays the routes of its samples."""
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
            with current_task("start ranks and engine"):
                self._start(self.cfg)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, cfg: SkyRLTrainConfig) -> None:
        placement = create_placement(cfg)
        self.closing.append(placement.remove)
        settings = engine_settings(cfg, log_file=self.logs / "engine.log")
        allocation = placement["engines"]
        options = allocation.options(0, settings.workers)
        environment = allocation.engine_environment(0, settings.workers)
        settings = dataclasses.replace(
            settings, distributed_executor_backend=allocation.engine_executor(0, settings.workers)
        )
        make: Any = partial(RayEngine, settings, kind=ReplayEngine, environment=environment, **options)
        self.pool, self.dtype = EnginePool([make], wait_s=cfg.trainer.phase_timeout_s), settings.dtype
        half = cfg.trainer.bf16 and placement["policy"].on_gpus
        self.dtypes = (settings.dtype, "bfloat16" if half else "float32")
        """The engine's and the trainer's weight dtypes."""
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
                self.say(f"error during shutdown: {error}")
        self.closing = []

    @property
    def routed(self) -> bool:
        """Whether the trainer can replay routes."""
        return bool(self.cfg.trainer.policy.megatron_config.moe_enable_routing_replay)

    # ------------------------------------------------------------------ weights
    def load(self, version: int, folder: str) -> None:
        """Load the weights of a checkpoint into the trainer."""
        if version != self.version:
            self.checkpoints.load("from_path", folder)
            self.version = version

    def sync(self) -> str | None:
        """Sync the trainer's weights to the engine. Return the message of the probe if it fails, else None.

        After a failed probe the engine has the new weights and is resumed.
        """
        self._run(self.weights.begin_training())
        try:
            self._run(self.weights.sync(str(self.version)))
        except WeightSyncError as error:
            if not isinstance(error.__cause__, EnginesDisagree):
                raise
            self._run(self._engine.resume())
            return str(next(iter(error.__cause__.causes.values())))
        return None

    def offload_engine(self) -> None:
        """Offload the engine if it shares the trainer's GPUs."""
        if self.cfg.trainer.placement.colocate_all:
            self._run(self.weights.begin_training())

    # ------------------------------------------------------------------ the trainer
    def trainer(self, batch: TrainingBatch, **options: Any) -> tuple[np.ndarray, list[Hidden]]:
        """Return log-probs [R] and the recorded values of each row (``WorkerGroup.compute_recorded``)."""
        logprobs, found = self.policy.compute_recorded(batch, **options)
        return logprobs.numpy(), found

    # ------------------------------------------------------------------ the engine
    def engine(self, batch: TrainingBatch, watched: int) -> tuple[np.ndarray, list[np.ndarray | None], Hidden]:
        """Return log-probs [R] over the whole vocabulary at temperature 1, the experts of each row, and the layer
        outputs of the row ``watched``."""
        scores, hidden, responses = np.zeros(len(batch.response_mask), np.float32), Hidden(), batch.responses
        routes: list[np.ndarray | None] = []
        for row, tokens in enumerate(rows_of(batch)):
            logprobs, chosen, outputs = self._run(self._engine.replay(tokens, layers=row == watched))
            kept = min(len(logprobs), int(responses.lengths[row]))
            end = responses.of(row).stop
            scores[end - kept : end] = logprobs[len(logprobs) - kept :]
            routes.append(None if chosen is None else np.asarray(chosen)[: len(tokens)])
            hidden |= outputs
        return scores, routes, hidden

    def engine_support(self, batch: TrainingBatch) -> list[TokenSupport]:
        """Return the support of each response token. The engine samples one token after each prefix."""
        sampling = engine_sampling(self.cfg.generator.sampling_params) | {"max_tokens": 1}
        found = []
        for row, tokens in enumerate(rows_of(batch)):
            count = int(batch.response_mask[batch.responses.of(row)].sum())
            starts = [tokens[: len(tokens) - left] for left in range(count, 0, -1)]
            answers = self._run(self.client.generate(starts, sampling))
            found.append(TokenSupport.joined([a.support or TokenSupport.none(1) for a in answers]))
        return found

    def engine_weights(self, layer: int | None) -> list[dict[str, np.ndarray]]:
        """Return each engine worker's tensors of a layer. None: tensors outside of the layers."""
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
    return [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
