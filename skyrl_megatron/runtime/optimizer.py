"""The optimizer, its learning-rate schedule and its gradient buffers.

With several adapters, exactly one is active at any time (:meth:`TrainingState.begin`): only its factors are submodules
of the chunks, and the random states are its own. Buffers, optimizer, schedule, checkpoints and exports therefore work
as with a single adapter. Adapters cannot change within one pass of Megatron's schedule: recomputed blocks and backward
passes of 1F1B would use a different adapter than their forward pass.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from skyrl_megatron import device
from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.config.schema.algorithm import OPTIMIZER_DTYPES
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime.adapters import TrainedAdapters, attach_adapters
from skyrl_megatron.runtime.checkpoint import rank_files as rng
from skyrl_megatron.runtime.engine_settings import FUSED_GRADIENTS, parameter_dtype
from skyrl_megatron.runtime.model.moe import freeze_expert_bias
from skyrl_megatron.runtime.model.mtp import draft_of
from skyrl_megatron.runtime.partial_optimizer import RATIO, PartialOptimizer, partial_optimizer

if TYPE_CHECKING:
    from skyrl_megatron.config import OptimizerConfig as TrainOptimizerConfig
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


# scheduler name in the configuration → decay style of Megatron's scheduler
_DECAY_STYLE = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "WSD",
}


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step, equal on every rank."""

    grad_norm: float
    """L2 norm over all parameters before clipping."""
    learning_rate: float
    """The learning rate of this step."""
    skipped: bool
    """True if the gradient was not finite, or its norm is above ``grad_norm_skip_threshold``: weights, moments and
    schedule are unchanged."""
    offender: str | None = None
    """If the gradient was not finite: the first parameter with such a gradient, with its rank."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the parts of the rank (``parts.py``)."""
    adapters: Mapping[str, StepResult] = field(default_factory=dict)
    """With several adapters: the result of each, by name."""
    zeros_in_grad: float | None = None
    """With ``log_num_zeros_in_grad``, the number of gradient entries that are 0."""


def combine_results(results: Mapping[str, StepResult]) -> StepResult:
    """Combine the results of the adapters' steps into one. A result under the name ``""`` is returned unchanged."""
    if "" in results:
        return results[""]
    # Adapters have disjoint parameters: the norm over all of them is the root of the sum of squares.
    parts = list(results.values())
    norm = math.hypot(*(part.grad_norm for part in parts))
    offender = next((f"{part.offender} of adapter {name}" for name, part in results.items() if part.offender), None)
    rate = max(part.learning_rate for part in parts)
    return StepResult(norm, rate, any(part.skipped for part in parts), offender, adapters=dict(results))


def build_optimizer(
    chunks: list[DistributedDataParallel],
    settings: TrainOptimizerConfig,
    extra: dict[str, Any],
    groups: ProcessGroups,
    *,
    params_dtype: torch.dtype,
    use_distributed_optimizer: bool,
    overlap_param_gather: bool,
    partial: PartialOptimizer | None = None,
) -> MegatronOptimizer:
    """Build Megatron's Adam over all chunks of this rank, with ``partial`` in it for the parameters that it takes.

    ``extra`` (``optimizer_config_kwargs``): fields of Megatron's ``OptimizerConfig``, applied last (precision-aware
    moments, CPU offload, ``adam_eps``, …). Raises ConfigError for a field that Megatron does not have or rejects.
    """
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.adam_betas[0],
        "adam_beta2": settings.adam_betas[1],
        "clip_grad": settings.max_grad_norm,
        "bf16": params_dtype == torch.bfloat16,
        "params_dtype": params_dtype,
        "use_distributed_optimizer": use_distributed_optimizer,
        "overlap_param_gather": overlap_param_gather,
        # Megatron's default is true, and pinned memory needs a GPU.
        "pin_cpu_grads": device.has_cuda(),
        "pin_cpu_params": device.has_cuda(),
    }
    key = "trainer.policy.megatron_config.optimizer_config_kwargs"
    unknown = [name for name in extra if name not in OptimizerConfig.__dataclass_fields__]
    if unknown:
        raise ConfigError(
            [Problem(f"{key}.{name}", extra[name], "megatron's OptimizerConfig has no such field") for name in unknown]
        )
    fields |= extra | _dtypes(extra, key)
    _require_hardware(fields, key)
    try:
        config = OptimizerConfig(**fields)
    except (ValueError, AssertionError) as error:
        raise ConfigError([Problem(key, extra, f"Megatron rejects it: {error}")]) from error
    overrides = get_standard_config_overrides(config)
    if settings.decay_norms_and_biases:
        overrides = {which: change for which, change in overrides.items() if "wd_mult" not in change}
    if partial is not None:
        overrides |= partial.overrides(settings)
    optimizer = get_megatron_optimizer(
        config,
        chunks,
        config_overrides=overrides,
        # Megatron's gloo groups are for its own checkpoints, which this trainer does not use.
        use_gloo_process_groups=False,
        pg_collection=groups.collection,
    )
    if partial is not None:
        partial.install(optimizer, extra)
    if not chunks[0].ddp_config.grad_reduce_in_fp32:
        _wait_for_gradients(optimizer)
    return optimizer


class _Schedule(OptimizerParamScheduler):
    """Megatron's schedule, with a constant ratio to it for some parameter groups."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of a group at the current step."""
        return float(super().get_lr(param_group)) * float(param_group.get(RATIO, 1.0))


def _wait_for_gradients(optimizer: MegatronOptimizer) -> None:
    """Make Adam on the GPU wait for its gradients, which a hybrid optimizer converts to fp32 on the stream of its
    copies (``_set_sub_optimizer_grads`` of ``cpu_offloading/hybrid_optimizer.py``)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        hybrid: Any = getattr(part, "optimizer", None)
        if getattr(hybrid, "gpu_optimizer", None) is not None and hybrid.overlap_cpu_optimizer_d2h_h2d:

            def wait(*_: Any, copies: Any = hybrid._d2h_stream) -> None:
                torch.cuda.current_stream().wait_stream(copies)

            hybrid.gpu_optimizer.register_step_pre_hook(wait)


def _dtypes(extra: dict[str, Any], key: str) -> dict[str, torch.dtype]:
    """Convert the dtype names of a configuration to dtypes. Raises ConfigError for an unknown name."""
    named = {name: value for name, value in extra.items() if name.endswith("_dtype") and isinstance(value, str)}
    fix = f"unknown dtype: use one of {', '.join(OPTIMIZER_DTYPES)}"
    if problems := [Problem(f"{key}.{n}", value, fix) for n, value in named.items() if value not in OPTIMIZER_DTYPES]:
        raise ConfigError(problems)
    return {name: getattr(torch, OPTIMIZER_DTYPES[value]) for name, value in named.items()}


def _require_hardware(fields: dict[str, Any], key: str) -> None:
    """Raise ConfigError for an optimizer that this machine or dtype does not support; Megatron would fail later."""
    offloaded, name = fields.get("optimizer_cpu_offload"), "optimizer_cpu_offload"
    if offloaded and not device.has_cuda():
        fix = "has no use on a machine without a GPU; remove it"
        raise ConfigError([Problem(f"{key}.{name}", offloaded, fix)])
    if offloaded and fields["use_distributed_optimizer"] and fields["params_dtype"] == torch.float32:
        fix = "Megatron cannot shard float32 weights that it updates on the host; set trainer.bf16=true"
        raise ConfigError([Problem(f"{key}.{name}", offloaded, fix)])
    name = "use_precision_aware_optimizer"
    if fields.get(name) and importlib.util.find_spec("transformer_engine") is None:
        fix = "needs Transformer Engine, which is not installed; install it or remove this setting"
        raise ConfigError([Problem(f"{key}.{name}", fields[name], fix)])


def build_lr_schedule(
    optimizer: MegatronOptimizer, settings: TrainOptimizerConfig, total_steps: int | None
) -> OptimizerParamScheduler:
    """Build the schedule ``settings.scheduler``. It counts optimizer steps (mini-batches), including the warm-up.

    The first of N warm-up steps uses lr/N instead of 0, so that no rollout is wasted. The rate reaches ``min_lr``
    after ``num_decay_steps`` (default: ``total_steps``). ``wsd`` holds the peak until the last tenth and then decays
    linearly. Raises ConfigError if a decaying schedule has no end, or ends within its warm-up.
    """
    key = "trainer.policy.optimizer_config"
    style = _DECAY_STYLE.get(settings.scheduler)
    if style is None:
        fix = f"known schedules: {', '.join(sorted(_DECAY_STYLE))}"
        raise ConfigError([Problem(f"{key}.scheduler", settings.scheduler, fix)])
    end = settings.num_decay_steps if settings.num_decay_steps is not None else total_steps
    if style == "constant":
        end = settings.num_warmup_steps + 1  # unused: a constant rate has no end
    elif end is None:
        fix = f"required by scheduler={settings.scheduler}: set the number of steps after which the decay ends"
        raise ConfigError([Problem(f"{key}.num_decay_steps", None, fix)])
    elif end <= settings.num_warmup_steps:
        fix = f"must exceed num_warmup_steps={settings.num_warmup_steps}"
        raise ConfigError([Problem(f"{key}.num_decay_steps", end, fix)])
    return _Schedule(
        optimizer,
        init_lr=settings.lr / max(settings.num_warmup_steps, 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr if style != "constant" else min(settings.min_lr, settings.lr),
        lr_warmup_steps=settings.num_warmup_steps,
        lr_decay_steps=end,
        lr_decay_style=style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=end,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, end // 10),
        lr_wsd_decay_style="linear",
    )


def current_lr(optimizer: MegatronOptimizer) -> float:
    """Return the learning rate of the parameter groups that follow the schedule."""
    return max((float(group["lr"]) for group in optimizer.param_groups if RATIO not in group), default=0.0)


@torch.no_grad()
def step_if_finite(
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    chunks: list[DistributedDataParallel],
    *,
    norm_groups: Sequence[str] = (),
) -> StepResult:
    """Clip gradients and step, unless a gradient on any rank is not finite, or the norm is above
    ``grad_norm_skip_threshold``. Gradients must be reduced over dp before.

    Scale-invariant tensors, such as Muon's matrices, are not clipped: a factor on one step's gradient would only
    change its share in the momentum.

    This follows ``ChainedOptimizer.step`` of megatron/core/optimizer/optimizer.py, but checks the norm first: without
    a loss scaler Megatron does not check it and would write NaN into all weights. ``norm_groups``: names of
    parameters, of any rank, that are clipped by a norm of their own; if that is not finite, their gradients are set
    to 0.
    """
    learning_rate = current_lr(optimizer)
    # Gives the masters their gradients, of which the norm is taken; without it they have those of the last step.
    found_inf = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    healthy = torch.tensor([float(math.isfinite(grad_norm) and not found_inf)], device=device.device())
    # Each rank has checked its own gradients only, and all must decide alike.
    dist.all_reduce(healthy, op=dist.ReduceOp.MIN)
    if not healthy.item():
        return StepResult(grad_norm, learning_rate, True, _first_offender(chunks))
    options: Any = optimizer.config
    if grad_norm > options.grad_norm_skip_threshold:  # Megatron's value without a limit is infinity
        return StepResult(grad_norm, learning_rate, True)
    norms = {None: grad_norm} | {group: _group_norm(optimizer, group) for group in norm_groups}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        scale_invariant = getattr(getattr(part, "optimizer", None), "scale_invariant", ())
        for group, norm in norms.items():
            clipped = [
                parameter for parameter in parameters if getattr(parameter, GRAD_NORM_GROUP_ATTR, None) == group
            ]
            if math.isfinite(norm):
                clipped = [parameter for parameter in clipped if id(parameter) not in scale_invariant]
            # Only the norm of such a group can be infinite here. The other parameters take their step without it.
            if not math.isfinite(norm):
                _zero(clipped, decoupled)
            elif clipped and part.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    clipped, max_norm=part.config.clip_grad, total_norm=norm, use_decoupled_grad=decoupled
                )
    zeros = float(optimizer.count_zeros()) if options.log_num_zeros_in_grad else None
    optimizer.step_with_ready_grads()
    schedule.step(1)
    return StepResult(grad_norm, learning_rate, False, zeros_in_grad=zeros)


def _group_norm(optimizer: MegatronOptimizer, group: str) -> float:
    """Return the gradient norm of a group of parameters on every rank, reduced as Megatron reduces the other norms."""
    # A chained optimizer has it, a single one not.
    if hasattr(optimizer, "_get_grad_norm_for_group"):
        return float(optimizer._get_grad_norm_for_group(group))
    grads = optimizer.get_grads_for_grad_norm(group)
    return float(get_grad_norm_fp32(grads, grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group()))


def _zero(parameters: list[torch.nn.Parameter], decoupled: bool) -> None:
    """Set gradients to 0."""
    for parameter in parameters:
        grad = getattr(parameter, "decoupled_grad" if decoupled else "grad", None)
        if grad is not None:
            grad.zero_()


def _first_offender(chunks: list[DistributedDataParallel]) -> str | None:
    """Return the first parameter, by rank then by position, whose reduced gradient has a NaN or infinity."""
    offender = None
    # Only after a failed step: it reads every gradient once more.
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            grad = getattr(parameter, "main_grad", None)
            if grad is not None and not torch.isfinite(grad).all():
                offender = f"{name} (rank {dist.get_rank()})"
                break
        if offender:
            break
    offenders: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offenders, offender)
    return next((name for name in offenders if name), None)


@dataclass(slots=True, eq=False)
class TrainingState:
    """Training state of the model or of one adapter: gradient buffers, optimizer, schedule, step counts."""

    chunks: list[Any]
    """The model's chunks, wrapped in :class:`DistributedDataParallel` over the trained parameters."""
    adapters: TrainedAdapters | None = None
    optimizer: Any = None
    lr_schedule: OptimizerParamScheduler | None = None
    draft: Any = None
    """The draft head of the last chunk in separate gradient buffers. The chunk's buffers, and the order in which its
    gradients are summed, are therefore the same as without a draft head."""
    steps: int = 0
    skipped_steps: int = 0
    accumulated: StepTotals = field(default_factory=StepTotals)
    """Denominators of the gradients accumulated so far."""
    reduced: bool = False
    """Whether these gradients are already summed over the ranks."""
    random_states: bytes | None = None
    """With several adapters: the random states of this one while another is active."""

    @property
    def buffered(self) -> list[Any]:
        """All modules with gradient buffers."""
        return self.chunks if self.draft is None else [*self.chunks, self.draft]

    def scale_gradients(self, factor: float, *, of_tokens: float) -> None:
        """Scale the accumulated gradients. ``of_tokens``: the factor of a loss that is a mean over tokens."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)
        if self.draft is not None:  # its loss is a mean over tokens for every objective
            self.draft.scale_gradients(of_tokens)

    def reduce_gradients(self, groups: ProcessGroups) -> None:
        """Sum the accumulated gradients over all ranks that share a parameter. Not idempotent, as Megatron's is."""
        if self.draft is not None:
            self.draft.finish_grad_sync()
        finalize_model_grads(self.chunks, None, pg_collection=groups.collection)
        if self.adapters is not None:
            self.adapters.sum_over_etp()
        self.reduced = True

    def clear_gradients(self, *, buffers: bool) -> None:
        """Drop the gradients. ``buffers``: also in Megatron's buffers, unless their memory is offloaded."""
        for chunk in self.buffered if buffers else ():
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.accumulated, self.reduced = StepTotals(), False

    def begin(self) -> None:
        """Attach this adapter to the model and restore its random states."""
        assert self.adapters is not None
        self.adapters.attach()
        enable_grad_overlap(self.chunks)
        if self.random_states is not None:
            rng.restore_rng(self.random_states)

    def end(self) -> None:
        """Detach this adapter from the model and save its random states."""
        assert self.adapters is not None
        self.random_states = rng.capture_rng()
        self.adapters.detach()


def prepare_training(
    cfg: SkyRLTrainConfig,
    role: str,
    model: ModelChunks,
    groups: ProcessGroups,
    buffers: DistributedDataParallelConfig,
    total_steps: int | None,
    base: str | None = None,
) -> TrainingState:
    """Attach an adapter if the role has one, and build gradient buffers, optimizer and schedule.

    The adapter is loaded from its folder if one is configured, else initialised. ``total_steps``: number of optimizer
    steps, the default end of a decaying learning rate. ``base``: fingerprint of the base weights.
    """
    settings: Any = getattr(cfg.trainer, role)
    adapted = role == "policy" and settings.model.lora.rank > 0
    adapters = attach_adapters(cfg, model, groups, base) if adapted else None
    if settings.megatron_config.freeze_moe_router and not adapted:
        # The bias moves experts' loads without a gradient, so that requires_grad alone would not freeze the router.
        freeze_expert_bias(model.chunks)
        for chunk in model.chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".router." not in name)
    key = f"trainer.{role}.optimizer_config.optimizer"
    partial = partial_optimizer(settings.optimizer_config.optimizer, model, groups, adapters, key)
    last, head = model.chunks[-1], draft_of(model.chunks)
    if head is not None:
        del last.draft  # keeps the draft head out of the chunk's gradient buffers; restored below
    # As in Megatron: communication of later chunks overlaps with the first one's computation anyway.
    chunks = [
        DistributedDataParallel(
            model.config, buffers, chunk, disable_bucketing=index > 0, pg_collection=groups.collection
        )
        for index, chunk in enumerate(model.chunks)
    ]
    enable_grad_overlap(chunks)
    if settings.megatron_config.transformer_config_kwargs.get(FUSED_GRADIENTS, True):
        fuse_gradients(chunks)
    draft = None
    if head is not None:
        # The schedule's hooks know the chunks alone and would never start the draft head's buckets.
        without_overlap = dataclasses.replace(buffers, overlap_grad_reduce=False, overlap_param_gather=False)
        draft = DistributedDataParallel(
            model.config, without_overlap, head, disable_bucketing=True, pg_collection=groups.collection
        )
    optimizer = build_optimizer(
        chunks if draft is None else [*chunks, draft],
        settings.optimizer_config,
        settings.megatron_config.optimizer_config_kwargs,
        groups,
        params_dtype=parameter_dtype(cfg),
        use_distributed_optimizer=buffers.use_distributed_optimizer,
        overlap_param_gather=buffers.overlap_param_gather,
        partial=partial,
    )
    if head is not None:
        last.draft = head
    schedule = build_lr_schedule(optimizer, settings.optimizer_config, total_steps)
    return TrainingState(chunks, adapters, optimizer, schedule, draft)


def enable_grad_overlap(chunks: Sequence[DistributedDataParallel]) -> None:
    """Set ``no_sync_func`` of Megatron's schedule to these chunks if gradient reduction overlaps with the backward."""
    if chunks[0].ddp_config.overlap_grad_reduce:
        # The interleaved schedule wants a function per chunk, the plain one a single function.
        functions: list[Callable[[], Any]] = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(chunks) > 1 else functions[0]


def fuse_gradients(chunks: Sequence[DistributedDataParallel]) -> int:
    """Make Transformer Engine's linear layers add weight gradients to Megatron's buffers within their GEMM.

    Otherwise each micro-batch writes every gradient in bf16, reads it, and adds it to the fp32 buffer. ``chunks`` have
    their buffers already; layers without one are frozen. Returns the number of changed layers.
    """
    changed = 0
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            # Only the GEMM of a matrix can add to the buffer; gradients of biases arrive by autograd as always.
            matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
            module.fuse_wgrad_accumulation = bool(matrices) and all(
                hasattr(parameter, "main_grad") for parameter in matrices
            )
            changed += module.fuse_wgrad_accumulation
    return changed
