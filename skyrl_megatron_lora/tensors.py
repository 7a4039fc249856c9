"""The adapter tensors that are sent to engines: their names, the check that they are complete, and what engines need
to hold them.

Engines hold separate factors for each projection and expert: 37,000 tensors for a model with 128 experts and 48
layers. Far fewer tensors are sent. Each is named after all projections that it serves:

==================================================  ==================  ==========================================
``model.layers.3.self_attn.q_proj+k_proj.lora_A``   [rank, in]          one A for two projections
``model.layers.3.mlp.experts.up_proj.lora_B``       [E, out, rank]      all experts of a layer
``model.layers.3.mlp.experts.down_proj.lora_B``     [1, out, rank]      one B for all experts of a layer
==================================================  ==================  ==========================================

The scale of an adapter is already multiplied into its ``lora_B``. If there are several adapters, the adapter's name is
a prefix: ``math:model.layers.3.…``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.plan import Plan
from bridges.rows import Shape
from skyrl_megatron.config.hf_model import experts_per_token, read_hf_config
from skyrl_megatron.config.roles import adapter_configs, sends_adapters_alone
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.inference.vllm.adapter_versions import AdapterSlots
from skyrl_megatron.weight_sync.buckets import TensorMeta
from skyrl_megatron.weight_sync.tensors import named_some, whole_shapes
from skyrl_megatron_lora.targets import Selection, adapted, configured_selection, expert_rank

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

type Pairs = Mapping[str, Mapping[str, PairShape]]
"""Adapter → projection → the shapes of its factors."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class FactorName:
    """The name of a tensor of an adapter."""

    modules: tuple[str, ...]
    """The HF projections that it serves; all experts of a layer count as one (:func:`stacked`)."""
    letter: str
    """``A`` or ``B``."""
    adapter: str = ""
    """The name of the adapter; empty if adapters have no names."""

    def __str__(self) -> str:
        parent, _, first = self.modules[0].rpartition(".")
        others = (module.rpartition(".")[2] for module in self.modules[1:])
        return _of_adapter(self.adapter, f"{parent}.{'+'.join([first, *others])}.lora_{self.letter}")

    @classmethod
    def parse(cls, text: str) -> FactorName:
        """Parse the name of a tensor. Raises WeightSyncError if it is not the name of a factor."""
        adapter, _, rest = text.rpartition(":")
        path, _, letter = rest.rpartition(".lora_")
        parent, _, projections = path.rpartition(".")
        if letter not in ("A", "B") or not parent:
            raise WeightSyncError(
                f"{text} is not a tensor of an adapter (….lora_A, ….lora_B): start the engines with the trainer's "
                "trainer.policy.model.lora.sync_mode"
            )
        return cls(tuple(f"{parent}.{projection}" for projection in projections.split("+")), letter, adapter)


def _of_adapter(adapter: str, text: str) -> str:
    return f"{adapter}:{text}" if adapter else text


def stacked(module: str) -> str:
    """Remove the expert's number from the name of a projection, to name the projections of all experts of the layer.

    >>> stacked("model.layers.3.mlp.experts.7.up_proj")
    'model.layers.3.mlp.experts.up_proj'
    """
    return _EXPERT.sub(".experts.", module)


@dataclass(frozen=True, slots=True)
class PairShape:
    """The sizes of a projection's two factors."""

    rank: int
    rows: int
    """Outputs of the projection."""
    columns: int
    """Inputs of the projection."""
    experts: int | None = None
    """Number of experts of the layer; None: the projection belongs to no expert."""

    def of(self, letter: str) -> list[Shape]:
        """List the shapes that a factor may be sent in."""
        matrix = (self.rank, self.columns) if letter == "A" else (self.rows, self.rank)
        return [matrix] if self.experts is None else [(self.experts, *matrix), (1, *matrix)]


def check_adapters(metadata: Sequence[Sequence[TensorMeta]], expected: Pairs) -> None:
    """Raise WeightSyncError unless the senders send exactly the factors of ``expected``, each complete."""
    problems: list[str] = []
    tensor_of: dict[str, str] = {}  # factor of a projection → tensor that has it
    for name, shape in whole_shapes(metadata, problems).items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            pair = expected.get(factor.adapter, {}).get(module)
            key = f"{_of_adapter(factor.adapter, module)}.lora_{factor.letter}"
            if pair is None:
                problems.append(f"{name} is for {module}, which this run does not adapt")
            elif shape not in pair.of(factor.letter):
                # a factor that all experts share has 1 in place of their number: both shapes are complete
                problems.append(f"{name} is {list(shape)}, {module} needs {list(pair.of(factor.letter)[0])}")
            if key in tensor_of:
                problems.append(f"{key} is sent twice")
            tensor_of[key] = name
    wanted = [f"{_of_adapter(name, module)}.lora_" for name, pairs in expected.items() for module in pairs]
    missing = [f"{start}{letter}" for start in wanted for letter in "AB" if f"{start}{letter}" not in tensor_of]
    if missing:
        problems.append(f"{len(missing)} factors are missing: {named_some(missing)}")
    if problems:
        raise WeightSyncError("the trainer does not send the complete adapter: " + "; ".join(problems))


def adapter_pairs(plan: Plan, selection: Selection, rank: int, expert_rank: int) -> dict[str, PairShape]:
    """Return the factor sizes of every adapted projection, by its name (:func:`stacked`), in model order."""
    pairs: dict[str, PairShape] = {}
    for entry, piece in adapted(plan, selection):
        module, (rows, columns) = stacked(piece.name.removesuffix(".weight")), piece.shape
        if entry.expert is None:
            pairs[module] = PairShape(rank, rows, columns)
        else:
            # the plan lists every expert; only their number differs, so they are counted
            before = pairs[module].experts or 0 if module in pairs else 0
            pairs[module] = PairShape(expert_rank, rows, columns, before + 1)
    return pairs


def configured_pairs(
    cfg: SkyRLTrainConfig, hf: Mapping[str, Any] | None = None
) -> dict[str, dict[str, PairShape]] | None:
    """Return the adapters of a run that sends only adapters, by name (``""`` for one without a name); None if it sends
    weights. ``hf``: the model's ``config.json``, which is read if not given."""
    if not sends_adapters_alone(cfg):
        return None
    hf = read_hf_config(cfg) or {} if hf is None else hf
    plan = Plan.of(hf)
    top_k = experts_per_token(plan.family.config(hf).to_dict())

    def pairs(adapter_cfg: SkyRLTrainConfig) -> dict[str, PairShape]:
        of_experts = expert_rank(adapter_cfg, top_k or None)
        return adapter_pairs(
            plan, configured_selection(adapter_cfg, plan), adapter_cfg.trainer.policy.model.lora.rank, of_experts
        )

    return {name: pairs(adapter_cfg) for name, adapter_cfg in adapter_configs(cfg).items()}


@dataclass(frozen=True, slots=True)
class SentPairs:
    """The adapters that a run sends (``weight_sync.tensors.SentAdapters``)."""

    pairs: Pairs

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.pairs)

    def check(self, metadata: Sequence[Sequence[TensorMeta]]) -> None:
        check_adapters(metadata, self.pairs)


def sent_adapters(cfg: SkyRLTrainConfig) -> SentPairs | None:
    """Return the adapters that a run sends; None if it sends weights."""
    pairs = configured_pairs(cfg)
    return None if pairs is None else SentPairs(pairs)


def target_modules(adapters: Pairs) -> tuple[str, ...]:
    """Return the last parts of the names of the engine's modules that need adapters."""
    found = {
        "experts" if pair.experts else module.rpartition(".")[2]
        for pairs in adapters.values()
        for module, pair in pairs.items()
    }
    return tuple(sorted(found))


WORKER_EXTENSION = "skyrl_megatron_lora.vllm_worker.AdapterWorkerExtension"
SLOTS = 2
"""Slots per adapter: for the serving and the next version. A request with an older version starts over, so more slots
help only requests that take longer than a training step."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports (vllm/config/lora.py). Others use the next larger one."""


def adapter_slots(adapters: Pairs | None, slots: int | None = None) -> AdapterSlots | None:
    """Return the adapter settings of an engine; None without adapters. ``adapters``: name → projection → sizes."""
    if adapters is None:
        return None
    largest = max(pair.rank for pairs in adapters.values() for pair in pairs.values())
    rank = next(rank for rank in RANKS if rank >= largest)
    count = slots or SLOTS * len(adapters)
    return AdapterSlots(rank, target_modules(adapters), count, tuple(adapters), WORKER_EXTENSION)


def served_adapters(cfg: SkyRLTrainConfig, slots: int | None = None) -> AdapterSlots | None:
    """Return the adapter settings of an engine of a run. ``slots``: ``max_loras``, if it is set."""
    return adapter_slots(configured_pairs(cfg), slots)
