"""What one optimizer trains of a rank's model: all its weights, an adapter on it, or one of several adapters.

Of several adapters one is the model's at any time (:meth:`Trained.begin`): only its factors are in the chunks' tree of
modules, only they compute, and the random states are its own. Buffers, optimizer, schedule, checkpoints and exports
therefore see what they would see if it were the only one. That is also why they do not take turns within one pass of
Megatron's schedule: recomputed blocks and 1F1B's backward passes would run with another adapter than their forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from skyrl_megatron.algorithms.reduction import StepTotals
from skyrl_megatron.hub import adapter_folder
from skyrl_megatron.runtime.checkpoint import rng
from skyrl_megatron.runtime.engine_settings import attach_adapters, parameter_dtype
from skyrl_megatron.runtime.lora.folder import load_adapter
from skyrl_megatron.runtime.model.draft import draft_of
from skyrl_megatron.runtime.optimizer import build_lr_schedule, build_optimizer

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.lora.attach import Adapters
    from skyrl_megatron.runtime.model.build import ModelChunks
    from skyrl_megatron.runtime.parallel_state import ProcessGroups


@dataclass(slots=True, eq=False)
class Trained:
    """The state of a training: parameters in Megatron's gradient buffers, optimizer, schedule, counts."""

    chunks: list[Any]
    """The model's chunks, in :class:`DistributedDataParallel` over the parameters that are trained."""
    adapters: Adapters | None = None
    optimizer: Any = None
    lr_schedule: OptimizerParamScheduler | None = None
    draft: Any = None
    """The draft head of the last chunk, with buffers of its own, so that those of the chunk, and the order in which
    their gradients are summed, are what they are without it."""
    steps: int = 0
    skipped_steps: int = 0
    accumulated: StepTotals = field(default_factory=StepTotals)
    """Denominators of the gradients accumulated so far."""
    reduced: bool = False
    """Whether they have been summed over the ranks already."""
    random_states: bytes | None = None
    """Of one of several adapters while another one computes."""

    @property
    def buffered(self) -> list[Any]:
        """All that has gradient buffers."""
        return self.chunks if self.draft is None else [*self.chunks, self.draft]

    def begin(self) -> None:
        """Become what the model computes with."""
        assert self.adapters is not None
        self.adapters.hang()
        let_overlap(self.chunks)
        if self.random_states is not None:
            rng.restore(self.random_states)

    def end(self) -> None:
        """Leave the model as another one is to find it."""
        assert self.adapters is not None
        self.random_states = rng.capture()
        self.adapters.take_off()


def prepare_training(
    cfg: SkyRLTrainConfig,
    role: str,
    model: ModelChunks,
    groups: ProcessGroups,
    buffers: DistributedDataParallelConfig,
    total_steps: int | None,
    base: str | None = None,
) -> Trained:
    """Hang an adapter on the model, if the role has one, and make buffers, optimizer and schedule of what is trained.

    The adapter starts anew, or as its folder has it. ``total_steps``: optimizer steps, where a decaying learning rate
    ends. ``base``: fingerprint of the weights.
    """
    settings: Any = getattr(cfg.trainer, role)
    adapted = role == "policy" and settings.model.lora.rank > 0
    adapters = attach_adapters(cfg, model, groups) if adapted else None
    if adapters is not None and (folder := adapter_folder(cfg)) is not None:
        load_adapter(adapters, groups, folder, base)
    if settings.megatron_config.freeze_moe_router and not adapted:
        for chunk in model.chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".router." not in name)
    last, head = model.chunks[-1], draft_of(model.chunks)
    if head is not None:
        del last.draft  # out of sight until buffers and optimizer have asked for the chunk's parameters
    chunks = [
        DistributedDataParallel(
            model.config, buffers, chunk, disable_bucketing=index > 0, pg_collection=groups.collection
        )
        for index, chunk in enumerate(model.chunks)
    ]
    let_overlap(chunks)
    draft = None
    if head is not None:
        own = dataclasses.replace(buffers, overlap_grad_reduce=False, overlap_param_gather=False)
        draft = DistributedDataParallel(
            model.config, own, head, disable_bucketing=True, pg_collection=groups.collection
        )
    optimizer = build_optimizer(
        chunks if draft is None else [*chunks, draft],
        settings.optimizer_config,
        settings.megatron_config.optimizer_config_kwargs,
        groups,
        params_dtype=parameter_dtype(cfg),
        use_distributed_optimizer=buffers.use_distributed_optimizer,
        overlap_param_gather=buffers.overlap_param_gather,
    )
    if head is not None:
        last.draft = head
    schedule = build_lr_schedule(optimizer, settings.optimizer_config, total_steps)
    return Trained(chunks, adapters, optimizer, schedule, draft)


def let_overlap(chunks: Sequence[DistributedDataParallel]) -> None:
    """Tell Megatron's schedule whose gradients it reduces while it computes."""
    if chunks[0].ddp_config.overlap_grad_reduce:
        functions: list[Callable[[], Any]] = [chunk.no_sync for chunk in chunks]
        chunks[0].config.no_sync_func = functions if len(chunks) > 1 else functions[0]
