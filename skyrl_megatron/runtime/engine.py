"""The training engine of one rank: log-probabilities and the policy-gradient step, without Ray.

All ranks of a model call the same methods, each with the rows of its data-parallel replica. A step is::

    metrics = engine.forward_backward(mini_batch)     # one or several times: gradients accumulate
    result = engine.optim_step()

Its parts have files of their own: micro-batches (``data/splitting.py``), packing (``packed_inputs.py``), the loss of a
micro-batch (``forward_step.py``), Megatron's schedule (``schedule.py``), what Megatron divides by (``loss_scale.py``),
the optimizer (``optimizer.py``) and memory that others need (``offload.py``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, merge_metrics, metric_values, pack_metrics
from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.config.rules.role_layout import parallel_config
from skyrl_megatron.config.run_folder import run_folder
from skyrl_megatron.data.splitting import plan_micro_batches
from skyrl_megatron.runtime import loss_scale, parallel_state
from skyrl_megatron.runtime.agreement import from_rank_0, group_maximum, raise_on_all_ranks
from skyrl_megatron.runtime.batch_checks import find_problem
from skyrl_megatron.runtime.cpu import megatron_patches
from skyrl_megatron.runtime.engine_settings import (
    attach_adapters,
    ddp_config,
    hf_model,
    parameter_dtype,
    transformer_kwargs,
)
from skyrl_megatron.runtime.flops import model_flops, peak_flops
from skyrl_megatron.runtime.forward_step import LogprobHead, LogprobStep, MicroBatch, PolicyStep
from skyrl_megatron.runtime.hf.load import load_hf
from skyrl_megatron.runtime.lora.base import fingerprint
from skyrl_megatron.runtime.model.build import build_model
from skyrl_megatron.runtime.model.lm_head import return_hidden_states
from skyrl_megatron.runtime.model.router import router_metrics
from skyrl_megatron.runtime.offload import PARTS, Offload, Part
from skyrl_megatron.runtime.optimizer import StepResult, build_lr_schedule, build_optimizer, step_if_finite
from skyrl_megatron.runtime.packed_inputs import pack
from skyrl_megatron.runtime.profiling import MemoryRecorder, profiled
from skyrl_megatron.runtime.schedule import run_schedule, share_from_last_stage
from skyrl_megatron.runtime.vocab_parallel import SoftmaxSettings

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.types import TrainingBatch

logger = logging.getLogger(__name__)

RoleName = Literal["policy", "ref", "critic"]


class MegatronEngine:
    """One rank's part of a model, its gradients and its optimizer.

    ``torch.distributed`` must be initialised. The engine makes the process groups of ``role``'s layout, builds the
    model, loads its HF folder and, for policy and critic, builds the optimizer. ``total_steps``: optimizer steps of
    the run, where a decaying learning rate ends. Raises ConfigError for an impossible layout, ModelLoadError for a bad
    folder.
    """

    def __init__(self, cfg: SkyRLTrainConfig, role: RoleName = "policy", *, total_steps: int | None = None) -> None:
        megatron_patches.install()
        if cfg.trainer.deterministic:
            device.use_deterministic_kernels()
        self.cfg, self.role = cfg, role
        self.settings = getattr(cfg.trainer, role)
        self.megatron = self.settings.megatron_config
        parallel = parallel_config(self.megatron, dist.get_world_size())
        self.groups = parallel_state.initialize(parallel, seed=cfg.trainer.seed, timeout_s=cfg.trainer.phase_timeout_s)
        self.model = build_model(
            hf_model(cfg, role),
            self.groups,
            dtype=parameter_dtype(cfg),
            transformer_config_kwargs=transformer_kwargs(cfg, role),
            prefix=f"trainer.{role}.megatron_config.",
        )
        assert self.model.hf.path is not None
        load_hf(self.model, self.model.hf.path, self.groups)
        self.chunks: list[Any] = list(self.model.chunks)
        """The model's chunks, in :class:`DistributedDataParallel` when they are trained."""
        fused = cfg.trainer.fused_lm_head_logprob and self.groups.is_last_stage
        self._head_weight = return_hidden_states(self.model.chunks[-1], self.groups) if fused else None
        self.flops = model_flops(self.model.config, self.model.vocab_size)
        self.memory = MemoryRecorder(
            getattr(self.settings, "record_memory", False), Path(cfg.trainer.ckpt_path) / "memory_snapshots"
        )
        self.steps = self.skipped_steps = 0
        self._accumulated = StepTotals()
        """Denominators of the gradients accumulated so far."""
        self._reduced = False
        self.adapters = attach_adapters(cfg, self.model, self.groups) if self.is_adapted else None
        """The policy's low-rank adapters, which are trained instead of the weights."""
        self.base = self._fingerprint() if self.is_adapted else None
        """Which weights the adapters are added to."""
        if role != "ref":
            self._prepare_training(total_steps)
        self._memory = Offload(self.chunks, getattr(self, "optimizer", None))

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained and the weights stay as they are."""
        return self.role == "policy" and self.settings.model.lora.rank > 0

    def _fingerprint(self) -> str:
        folder = self.model.hf.path
        assert folder is not None
        return str(from_rank_0(fingerprint(folder) if dist.get_rank() == 0 else None))

    def _prepare_training(self, total_steps: int | None) -> None:
        config, (buffers, distributed) = self.model.config, ddp_config(self.megatron)
        self.auxiliary_scale = loss_scale.sum_gradients(config, buffers)
        if self.megatron.freeze_moe_router and not self.is_adapted:
            for chunk in self.model.chunks:
                for name, parameter in chunk.named_parameters():
                    parameter.requires_grad_(".router." not in name)
        self.chunks = [
            DistributedDataParallel(
                config, buffers, chunk, disable_bucketing=index > 0, pg_collection=self.groups.collection
            )
            for index, chunk in enumerate(self.model.chunks)
        ]
        if buffers.overlap_grad_reduce:
            config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
            if len(self.chunks) == 1:
                config.no_sync_func = config.no_sync_func[0]
        self.optimizer = build_optimizer(
            self.chunks,
            self.settings.optimizer_config,
            self.megatron.optimizer_config_kwargs,
            self.groups,
            params_dtype=parameter_dtype(self.cfg),
            use_distributed_optimizer=distributed,
            overlap_param_gather=buffers.overlap_param_gather,
        )
        self.overlaps_param_gather = distributed and buffers.overlap_param_gather
        self.lr_schedule = build_lr_schedule(self.optimizer, self.settings.optimizer_config, total_steps)

    # ------------------------------------------------------------------ place in the layout
    @property
    def dp_rank(self) -> int:
        """The data-parallel replica that this rank belongs to."""
        return self.groups.dp.rank()

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.groups.dp.size()

    @property
    def is_collection_rank(self) -> bool:
        """Whether the results of its replica are collected from this rank: tp 0, cp 0, last pipeline stage."""
        return self.groups.is_collection_rank

    # ------------------------------------------------------------------ forward only
    @torch.no_grad()
    def compute_logprobs(
        self, batch: TrainingBatch, *, temperature: float | None = None, adapters: bool = True
    ) -> Tensor:
        """Return log-probs of the response tokens under the current weights: [B, T] float32 in nats, 0 elsewhere.

        ``batch``: the rows of this replica. ``temperature`` defaults to ``algorithm.temperature``. ``adapters`` false:
        of the base model, which is the reference of a policy with adapters. Every rank gets the result of its replica.
        """
        if self.adapters is not None and not adapters:
            with self.adapters.disabled():
                return self.compute_logprobs(batch, temperature=temperature)
        self.onload("weights")
        step = LogprobStep(self._head(temperature))
        micro_batches = self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu)
        self._set_training(False)
        results = run_schedule(step, micro_batches, self.chunks, self.groups, forward_only=True)
        out = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=device.device())
        for micro_batch, logprobs in zip(micro_batches, results, strict=False):  # no results before the last stage
            out[torch.as_tensor(micro_batch.rows, device=out.device)] = logprobs[: len(micro_batch.rows)]
        if self.groups.pp.size() > 1:
            source = dist.get_global_rank(self.groups.pp, self.groups.pp.size() - 1)
            dist.broadcast(out, src=source, group=self.groups.pp)
        return out.cpu()

    # ------------------------------------------------------------------ the step
    def step_totals(self, batch: TrainingBatch, objective: PolicyObjective | None = None) -> StepTotals:
        """Count the denominators of a loss over the rows of all replicas. Collective over dp."""
        objective = objective or PolicyObjective(self.cfg.trainer.algorithm)
        mine = objective.totals(
            batch.loss_mask,
            old_log_probs=batch.old_logprobs,
            rollout_log_probs=batch.rollout_logprobs,
            uids=batch.uids or None,
        )
        gathered: list[StepTotals | None] = [None] * self.dp_size
        dist.all_gather_object(gathered, mine, group=self.groups.dp)
        return sum((totals for totals in gathered if totals is not None), StepTotals())

    def forward_backward(
        self, batch: TrainingBatch, *, accumulate: bool = False, objective: PolicyObjective | None = None
    ) -> dict[str, float]:
        """Add the gradient of the policy objective over the rows of all replicas; return the step's metrics.

        ``batch``: the rows of this replica, with advantages and the log-probs that the loss reads. Losses are means
        over the rows of all replicas, however they are split (``algorithms/reduction.py``). After several calls before
        :meth:`optim_step` the gradient is that of the mean over all their rows (with ``prompt_mean`` the rows of a
        prompt must come in one call; auxiliary losses of the calls are averaged). ``accumulate``: more calls follow;
        needed only with ``ddp_config.overlap_grad_reduce``. ``objective``: that of ``trainer.algorithm`` unless given.

        Raises the same error on every rank, with gradients cleared: ValueError for sequences over the token budget,
        for no trainable token and for inputs that are not finite; whatever a custom loss raises.
        """
        if self._reduced:
            raise ValueError("gradients are reduced already: call optim_step() or clear_gradients() first")
        started = time.perf_counter()
        self.onload("weights", "gradients")
        self._memory.onload(("optimizer",))  # travels while the model computes
        objective = objective or PolicyObjective(self.cfg.trainer.algorithm)
        with self._cleared_on_failure():
            positions = self.model.hf.config.get("max_position_embeddings")
            raise_on_all_ranks(find_problem(batch, objective, positions))
            totals = self.step_totals(batch, objective)
            if totals.tokens == 0:
                raise ValueError("no trainable token in the mini-batch: the loss mask is 0 everywhere")
            combined = self._accumulated + totals
            share = self._weight(totals) / self._weight(combined)
            if self._accumulated.tokens:
                for chunk in self.chunks:
                    chunk.scale_gradients(1.0 - share)
            self.auxiliary_scale.over(self._count_valid_tokens(batch), share)
            seed = (self.cfg.trainer.seed, self.steps, self.dp_rank)
            step = PolicyStep(self._head(), objective, combined, entropy=objective.config.use_entropy_loss, seed=seed)
            micro_batches = self._micro_batches(batch, self.cfg.trainer.micro_train_batch_size_per_gpu)
            self._set_training(True)
            with self._local_gradients(accumulate), self._profile("forward_backward"):
                results = run_schedule(step, micro_batches, self.chunks, self.groups, forward_only=False)
            raise_on_all_ranks(step.failure)
            self._accumulated = combined
        metrics = self._reduce(merge_metrics(*results))
        per_layer = self.megatron.moe_per_layer_logging
        metrics |= router_metrics(self.chunks, self.model.config, per_layer=per_layer)
        return metrics | self._speed(batch, time.perf_counter() - started, len(micro_batches))

    def optim_step(self, *, more_follow: bool = False) -> StepResult:
        """Reduce the accumulated gradients over dp, clip, step and clear them.

        ``more_follow``: another :meth:`forward_backward` comes before anything else reads the weights. With
        ``ddp_config.overlap_param_gather`` they are then gathered during its forward pass, otherwise here.

        If a gradient is not finite on any rank, the step is skipped: weights, moments and schedule stay as they are,
        the result names the first such parameter, and :attr:`skipped_steps` counts it. Raises ValueError when there
        are no gradients.
        """
        self.reduce_gradients()
        self.onload()
        with self._profile("optim_step"):
            result = step_if_finite(self.optimizer, self.lr_schedule, self.chunks)
        self.clear_gradients()
        if self.overlaps_param_gather and not more_follow:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.steps += 1
        self.skipped_steps += result.skipped
        if result.skipped and dist.get_rank() == 0:
            logger.warning("the gradient of %s is not finite: the step is skipped", result.offender)
        self.memory.snapshot(f"step_{self.steps}", dist.get_rank())
        if self.megatron.empty_cuda_cache:
            device.empty_cache()
        return result

    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over all ranks that share a parameter, unless that is done already.

        :meth:`optim_step` calls it. Megatron's reduction is not idempotent, so no gradient can be added between it and
        the step. Raises ValueError when there are no gradients.
        """
        if not self._accumulated.tokens:
            raise ValueError("there are no gradients: call forward_backward() first")
        if not self._reduced:
            finalize_model_grads(self.chunks, None, pg_collection=self.groups.collection)
            if self.adapters is not None:
                self.adapters.sum_over_etp()
            self._reduced = True

    def clear_gradients(self) -> None:
        """Forget the gradients accumulated since the last step."""
        if not self._memory.away("gradients"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._accumulated = StepTotals()
        self._reduced = False

    # ------------------------------------------------------------------ memory
    def offload(self, *parts: Part) -> None:
        """Free the device memory of ``parts`` (all: without arguments) for others on the same device.

        Methods that compute bring back what they need; who reads :attr:`chunks` or :attr:`optimizer` calls
        :meth:`onload` first. The optimizer's state stays unless ``optimizer_config.offload_after_step``. Raises
        ValueError for gradients that wait for :meth:`optim_step`.
        """
        leaving = set(parts or PARTS)
        if self._accumulated.tokens and "gradients" in leaving:
            raise ValueError(
                "gradients are not kept: call optim_step() or clear_gradients() before they are offloaded"
            )
        if self.role != "ref" and not self.settings.optimizer_config.offload_after_step:
            leaving.discard("optimizer")
        self._memory.offload(leaving)

    def onload(self, *parts: Part) -> None:
        """Bring ``parts`` (all: without arguments) back. No-op for those that are here."""
        self._memory.onload(parts or PARTS)
        self._memory.wait(*(parts or PARTS))

    def away(self) -> tuple[Part, ...]:
        """Return the parts that are offloaded."""
        return tuple(part for part in PARTS if self._memory.away(part))

    # ------------------------------------------------------------------ parts of the step
    def _head(self, temperature: float | None = None) -> LogprobHead:
        given = self.cfg.trainer.algorithm.temperature if temperature is None else temperature
        settings = SoftmaxSettings(
            self.model.vocab_size,
            temperature=1.0 if given is None else given,
            chunk_size=self.cfg.trainer.logprobs_chunk_size or 0,
            compiled=device.has_cuda() and getattr(self.settings, "use_torch_compile", False),
        )
        return LogprobHead(settings, self._head_weight)

    def _weight(self, totals: StepTotals) -> float:
        """Return the denominator of the reduction in use."""
        reduction = self.cfg.trainer.algorithm.loss_reduction
        if reduction == "prompt_mean":
            return len(totals.prompt_tokens)
        return totals.tokens if reduction == "token_mean" else totals.rows

    def _micro_batches(self, batch: TrainingBatch, rows: int) -> list[MicroBatch]:
        """Split the replica's rows into micro-batches, packed and on the device; equally many on every replica."""
        trainer = self.cfg.trainer
        plan = plan_micro_batches(
            batch.lengths,
            alignment=self.groups.parallel.alignment,
            max_tokens=trainer.max_tokens_per_microbatch,
            rows=rows,
            multiple_of=self.groups.pp.size() if len(self.chunks) > 1 else 1,
            dp_maximum=partial(group_maximum, group=self.groups.dp),
        )
        target = device.device()
        micro_batches = []
        for own in plan:
            part = batch.select(own) if len(own) else batch.blank_row()
            packed = pack(part, self.groups, target, padded=not trainer.use_sample_packing)
            micro_batches.append(MicroBatch(own, part.to(target), packed))
        return micro_batches

    def _count_valid_tokens(self, batch: TrainingBatch) -> float:
        """Count the tokens of all replicas without padding: the denominator of auxiliary losses."""
        count = torch.tensor([float(batch.lengths.sum())], dtype=torch.float64, device=device.device())
        dist.all_reduce(count, group=self.groups.dp)
        return count.item()

    def _reduce(self, metrics: ReducibleMetrics) -> dict[str, float]:
        """Sum the last stage's metrics over replicas, and share them with every rank."""
        values: dict[str, float] = {}
        if self.groups.is_last_stage:
            packed = pack_metrics(metrics, device.device())
            dist.all_reduce(packed.sums, group=self.groups.dp)
            dist.all_reduce(packed.maxima, op=dist.ReduceOp.MAX, group=self.groups.dp)
            values = metric_values(packed.unpack())
        return share_from_last_stage(values, self.groups.pp)

    def _speed(self, batch: TrainingBatch, seconds: float, micro_batches: int) -> dict[str, float]:
        """Measure tokens per second, MFU and peak memory of the training pass, from this replica's rows."""
        ranks = self.groups.parallel.world_size // self.dp_size
        flops = self.flops.training(batch.lengths)
        speed = {
            "tokens_per_second_per_rank": float(batch.lengths.sum()) / seconds / ranks,
            "flops_per_second_per_rank": flops / seconds / ranks,
            "peak_memory_bytes": float(device.peak_memory_bytes()),
            "num_microbatches": float(micro_batches),
        }
        peak = peak_flops()
        return speed if peak is None else speed | {"mfu": speed["flops_per_second_per_rank"] / peak}

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    # ------------------------------------------------------------------ contexts
    @contextlib.contextmanager
    def _local_gradients(self, accumulate: bool) -> Iterator[None]:
        """Keep gradients local while more calls follow, with overlapped reduction; the last call reduces them."""
        with contextlib.ExitStack() as stack:
            if accumulate and self.megatron.ddp_config.overlap_grad_reduce:
                for chunk in self.chunks:
                    stack.enter_context(chunk.no_sync())
            yield

    @contextlib.contextmanager
    def _cleared_on_failure(self) -> Iterator[None]:
        """Clear gradients when the enclosed work fails: no step may be taken on half of a mini-batch."""
        try:
            yield
        except BaseException:
            self.clear_gradients()
            raise

    def _profile(self, name: str) -> contextlib.AbstractContextManager[None]:
        settings = self.megatron.torch_profiler_config
        return profiled(settings, run_folder(self.cfg), f"{name}_{self.steps}", dist.get_rank())
