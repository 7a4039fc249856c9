"""What a micro-batch takes on a rank: tensors kept between forward and backward, a layer at work, the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.config.rules.layout import stage_layers
from skyrl_megatron.entrypoints.memory.layers import Kind, LayerActivations


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations are computed again in the backward pass (``transformer_config_kwargs.recompute_*``)."""

    granularity: str | None = None
    method: str | None = None
    layers: int = 1
    modules: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], *, enabled: bool = True) -> Recompute:
        """Read the fields; ``enabled``: ``trainer.gradient_checkpointing``."""
        if not enabled or not kwargs.get("recompute_granularity"):
            return cls()
        modules = frozenset(kwargs.get("recompute_modules") or ("core_attn",))
        return cls(
            kwargs["recompute_granularity"],
            kwargs.get("recompute_method"),
            int(kwargs.get("recompute_num_layers") or 1),
            modules if kwargs["recompute_granularity"] == "selective" else frozenset(),
        )


def kept_in_flight(
    layers: LayerActivations, tokens: int, stage: int, recompute: Recompute, micro_batches: int
) -> float:
    """Return the bytes that the micro-batches under way keep on a stage when the first of them turns back."""
    parallel, of = layers.parallel, layers.plan.shape.kinds
    chunks = [[of[layer] for layer in stage_layers(parallel, len(of), stage, c)] for c in range(parallel.vpp)]
    sizes = [_chunk(layers, kinds, recompute) * tokens for kinds in chunks]
    if stage == parallel.pp - 1:
        sizes[-1] += layers.head * tokens
    if parallel.vpp == 1:
        return sizes[0] * min(parallel.pp - stage, micro_batches)
    warm_up = (parallel.pp - stage - 1) * 2 + (parallel.vpp - 1) * parallel.pp + 1
    under_way = min(warm_up, micro_batches * parallel.vpp)
    return sum(sizes) / parallel.vpp * under_way


def _chunk(layers: LayerActivations, kinds: list[Kind], recompute: Recompute) -> float:
    """Return the bytes per token that a chunk of layers keeps."""
    if recompute.granularity == "full":
        if recompute.method == "block":
            again = kinds[: recompute.layers]
            return len(again) * layers.hidden + sum(layers.kept(kind) for kind in kinds[recompute.layers :])
        return -(-len(kinds) // recompute.layers) * layers.hidden
    return sum(layers.kept(kind, recompute.modules) for kind in kinds)


def working_set(layers: LayerActivations, tokens: int, recompute: Recompute) -> float:
    """Return the bytes of the layer at work in the backward pass, beside what :func:`kept_in_flight` counts."""

    def size(kind: Kind) -> float:
        if recompute.granularity == "full":
            together = 1 if recompute.method == "block" else recompute.layers
            return layers.kept(kind) * together + layers.backward(kind)
        return layers.backward(kind, recompute.modules)

    return max(size(kind) for kind in set(layers.plan.shape.kinds)) * tokens


def forward_set(layers: LayerActivations, tokens: int) -> float:
    """Return the bytes of a pass without gradients: the layer at work, of which nothing is kept."""
    return max(layers.forward(kind) for kind in set(layers.plan.shape.kinds)) * tokens


@dataclass(frozen=True, slots=True)
class Head:
    """How log-probs come from hidden states (``runtime/vocab_parallel.py``)."""

    chunk: int | None
    """Tokens whose logits are turned into log-probs at a time; None: all."""
    fused: bool
    """``fused_lm_head_logprob``: a chunk of logits exists at a time."""


def logits(layers: LayerActivations, tokens: int, head: Head, *, training: bool) -> float:
    """Return the bytes of the last stage's head at work: logits, which their gradient is written over."""
    width, hidden = layers.kernels.width, layers.dims["H"]
    columns = -(-layers.dims["V"] // layers.parallel.tp)
    if not head.fused:
        return tokens * columns * width
    sums = 4 if width < 4 else 0  # of the hidden states' gradient
    gradients = columns * hidden * width + tokens * hidden * (2 * width + sums) if training else 0
    return min(head.chunk or tokens, tokens) * columns * width + gradients
