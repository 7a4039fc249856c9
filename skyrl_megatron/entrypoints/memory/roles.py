"""A role's model on its ranks: sizes of what a run's configuration makes of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.scaled import BAND
from skyrl_megatron.config.rules.layout import ParallelConfig
from skyrl_megatron.config.rules.role_layout import active_roles, is_frozen, role_layout
from skyrl_megatron.config.rules.training import longest_sequence
from skyrl_megatron.entrypoints.memory.activations import (
    Head,
    Recompute,
    forward_set,
    kept_in_flight,
    logits,
    working_set,
)
from skyrl_megatron.entrypoints.memory.adapters import AdapterTable, Factors
from skyrl_megatron.entrypoints.memory.layers import Kernels, LayerActivations
from skyrl_megatron.entrypoints.memory.optimizer import RankBytes, rank_bytes
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable, StageParameters

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

LOCAL_LAYERS = frozenset(
    {
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "mimo_v2_flash",
        "minimax_m2",
        "olmoe",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
)
"""Families that Transformer Engine's layers cannot express: they use ours on GPUs too."""


@dataclass(frozen=True, eq=False)
class RoleModel:
    """One role's model in its layout."""

    cfg: SkyRLTrainConfig
    role: str
    table: ParameterTable
    parallel: ParallelConfig
    kernels: Kernels

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, role: str, table: ParameterTable, *, on_cpu: bool = False) -> RoleModel:
        """Lay out a role's model as ``cfg`` says, with the kernels of a GPU or of a CPU."""
        asked = getattr(cfg.trainer, role).megatron_config.transformer_config_kwargs.get("transformer_impl")
        fused = not on_cpu and table.plan.family.model_type not in LOCAL_LAYERS and asked != "local"
        kernels = Kernels(2 if cfg.trainer.bf16 and not on_cpu else 4, fused, on_cpu=on_cpu)
        return cls(cfg, role, table, role_layout(cfg, role), kernels)

    @property
    def trained(self) -> bool:
        """Whether it has gradients and an optimizer."""
        return not is_frozen(self.role)

    @property
    def settings(self) -> Any:
        """Its section of the configuration."""
        return getattr(self.cfg.trainer, self.role)

    @functools.cached_property
    def layers(self) -> LayerActivations:
        """Bytes per token of its layers."""
        longest = longest_sequence(self.cfg)
        return LayerActivations(self.table, self.parallel, self.kernels, longest=longest, adapters=self.adapters)

    @functools.cached_property
    def recompute(self) -> Recompute:
        """What is computed again."""
        kwargs = self.settings.megatron_config.transformer_config_kwargs
        return Recompute.of(kwargs, enabled=self.cfg.trainer.gradient_checkpointing and self.trained)

    def parameters(self, stage: int) -> StageParameters:
        """Count the parameters of a rank of a stage."""
        head, frozen = self.role == "critic", self.adapters is not None
        return self.table.stage(self.parallel, stage, value_head=head, te=self.kernels.fused, frozen=frozen)

    def state(self, stage: int) -> RankBytes:
        """Return what a rank of a stage holds from step to step."""
        return self._states[stage]

    @functools.cached_property
    def _states(self) -> list[RankBytes]:
        megatron, bf16 = self.settings.megatron_config, self.kernels.width == 2
        return [
            rank_bytes(
                self.parameters(stage),
                self.parallel,
                megatron,
                bf16=bf16,
                trained=self.trained,
                adapters=self.factors(stage),
            )
            for stage in range(self.parallel.pp)
        ]

    @property
    def adapters(self) -> AdapterTable | None:
        """The adapters that it computes with, the largest of several, which take turns; None where all of it is
        trained, or nothing."""
        tables = self.table.adapters if self.role == "policy" else ()
        return max(tables, key=lambda table: self._factors(table, 0).parameters, default=None)

    def factors(self, stage: int) -> Factors | None:
        """Count the factors of all adapters on a rank of a stage; None without adapters."""
        tables = self.table.adapters if self.role == "policy" else ()
        return sum((self._factors(table, stage) for table in tables), Factors(0, 0, 0)) if tables else None

    def _factors(self, table: AdapterTable, stage: int) -> Factors:
        return table.stage(self.parallel, stage, te=self.kernels.fused)

    def tokens(self, *, training: bool) -> int:
        """Return the tokens of a micro-batch on a rank."""
        trainer = self.cfg.trainer
        rows = trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu
        longest = self.parallel.alignment * -(-longest_sequence(self.cfg) // self.parallel.alignment)
        most = trainer.max_tokens_per_microbatch if trainer.max_tokens_per_microbatch > 0 else rows * longest
        return -(-most // self.parallel.cp)

    def micro_batches(self) -> int:
        """Return the micro-batches of an optimizer step on a replica, at least."""
        trainer = self.cfg.trainer
        mini = trainer.critic_mini_batch_size if self.role == "critic" else trainer.policy_mini_batch_size
        rows = mini * self.cfg.generator.n_samples_per_prompt // max(self.parallel.dp, 1)
        most = trainer.max_tokens_per_microbatch
        if most > 0:
            return max(1, -(-rows * longest_sequence(self.cfg) // most))
        return max(1, rows // trainer.micro_train_batch_size_per_gpu)

    def training(self, stage: int) -> int:
        """Return the bytes of a training pass beside the state: kept activations and the larger of a layer at work
        and the head."""
        tokens = self.tokens(training=True)
        kept = kept_in_flight(self.layers, tokens, stage, self.recompute, self.micro_batches())
        layer = working_set(self.layers, tokens, self.recompute) + self._made(stage)
        return int(kept + max(layer, self._head(stage, tokens, True)))

    def forward(self, stage: int) -> int:
        """Return the bytes of a pass without gradients beside the weights."""
        tokens = self.tokens(training=False)
        return int(max(forward_set(self.layers, tokens) + self._made(stage), self._head(stage, tokens, False)))

    def _made(self, stage: int) -> int:
        """Return the bytes of a weight that is made of 8 bits, and of what it is made by."""
        made = self.parameters(stage).made
        return made * self.kernels.width + 2 * 4 * min(made, BAND)

    def _head(self, stage: int, tokens: int, training: bool) -> float:
        if stage != self.parallel.pp - 1 or self.role == "critic":
            return 0.0
        head = Head(self.cfg.trainer.logprobs_chunk_size, self.cfg.trainer.fused_lm_head_logprob)
        return logits(self.layers, tokens, head, training=training)


def role_models(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable]) -> dict[str, RoleModel]:
    """Lay out every role's model. ``tables``: role → its parameters."""
    return {role: RoleModel.of(cfg, role, tables[role]) for role in active_roles(cfg)}
