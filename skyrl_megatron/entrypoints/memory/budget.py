"""The budget of a run: every phase of every GPU and node against what there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridges.errors import BridgeError
from bridges.plan import Plan
from skyrl_megatron.config.adapters import adapter_configs
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.config.rules.role_layout import active_roles, trains_draft
from skyrl_megatron.entrypoints.memory.adapters import AdapterTable
from skyrl_megatron.entrypoints.memory.host import node_phase
from skyrl_megatron.entrypoints.memory.parameters import ParameterTable
from skyrl_megatron.entrypoints.memory.phases import Phase, gpu_phases
from skyrl_megatron.entrypoints.memory.roles import RoleModel, role_models
from skyrl_megatron.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware


@dataclass(frozen=True)
class Budget:
    """What a run takes of each GPU and each node."""

    models: dict[str, RoleModel]
    gpus: tuple[Phase, ...]
    node: Phase
    hardware: Hardware

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware) -> Budget:
        """Sum it up. ``cfg`` must be valid but for memory; ``tables``: role → its parameters."""
        models = role_models(cfg, tables)
        return cls(
            models,
            tuple(gpu_phases(cfg, models, hardware.gpu_bytes)),
            node_phase(cfg, models),
            hardware,
        )

    def limit(self, phase: Phase) -> int | None:
        """Return the bytes that a phase may take; None where nobody said."""
        whole = self.hardware.host_bytes if phase is self.node else self.hardware.gpu_bytes
        return whole if phase.limit is None else phase.limit

    def excess(self, phase: Phase) -> int:
        """Return the bytes by which a phase is too large; 0 or less where it fits or nothing is known."""
        limit = self.limit(phase)
        return 0 if limit is None else phase.total - limit

    def fullest(self) -> list[Phase]:
        """Return the fullest GPU of each phase, in the order of a step, and the node."""
        found: dict[tuple[str, bool], Phase] = {}
        for phase in self.gpus:
            key = (phase.name, phase.where.startswith("rank"))
            if key not in found or phase.total > found[key].total:
                found[key] = phase
        return [*found.values(), self.node]

    def too_large(self) -> list[Phase]:
        """Return the phases that do not fit, the worst of each kind first."""
        return sorted((p for p in self.fullest() if self.excess(p) > 0), key=self.excess, reverse=True)


def parameter_tables(cfg: SkyRLTrainConfig) -> dict[str, ParameterTable]:
    """Read the parameters of each role's model, by role; without those of the hub whose ``config.json`` is not in its
    cache. Raises ConfigError for a model that is not supported."""
    tables: dict[str, ParameterTable] = {}
    read: dict[str, ParameterTable] = {}
    for role in active_roles(cfg):
        section = getattr(cfg.trainer, role)
        key, path = f"trainer.{role}.model.path", section.model.path
        hf = read_hf_config(cfg, role) if path else None
        if hf is None:
            continue
        hf = {**hf, **section.model_config_kwargs, **section.megatron_config.model_config_kwargs}
        draft = trains_draft(cfg, role)
        changes = section.model_config_kwargs, section.megatron_config.model_config_kwargs
        name = repr((path, section.model.revision, changes, draft))
        try:
            if name not in read:
                read[name] = ParameterTable(Plan.of(hf, draft=draft))
        except BridgeError as error:
            raise ConfigError([Problem(key, path, str(error))]) from None
        tables[role] = read[name]
    if "policy" in tables and cfg.trainer.policy.model.lora.rank:
        table = tables["policy"]
        table.adapters = [AdapterTable.of(own, table.plan, table.top_k) for own in adapter_configs(cfg).values()]
    return tables
