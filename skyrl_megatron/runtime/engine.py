"""The training engine of one rank: log-probabilities and the policy-gradient step, without Ray.

All ranks of a model call the same methods, each with the rows of its data-parallel replica. A step is::

    metrics = engine.forward_backward(mini_batch)     # one or several times: gradients accumulate
    result = engine.optim_step()

The model, its optimizer and its memory are in ``trained_model.py``. The parts of a step have their own files:
micro-batches (``data/splitting.py``), packing (``packed_inputs.py``), the loss of a micro-batch and Megatron's
schedule (``forward_step.py``), the scale of gradients (``loss_scale.py``) and the optimizer (``optimizer.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from torch import Tensor

from skyrl_megatron import device
from skyrl_megatron.algorithms.metrics import ReducibleMetrics, merge_metrics, metric_values, pack_metrics
from skyrl_megatron.algorithms.objective import Objective, PolicyObjective
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.data.prefixes import WORTH, PrefixTree, SharedPrefixes
from skyrl_megatron.data.splitting import TOGETHER, aligned, joined, plan_micro_batches, rows_by_adapter, units
from skyrl_megatron.runtime.flops import peak_flops
from skyrl_megatron.runtime.forward_step import (
    ForwardStep,
    LogprobHead,
    LogprobStep,
    MicroBatch,
    PolicyStep,
    TrainingStep,
    run_schedule,
    share_from_last_stage,
)
from skyrl_megatron.runtime.logprobs import SoftmaxSettings
from skyrl_megatron.runtime.model.moe import forget_pass_inputs, router_metrics
from skyrl_megatron.runtime.optimizer import StepResult, TrainingState, combine_results, step_if_finite
from skyrl_megatron.runtime.packed_inputs import find_problem, find_route_problem, pack, too_long
from skyrl_megatron.runtime.parallel_state import group_maximum, raise_on_all_ranks
from skyrl_megatron.runtime.parts import around, call_parts, metrics_of, planned
from skyrl_megatron.runtime.trained_model import TrainedModel
from skyrl_megatron.types import RowSpans

if TYPE_CHECKING:
    from skyrl_megatron.config import AlgorithmConfig
    from skyrl_megatron.types import TrainingBatch

logger = logging.getLogger(__name__)


COUNTED_TOKENS = 1 << 20
"""Tokens of rows whose masks are counted in padded form at once."""


class MegatronEngine(TrainedModel):
    """The steps of one rank. The arguments are those of :class:`TrainedModel`."""

    # ------------------------------------------------------------------ the step
    def forward_backward(
        self, batch: TrainingBatch, *, accumulate: bool = False, objective: Objective | None = None
    ) -> dict[str, float]:
        """Add the gradient of the objective over the rows of all replicas, and return the step's metrics.

        ``batch``: the rows of this replica, with advantages and the log-probs that the loss reads (for a critic:
        values and returns). Losses are means over the rows of all replicas, however they are split
        (``algorithms/reduction.py``). After several calls before :meth:`optim_step` the gradient is that of the mean
        over all their rows. With ``prompt_mean`` the rows of a prompt must be in one call; auxiliary losses of the
        calls are averaged. ``accumulate``: more calls follow; needed only with ``ddp_config.overlap_grad_reduce``.
        ``objective`` defaults to :meth:`objective`.

        Each of several adapters learns from its own rows only: its loss is a mean over them, and its metrics are
        returned as ``adapter/<name>/…`` as well.

        Raises the same error on every rank and clears the gradients: ValueError for sequences over the token budget,
        for no trainable token and for inputs that are not finite, and any error of a custom loss.
        """
        if any(trained.reduced for trained in self._trained.values()):
            raise ValueError("gradients are reduced already: call optim_step() or clear_gradients() first")
        started = time.perf_counter()
        self.onload("weights", "gradients")
        self._memory.onload(("optimizer",))  # is copied while the model computes
        objective = objective or self.objective()
        call_parts(self.parts, "begin_pass")
        measured: dict[str, list[ReducibleMetrics]] = {}
        with self._cleared_on_failure():
            positions = self.model.hf.config.get("max_position_embeddings")
            problem = too_long(batch, positions) or self.find_problem(batch, objective)
            if self._replayed:
                taught = isinstance(objective, PolicyObjective) and objective.name == "cross_entropy"
                taught &= self.cfg.trainer.algorithm.policy_loss_type != "cross_entropy"  # a warm-up, not the run
                missing = "natural" if taught else self._missing_routes  # no engine sampled known answers
                problem = problem or find_route_problem(batch, self.model, missing)
            # Every rank must agree before the schedule: a rank that stays away would block the others' collectives.
            raise_on_all_ranks(problem)
            for name, rows in self._turns(batch):
                part = _picked(batch, rows)
                # An adapter without a trained token has no gradient; its buffers stay untouched, and it takes no step.
                if (totals := self.step_totals(part, objective)).tokens:
                    self.set_adapter(name)
                    measured[name] = self._add_gradient(part, totals, objective, accumulate)
            if not measured:
                raise ValueError("no trainable token in the mini-batch: the loss mask is 0 everywhere")
        seconds = time.perf_counter() - started
        metrics = self._reduce(merge_metrics(*(result for results in measured.values() for result in results)))
        per_layer = self.megatron.moe_per_layer_logging
        routing, loads = router_metrics(self.chunks, self.model.config, per_layer=per_layer)
        metrics |= routing | metrics_of(self.parts, "end_pass", loads)
        for layer, load in loads.items():
            self._expert_load[layer] = self._expert_load.get(layer, 0) + load
        for name, results in measured.items() if self.adapter_names != ("",) else ():
            of_adapter = self._reduce(merge_metrics(*results))
            metrics |= {f"adapter/{name}/{metric}": value for metric, value in of_adapter.items()}
        return metrics | self._speed(batch, seconds, sum(map(len, measured.values())))

    def _add_gradient(
        self, batch: TrainingBatch, totals: StepTotals, objective: Objective, accumulate: bool
    ) -> list[ReducibleMetrics]:
        """Add the gradient of ``batch``, the rows of the active adapter; return the metrics of each micro-batch.

        ``totals``: denominators over the rows of all replicas.
        """
        now = self._now
        # Buffers hold the gradient of a mean. With more rows the mean's denominator grows, so what is there shrinks to
        # its share before the new rows are added, instead of a division that would have to wait for the last call.
        combined = now.accumulated + totals
        share = objective.weight(totals) / objective.weight(combined)
        if now.accumulated.tokens:
            now.scale_gradients(1.0 - share, of_tokens=now.accumulated.tokens / combined.tokens)
        # Megatron adds the gradients of auxiliary losses within the layers, out of reach of the objective's weights.
        self.auxiliary_scale.over(self._count_valid_tokens(batch), share)
        step = self._training_step(objective, combined)
        micro_batches = self._micro_batches(batch, self.cfg.trainer.micro_train_batch_size_per_gpu)
        self._set_training(True)
        with self._local_gradients(accumulate), self._parts_around("forward_backward"):
            results = run_schedule(step, micro_batches, now.chunks, self.groups, forward_only=False)
        # A loss that raised inside the schedule would leave other stages waiting, so its error was kept until here.
        raise_on_all_ranks(step.failure)
        now.accumulated = combined
        return results

    def _training_step(self, objective: Objective, totals: StepTotals) -> TrainingStep:
        assert isinstance(objective, PolicyObjective)
        seed = (self.cfg.trainer.seed, self._now.steps, self.dp_rank)
        head, entropy = self.head(), objective.config.use_entropy_loss
        extra = [loss for loss in call_parts(self.parts, "extra_loss", head) if loss is not None]
        return PolicyStep(head, objective, totals, entropy=entropy, seed=seed, extra=extra)

    def optim_step(self, *, more_follow: bool = False) -> StepResult:
        """Reduce the accumulated gradients over dp, clip them, take a step and clear them.

        ``more_follow``: another :meth:`forward_backward` comes before anything else reads the weights. With
        ``ddp_config.overlap_param_gather`` they are then gathered during its forward pass, otherwise here.

        If a gradient is not finite on any rank, the step is skipped: weights, moments and schedule do not change, the
        result names the first such parameter, and :attr:`skipped_steps` counts it. So is a step whose gradient norm
        is above ``optimizer_config_kwargs.grad_norm_skip_threshold``. Raises ValueError if there are no
        gradients.

        Each adapter that has gradients takes a step of its own.
        """
        self.reduce_gradients()
        self.onload()
        results: dict[str, StepResult] = {}
        for name in self._waiting():
            self.set_adapter(name)
            results[name] = self._step(more_follow and len(self._trained) == 1)
        result = combine_results(results)
        if not more_follow:
            metrics = metrics_of(self.parts, "end_batch", self._trained, self.steps)
            result = dataclasses.replace(result, metrics={**result.metrics, **metrics})
        if self.megatron.empty_cuda_cache:
            device.empty_cache()
        return result

    def _step(self, more_follow: bool) -> StepResult:
        now = self._now
        norm_groups = [part.norm_group for part in self.parts if part.norm_group is not None]
        with self._parts_around("optim_step"):
            call_parts(self.parts, "begin_step", now)
            result = step_if_finite(now.optimizer, now.lr_schedule, now.chunks, norm_groups=norm_groups)
            if not result.skipped:
                result = dataclasses.replace(result, metrics=metrics_of(self.parts, "updated", now))
        self._clear(now)
        # Megatron would gather the weights layer by layer in the next forward pass. What reads them first here may be
        # a weight sync or an export, which runs no forward pass.
        if self.overlaps_param_gather and not more_follow:
            for chunk in now.chunks:
                chunk.start_param_sync(force_sync=True)
        now.steps += 1
        now.skipped_steps += result.skipped
        if result.skipped and dist.get_rank() == 0:
            why = f"the gradient norm {result.grad_norm:.4g} is above optimizer_config_kwargs.grad_norm_skip_threshold"
            if result.offender:
                why = f"the gradient of {result.offender} is not finite"
            logger.warning("%s: the step is skipped", why)
        call_parts(self.parts, "end_step", self._numbered("step"))
        return result

    def reduce_gradients(self) -> None:
        """Sum the accumulated gradients over all ranks that share a parameter, unless that is done already.

        :meth:`optim_step` calls it. Megatron's reduction is not idempotent, so no gradient can be added between it and
        the step. Raises ValueError if there are no gradients.
        """
        # Taking a step without gradients would still decay weights and moments.
        if not self._waiting():
            raise ValueError("there are no gradients: call forward_backward() first")
        for name in self._waiting():
            if not self._trained[name].reduced:
                self.set_adapter(name)
                self._now.reduce_gradients(self.groups)

    def clear_gradients(self) -> None:
        """Drop the gradients accumulated since the last step."""
        for trained in self._trained.values():
            self._clear(trained)
        reset_model_temporary_tensors(self.model.config, self.chunks)  # tokens per expert, for the routers' biases

    def _clear(self, trained: TrainingState) -> None:
        trained.clear_gradients(buffers=not self._memory.away("gradients"))

    def take_expert_load(self) -> dict[int, list[int]]:
        """Return the tokens that each expert got in training since the last call, over all ranks: layer → [E]."""
        taken, self._expert_load = self._expert_load, {}
        return {layer: load.long().tolist() for layer, load in taken.items()}

    # ------------------------------------------------------------------ forward only
    @torch.no_grad()
    def compute_logprobs(
        self,
        batch: TrainingBatch,
        *,
        temperature: float | None = None,
        adapters: bool = True,
        make_step: Callable[[LogprobHead, np.ndarray], LogprobStep] | None = None,
    ) -> Tensor:
        """Return log-probs of the response tokens under the current weights: [R] float32 in nats.

        ``batch``: the rows of this replica. ``temperature`` defaults to ``algorithm.temperature``. ``adapters=False``
        computes them with the base model, which is the reference of a policy with adapters. ``make_step`` makes the
        step of some rows, [b] int64 indices of the batch, for example to record their pass (``recording.py``). Every
        rank gets the result of its replica.
        """
        self.onload("weights")
        out = torch.zeros(len(batch.response_mask))
        numbers = torch.arange(len(out))
        for name, rows in self._turns(batch):
            self.set_adapter(name)
            # The adapters' base is the reference model: no second copy of the weights is needed.
            base = self.adapters is not None and not adapters
            with self.adapters.disabled() if self.adapters and base else contextlib.nullcontext():
                head = self.head(temperature)
                step = LogprobStep(head) if make_step is None else make_step(head, rows)
                out[batch.responses.select(numbers, rows)] = self.forward_only(step, _picked(batch, rows))
        return out

    def forward_only(self, step: ForwardStep, batch: TrainingBatch, *, width: int | None = None) -> Tensor:
        """Return the output of ``step`` for the response tokens of every row of this replica: [R] float32, or with
        ``width`` [R, width]."""
        micro_batches = self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu)
        self._set_training(False)
        results = run_schedule(step, micro_batches, self.chunks, self.groups, forward_only=True)
        shape = (len(batch.response_mask), *([] if width is None else [width]))
        out = torch.zeros(shape, dtype=torch.float32, device=device.device())
        responses = batch.responses
        for micro_batch, values in zip(micro_batches, results, strict=False):  # no results before the last stage
            for row, line in zip(micro_batch.rows.tolist(), values, strict=False):
                tokens = responses.of(row)
                out[tokens] = line[len(line) - (tokens.stop - tokens.start) :]
        # Only the last stage has results, and callers on every rank use them.
        if self.groups.pp.size() > 1:
            source = dist.get_global_rank(self.groups.pp, self.groups.pp.size() - 1)
            dist.broadcast(out, src=source, group=self.groups.pp)
        return out.cpu()

    # ------------------------------------------------------------------ parts of the step
    def objective(self, changes: Mapping[str, Any] | None = None) -> Objective:
        """Return the loss of ``trainer.algorithm``. ``changes`` replaces some of its fields."""
        return PolicyObjective(self._algorithm(changes))

    def find_problem(self, batch: TrainingBatch, objective: Objective) -> Exception | None:
        """Return an error if the batch lacks a field that ``objective`` reads, or has it not finite; else None."""
        return find_problem(batch, objective)

    def _algorithm(self, changes: Mapping[str, Any] | None) -> AlgorithmConfig:
        config = self.cfg.trainer.algorithm
        return dataclasses.replace(config, **changes) if changes else config

    def step_totals(self, batch: TrainingBatch, objective: Objective | None = None) -> StepTotals:
        """Count the denominators of a loss over the rows of all replicas. Collective over dp."""
        objective = objective or self.objective()
        of_replica, rows = StepTotals(), batch.responses
        read = ("loss_mask", "old_logprobs", "rollout_logprobs", "observation_mask")
        for part in rows.of_similar_length(COUNTED_TOKENS):
            of_part = RowSpans(rows.lengths[part])
            values = {name: value for name in read if (value := getattr(batch, name)) is not None}
            shown = {name: of_part.padded(rows.select(value, part)).float() for name, value in values.items()}
            of_replica += objective.totals(
                shown["loss_mask"],
                old_log_probs=shown.get("old_logprobs"),
                rollout_log_probs=shown.get("rollout_logprobs"),
                observation_mask=shown.get("observation_mask"),
                uids=[batch.uids[row] for row in part.tolist()] if batch.uids else None,
            )
        # Totals hold counts per prompt, whose rows may be on several replicas: no fixed shape, so no all-reduce.
        gathered: list[StepTotals | None] = [None] * self.dp_size
        dist.all_gather_object(gathered, of_replica, group=self.groups.dp)
        return sum((totals for totals in gathered if totals is not None), StepTotals())

    @property
    def _missing_routes(self) -> str:
        """How a token without recorded experts is handled. With ``moe_routing_replay_source=trainer`` a batch that
        takes one step has none, and is routed as usual."""
        of_engine = self.megatron.moe_routing_replay_source == "rollout"
        return self.megatron.moe_routing_replay_missing if of_engine else "natural"

    def _turns(self, batch: TrainingBatch) -> list[tuple[str, np.ndarray]]:
        """Return (adapter, its rows of this replica) for every adapter that any replica has rows of, in the order of
        training. Collective. Raises ValueError for an unknown name, on all ranks."""
        if self.role != "policy" or (not batch.adapters and len(self.adapter_names) == 1):
            return [(self._name, np.arange(len(batch)))]
        rows, problem = {name: np.zeros(0, np.int64) for name in self.adapter_names}, None
        try:
            rows = rows_by_adapter(batch, self.adapter_names)
        except ValueError as error:
            problem = error
        raise_on_all_ranks(problem)
        counts = group_maximum([len(of_adapter) for of_adapter in rows.values()], self.groups.dp)
        return [(name, of_adapter) for (name, of_adapter), count in zip(rows.items(), counts, strict=True) if count]

    def head(self, temperature: float | None = None) -> LogprobHead:
        """Return the head that maps the model's output to log-probs, at ``algorithm.temperature`` by default."""
        given = self.cfg.trainer.algorithm.temperature if temperature is None else temperature
        settings = SoftmaxSettings(
            self.model.vocab_size,
            temperature=1.0 if given is None else given,
            chunk_size=self.cfg.trainer.logprobs_chunk_size or 0,
            overwrite=True,
        )
        return LogprobHead(settings, self._head_weight, self.adapters.on_hidden if self.adapters else None)

    def _micro_batches(self, batch: TrainingBatch, rows: int) -> list[MicroBatch]:
        """Split the replica's rows into packed micro-batches on the device; every replica gets the same number."""
        trainer, alignment, parts = self.cfg.trainer, self.groups.parallel.alignment, units(batch)
        lengths, most = aligned(batch.lengths, alignment), trainer.max_tokens_per_microbatch
        prefixes = self._shared_prefixes(batch) if most > 0 or rows > 1 else None
        if prefixes is not None and not batch.metadata.get(TOGETHER):
            parts, rows = prefixes.parts(batch.lengths, alignment, most, rows), 1
        if prefixes is None:
            tokens = [lengths[part].sum() for part in parts]
        else:
            tokens = [prefixes.tokens(part, batch.lengths, alignment) for part in parts]
        plan = plan_micro_batches(
            np.array(tokens, np.int64),
            alignment=alignment,
            max_tokens=most,
            rows=rows,
            # The interleaved schedule of virtual stages takes micro-batches in groups of pp.
            multiple_of=self.groups.pp.size() if len(self.chunks) > 1 else 1,
            dp_maximum=partial(group_maximum, group=self.groups.dp),
        )
        plan = planned(self.parts, batch, parts, plan, rows, prefixes)
        target = device.device()
        micro_batches, self._computed_tokens = [], 0
        for chosen in (joined(parts, share) for share in plan):
            tree = None
            if prefixes is not None and len(chosen):
                chosen, shared = prefixes.among(chosen)
                tree = PrefixTree.of(batch.lengths[chosen], shared)
                self._computed_tokens += int(tree.lengths.sum())
            else:
                self._computed_tokens += int(batch.lengths[chosen].sum())
            # A replica with fewer rows runs padding, because all replicas must enter the same expert collectives.
            part = (batch.select(chosen) if len(chosen) else batch.blank_row()).padded()
            padded = not trainer.use_sample_packing
            packed = pack(
                part,
                self.groups,
                target,
                padded=padded,
                replayed=self._replayed,
                by_sequence=self._by_sequence,
                tree=tree,
            )
            micro_batches.append(MicroBatch(chosen, part.to(target), packed))
        return micro_batches

    def _shared_prefixes(self, batch: TrainingBatch) -> SharedPrefixes | None:
        """Return what the rows of this replica share; None if that is nothing, or with ``auto`` too little.

        The same rows always give the same answer."""
        if not self.shares_prefixes or len(batch) < 2:
            return None
        routes = batch.rollout_routes if self._replayed else []

        def same(row: int, other: int, tokens: int) -> int:
            one, two = (routes[number] if routes else None for number in (row, other))
            if one is None or two is None:
                return tokens if one is two else 0
            known = min(len(one), len(two), tokens)
            layers = list(self._replayed)
            unlike = (one[:known, layers] != two[:known, layers]).any((1, 2))
            return int(unlike.argmax()) if unlike.any() else tokens if len(one) == len(two) else known

        prefixes = SharedPrefixes.of(batch.tokens.numpy(), batch.lengths, same)
        if self.megatron.moe_enable_routing_replay and batch.rollout_routes:
            # each stage compares the routes of its layers, and all must share the same tokens
            least = group_maximum([-shared for shared in prefixes.shared.tolist()], self.groups.pp)
            prefixes = SharedPrefixes(prefixes.order, -np.asarray(least, np.int64))
        wanted = WORTH if self.cfg.trainer.share_prefixes == "auto" else 0.0
        return prefixes if prefixes.shared.any() and prefixes.saved(batch.lengths) >= wanted else None

    def _count_valid_tokens(self, batch: TrainingBatch) -> float:
        """Count the tokens of all replicas without padding: the denominator of the auxiliary losses."""
        count = torch.tensor([float(batch.lengths.sum())], dtype=torch.float64, device=device.device())
        dist.all_reduce(count, group=self.groups.dp)
        return count.item()

    def _reduce(self, metrics: ReducibleMetrics) -> dict[str, float]:
        """Sum the last stage's metrics over the replicas, and broadcast them to every rank."""
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
        if self.shares_prefixes:
            speed["shared_prefix_share"] = 1.0 - self._computed_tokens / float(batch.lengths.sum())
        peak = peak_flops(self.cfg.trainer.peak_flops_per_rank)
        return speed if peak is None else speed | {"mfu": speed["flops_per_second_per_rank"] / peak}

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    # ------------------------------------------------------------------ contexts
    @contextlib.contextmanager
    def _local_gradients(self, accumulate: bool) -> Iterator[None]:
        """Keep gradients local while more calls follow, if their reduction overlaps; the last call reduces them."""
        with contextlib.ExitStack() as stack:
            if accumulate and self.megatron.ddp_config.overlap_grad_reduce:
                for chunk in self.chunks:
                    stack.enter_context(chunk.no_sync())
            yield

    @contextlib.contextmanager
    def _cleared_on_failure(self) -> Iterator[None]:
        """Clear the gradients if the block fails: no step may use half of a mini-batch."""
        try:
            yield
        except BaseException:
            self.clear_gradients()
            forget_pass_inputs(self.model.chunks)
            raise

    def _parts_around(self, phase: str) -> contextlib.AbstractContextManager[None]:
        return around(self.parts, phase, self._numbered(phase))

    def _numbered(self, name: str) -> str:
        """Return ``name`` with the active adapter and the number of its step."""
        return "_".join(filter(None, (name, self._name, str(self.steps))))


def _picked(batch: TrainingBatch, rows: np.ndarray) -> TrainingBatch:
    return batch if len(rows) == len(batch) else batch.select(rows)
