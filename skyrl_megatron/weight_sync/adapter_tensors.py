"""An adapter on its way to engines: what its tensors are called, and whether they are all there.

Engines know the factors of single projections, of every expert its own: 37,000 tensors of a model with 128 experts and
48 layers. They travel as far fewer, each of them named after all that it serves:

==================================================  ==================  ==========================================
``model.layers.3.self_attn.q_proj+k_proj.lora_A``   [rank, in]          one A for two projections
``model.layers.3.mlp.experts.up_proj.lora_B``       [E, out, rank]      all experts of a layer
``model.layers.3.mlp.experts.down_proj.lora_B``     [1, out, rank]      one B for all experts of a layer
==================================================  ==================  ==========================================

What a product is multiplied by is in its ``lora_B`` already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridges.plan import Plan
from skyrl_megatron.config.hf_model import read_hf_config
from skyrl_megatron.errors import WeightSyncError
from skyrl_megatron.runtime.lora.targets import Selection, adapted, configured_selection, expert_rank
from skyrl_megatron.weight_sync.bucket import TensorMeta
from skyrl_megatron.weight_sync.metadata import Shape, named_some, wholes

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class FactorName:
    """The name of a tensor of an adapter."""

    modules: tuple[str, ...]
    """The HF projections that it serves, those of all experts of a layer as one (:func:`stacked`)."""
    letter: str
    """``A`` or ``B``."""

    def __str__(self) -> str:
        parent, _, first = self.modules[0].rpartition(".")
        others = (module.rpartition(".")[2] for module in self.modules[1:])
        return f"{parent}.{'+'.join([first, *others])}.lora_{self.letter}"

    @classmethod
    def parse(cls, text: str) -> FactorName:
        """Return the parts of a name. Raises WeightSyncError for one that is no factor's."""
        path, _, letter = text.rpartition(".lora_")
        parent, _, projections = path.rpartition(".")
        if letter not in ("A", "B") or not parent:
            raise WeightSyncError(f"{text} is no tensor of an adapter (….lora_A, ….lora_B)")
        return cls(tuple(f"{parent}.{projection}" for projection in projections.split("+")), letter)


def stacked(module: str) -> str:
    """Name the projections of all experts of a layer by that of one.

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
    """Experts of the layer that have such a pair; None: the projection belongs to no expert."""

    def of(self, letter: str) -> list[Shape]:
        """List the shapes that a factor may travel in."""
        matrix = (self.rank, self.columns) if letter == "A" else (self.rows, self.rank)
        return [matrix] if self.experts is None else [(self.experts, *matrix), (1, *matrix)]


def check_adapter(metadata: Sequence[Sequence[TensorMeta]], expected: Mapping[str, PairShape]) -> None:
    """Raise WeightSyncError unless the senders send just the factors of ``expected`` (projection → sizes), whole."""
    problems: list[str] = []
    found: dict[str, str] = {}  # factor of a projection → tensor that has it
    for name, shape in wholes(metadata, problems).items():
        factor = FactorName.parse(name)
        for module in factor.modules:
            pair = expected.get(module)
            if pair is None:
                problems.append(f"{name} is for {module}, which has no adapter in this run")
            elif shape not in pair.of(factor.letter):
                problems.append(f"{name} is {list(shape)}, {module} needs {list(pair.of(factor.letter)[0])}")
            if f"{module}.{factor.letter}" in found:
                problems.append(f"lora_{factor.letter} of {module} is sent twice")
            found[f"{module}.{factor.letter}"] = name
    wanted = [(module, letter) for module in expected for letter in "AB"]
    missing = [f"{module}.lora_{letter}" for module, letter in wanted if f"{module}.{letter}" not in found]
    if missing:
        problems.append(f"{len(missing)} factors are missing: {named_some(missing)}")
    if problems:
        raise WeightSyncError("the trainer does not send the whole adapter: " + "; ".join(problems))


def adapter_pairs(plan: Plan, selection: Selection, rank: int, expert_rank: int) -> dict[str, PairShape]:
    """Return the sizes of every adapted projection's factors, by its name (:func:`stacked`), in model order."""
    pairs: dict[str, PairShape] = {}
    for entry, piece in adapted(plan, selection):
        module, (rows, columns) = stacked(piece.name.removesuffix(".weight")), piece.shape
        if entry.expert is None:
            pairs[module] = PairShape(rank, rows, columns)
        else:
            before = pairs[module].experts or 0 if module in pairs else 0
            pairs[module] = PairShape(expert_rank, rows, columns, before + 1)
    return pairs


def configured_pairs(cfg: SkyRLTrainConfig) -> dict[str, PairShape] | None:
    """Return the adapter that travels alone in a run, None where weights travel. Reads the model's ``config.json``."""
    lora = cfg.trainer.policy.model.lora
    if not lora.rank or lora.sync_mode != "memory":
        return None
    hf = read_hf_config(cfg) or {}
    plan = Plan.of(hf)
    of_experts = expert_rank(cfg, hf.get("num_experts_per_tok"))
    return adapter_pairs(plan, configured_selection(cfg, plan), lora.rank, of_experts)


def target_modules(pairs: Mapping[str, PairShape]) -> tuple[str, ...]:
    """Return the ends of the names of the engine's modules that must take adapters."""
    return tuple(sorted({"experts" if p.experts else module.rpartition(".")[2] for module, p in pairs.items()}))
