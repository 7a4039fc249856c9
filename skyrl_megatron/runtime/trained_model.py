"""One rank's model with its adapters, gradients, optimizer and memory: what the steps of ``engine.py`` work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor

from bridges.files import weights_fingerprint
from skyrl_megatron import device
from skyrl_megatron.algorithms import exact_ops
from skyrl_megatron.config.resolve import longest_pack
from skyrl_megatron.config.roles import (
    adapter_configs,
    adapter_names,
    has_value_head,
    is_frozen,
    parallel_config,
)
from skyrl_megatron.config.rules.megatron_rules import UNMEASURED, replaces_attention, unshared_prefixes
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.runtime import cpu_patches as megatron_patches
from skyrl_megatron.runtime import loss_scale, parallel_state
from skyrl_megatron.runtime.engine_settings import (
    ddp_config,
    hf_model,
    parameter_dtype,
    transformer_kwargs,
)
from skyrl_megatron.runtime.flops import model_flops
from skyrl_megatron.runtime.hf_weights import load_hf
from skyrl_megatron.runtime.model.attention_kernels import require_deterministic
from skyrl_megatron.runtime.model.build import build_model, return_hidden_states
from skyrl_megatron.runtime.model.moe import count_copies, number_sequences, routers_of
from skyrl_megatron.runtime.model.pass_inputs import replay_routes
from skyrl_megatron.runtime.offload import Offload
from skyrl_megatron.runtime.optimizer import TrainingState, build_lr_schedule, prepare_training
from skyrl_megatron.runtime.parallel_state import from_rank_0
from skyrl_megatron.runtime.parts import PartSetup, RankPart, acting_parts, call_parts
from skyrl_megatron.types import PARTS, Part

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.adapters import TrainedAdapters

RoleName = Literal["policy", "ref", "critic", "teacher"]


def use_exact_operations(exact: bool) -> None:
    """Let this process's trainer compute a token's log-prob independently of its batch (``trainer.exact_rollouts``).

    On CPU by ``algorithms/exact_ops.py``. On GPUs by Megatron-Core's kernels for products, means and log-softmax,
    which replace torch's and Transformer Engine's until the process ends.
    """
    on_gpu = device.has_cuda()
    exact_ops.use(exact and not on_gpu)
    if exact and on_gpu:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode

        enable_batch_invariant_mode()


class TrainedModel:
    """One rank's part of the model of ``role``, with its process groups, adapters and optimizer.

    ``torch.distributed`` must be initialised. The constructor creates the process groups of the role's layout, builds
    the model, loads its HF folder and, for policy and critic, builds the optimizer. ``total_steps``: optimizer steps
    of the run, where a decaying learning rate ends. Raises ConfigError for an impossible layout, ModelLoadError for a
    bad folder.
    """

    def __init__(self, cfg: SkyRLTrainConfig, role: RoleName = "policy", *, total_steps: int | None = None) -> None:
        # Before Megatron builds anything: on CPU it calls functions of torch.cuda that the patches replace.
        megatron_patches.install()
        if cfg.trainer.deterministic:
            device.use_deterministic_kernels()
        use_exact_operations(cfg.trainer.exact_rollouts)
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
            frozen=self.is_adapted,
            head="value" if has_value_head(cfg, role) else "lm",
            seed=cfg.trainer.seed,
            own_attention=replaces_attention(cfg, role),
        )
        if not (self.model.config.own_attention or is_frozen(role)):
            require_deterministic(self.model.config, *longest_pack(cfg), f"trainer.{role}.megatron_config.")
        assert self.model.hf.path is not None
        prefix = cfg.trainer.algorithm.value_head_prefix
        load_hf(self.model, self.model.hf.path, self.groups, frozen=self.is_adapted, value_head=prefix)
        fused = cfg.trainer.fused_lm_head_logprob and self.groups.is_last_stage and self.model.head == "lm"
        self._head_weight = return_hidden_states(self.model.chunks[-1], self.groups) if fused else None
        self._replayed = self._replay_routes() if self.megatron.moe_enable_routing_replay else ()
        self._by_sequence = "seq_aux_loss" in self.model.config.moe_router_load_balancing_type
        for chunk in self.model.chunks if self._by_sequence else ():
            number_sequences(chunk)
        self.flops = model_flops(self.model.config, self.model.vocab_size, self.model.head)
        # Before gradient buffers and optimizers, whose memory a part may watch.
        self.parts: list[RankPart] = acting_parts(PartSetup(cfg, role, self.model, self.groups, self.flops))
        self.unshared = ""
        """With ``share_prefixes=auto``, why they are not shared."""
        self.shares_prefixes = self._share_prefixes()
        """Whether tokens at the begin of several rows are computed once."""
        self._computed_tokens = 0
        self.base = self._fingerprint() if self.is_adapted else None
        """Fingerprint of the weights that the adapters are added to."""
        self.adapter_names = adapter_names(cfg) if role == "policy" else ("",)
        """Names of the adapters in the order in which they are trained: ``("",)`` unless they have names."""
        self._trained = self._frozen() if is_frozen(role) else self._prepare(total_steps)
        self._name = self.adapter_names[0]
        self._now = self._trained[self._name]
        chunks = [chunk for trained in self._trained.values() for chunk in trained.buffered]
        self._memory = Offload(chunks, [trained.optimizer for trained in self._trained.values()])
        self._expert_load: dict[int, Tensor] = {}
        call_parts(self.parts, "prepared", self._trained)

    def _replay_routes(self) -> tuple[int, ...]:
        """Make the routers replay the experts of the batch; return the layer numbers of this rank's routers."""
        for chunk in self.model.chunks:
            replay_routes(chunk, routers_of([chunk]))
        return tuple(router.layer_number - 1 for router in routers_of(self.model.chunks))

    def _share_prefixes(self) -> bool:
        """Let the routers count shared tokens; return whether prefixes are shared. Raises ConfigError if they cannot
        be and must."""
        wanted = self.cfg.trainer.share_prefixes
        if wanted == "never":
            return False
        reasons = unshared_prefixes(self.cfg, self.role)
        if wanted == "auto" and device.has_cuda():
            reasons.append(UNMEASURED)
        if reasons:
            if wanted == "always":
                raise ConfigError(
                    [Problem("trainer.share_prefixes", wanted, f"{reasons[0]}; or set it to auto or never")]
                )
            self.unshared = reasons[0]
            return False
        for chunk in self.model.chunks:
            count_copies(chunk)
        return True

    @property
    def replayed(self) -> tuple[int, ...]:
        """Layers of this rank that replay the routes of a batch."""
        return self._replayed

    @property
    def routes_read(self) -> list[int]:
        """Layers whose routes this rank reads."""
        return sorted({*self._replayed, *(layer for part in self.parts for layer in part.route_layers)})

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained and the weights are frozen."""
        return self.role == "policy" and self.settings.model.lora.rank > 0

    def _fingerprint(self) -> str:
        folder = self.model.hf.path
        assert folder is not None
        return str(from_rank_0(weights_fingerprint(folder) if dist.get_rank() == 0 else None))

    def _frozen(self) -> dict[str, TrainingState]:
        self.model.config.moe_grad_scale_func = loss_scale.AuxiliaryLossScale()  # Megatron keeps one per process
        return {"": TrainingState(list(self.model.chunks))}

    def _prepare(self, total_steps: int | None) -> dict[str, TrainingState]:
        buffers = ddp_config(self.megatron)
        self.auxiliary_scale = loss_scale.sum_gradients(self.model.config, buffers)
        self.overlaps_param_gather = buffers.use_distributed_optimizer and buffers.overlap_param_gather
        configs = adapter_configs(self.cfg) if self.role == "policy" else {"": self.cfg}
        trained: dict[str, TrainingState] = {}
        for name, cfg in configs.items():
            trained[name] = prepare_training(cfg, self.role, self.model, self.groups, buffers, total_steps, self.base)
            if len(configs) > 1:
                trained[name].end()
        # All were detached while the others were built, so that buffers hold one adapter's factors each.
        if len(configs) > 1:
            trained[self.adapter_names[0]].begin()
        return trained

    # ------------------------------------------------------------------ what is trained
    @property
    def trained(self) -> Mapping[str, TrainingState]:
        """The training state of each adapter by its name. A frozen role has one, without an optimizer."""
        return self._trained

    @property
    def chunks(self) -> list[Any]:
        """The model's chunks, wrapped in :class:`DistributedDataParallel` if they are trained."""
        return self._now.chunks

    @property
    def adapters(self) -> TrainedAdapters | None:
        """The low-rank factors of :attr:`adapter`; None if the weights are trained."""
        return self._now.adapters

    def every_adapter(self) -> dict[str, TrainedAdapters]:
        """Return all adapters by their names (``""`` for an unnamed one); {} for a role that trains weights."""
        return {name: each.adapters for name, each in self._trained.items() if each.adapters is not None}

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer; None for a frozen role."""
        return self._now.optimizer

    @property
    def lr_schedule(self) -> OptimizerParamScheduler | None:
        """The optimizer's learning-rate schedule; None for a frozen role."""
        return self._now.lr_schedule

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._now.steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because the gradient was not finite."""
        return self._now.skipped_steps

    @property
    def adapter(self) -> str:
        """The name of the active adapter."""
        return self._name

    def set_adapter(self, name: str) -> None:
        """Activate one of :attr:`adapter_names` for all that the engine computes, saves and reports.

        :meth:`compute_logprobs`, :meth:`forward_backward` and :meth:`optim_step` activate the adapters of their rows
        themselves. Every rank sets the same adapter.
        """
        if name == self._name:
            return
        self.onload("weights")
        # Random states are part of an adapter: its dropout is then that of a run with this adapter alone.
        self._now.end()
        self._name, self._now = name, self._trained[name]
        self._now.begin()

    def restart_schedule(self, lr: float | None, total_steps: int | None) -> None:
        """Restart the learning-rate schedules: as configured, or constant at ``lr``."""
        for name, cfg in adapter_configs(self.cfg).items():
            settings, trained = getattr(cfg.trainer, self.role).optimizer_config, self._trained[name]
            if lr is not None:
                settings = dataclasses.replace(settings, lr=lr, scheduler="constant")
            for group in trained.optimizer.param_groups:
                group["max_lr"] = settings.lr  # a group's own peak overrides the schedule's
            trained.lr_schedule = build_lr_schedule(trained.optimizer, settings, total_steps)

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
        """Whether this rank returns the results of its replica: tp 0, cp 0, last pipeline stage."""
        return self.groups.is_collection_rank

    # ------------------------------------------------------------------ memory
    def _waiting(self) -> list[str]:
        """Return the adapters that have gradients for a step."""
        return [name for name, trained in self._trained.items() if trained.accumulated.tokens]

    def offload(self, *parts: Part) -> None:
        """Free the device memory of ``parts`` (default: all) for other processes on the same device.

        Methods that compute load what they need. Call :meth:`onload` before reading :attr:`chunks` or
        :attr:`optimizer`. The optimizer's state stays unless ``optimizer_config.offload_after_step``. Raises
        ValueError for gradients that no :meth:`optim_step` has used yet.
        """
        leaving = set(parts or PARTS)
        if self._waiting() and "gradients" in leaving:
            # They are wanted for one step only, so no copy on the host is kept.
            raise ValueError(
                "gradients are not kept: call optim_step() or clear_gradients() before they are offloaded"
            )
        if not is_frozen(self.role) and not self.settings.optimizer_config.offload_after_step:
            # The largest part by far: it leaves only where the setting says that others need its memory.
            leaving.discard("optimizer")
        self._memory.offload(leaving)

    def start_offload(self) -> None:
        """Start to copy the optimizer to the host, if engines on this GPU need its memory before the next step.

        Call it after the last step of a batch. The copies run while the driver prepares the weight sync, whose first
        call is :meth:`offload`. No-op where a peer checkpoint reads the state first, and without a GPU.
        """
        placement, leaves = self.cfg.trainer.placement, self.settings.optimizer_config.offload_after_step
        if device.has_cuda() and placement.colocate_all and leaves and not self.cfg.trainer.healing.enabled:
            self._memory.start(("optimizer",))

    def onload(self, *parts: Part) -> None:
        """Load ``parts`` (default: all) to the device. No-op for those that are there."""
        self._memory.onload(parts or PARTS)
        # Loading is asynchronous; what computes next may run on another stream than the copies.
        self._memory.wait(*(parts or PARTS))

    def device_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer state that are on the device."""
        return sum(self._memory.device_bytes.values())

    def away(self) -> tuple[Part, ...]:
        """Return the parts that are offloaded."""
        return tuple(part for part in PARTS if self._memory.away(part))
