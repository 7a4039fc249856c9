"""Activation memory of a micro-batch: tensors saved for the backward pass, and temporary tensors of the running layer.

The estimate counts the tensors that autograd saves in each module, each storage once: for Transformer Engine's layers
(``Kernels.fused``), or for this package's layers, whose count is compared with a running model
(``tests/observe/test_activations.py``). All values are bytes per token of a rank, after context parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridges.rows import DELTA_NET, GatedQkv
from skyrl_megatron.config.layout import ParallelConfig, stage_layers
from skyrl_megatron.config.rules.exchange_rules import OVERLAP
from skyrl_megatron.config.schema.models import AUTO
from skyrl_megatron.runtime.model.delta_rule import CHUNK
from skyrl_megatron_observe.estimate.memory_parameters import AdapterTable, ParameterTable

Kind = tuple[bool, str]
"""An entry of ``ModelShape.kinds``: (whether the layer has experts, its kind of token mixing)."""
IMBALANCE = 1.5
"""Tokens of the busiest expert-parallel rank over the average, as measured for a model without a balancing loss."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation of a layer."""

    width: int = 2
    """Bytes per element."""
    fused: bool = True
    """True: Transformer Engine's modules. False: this package's modules."""
    on_cpu: bool = False
    """True for ``runtime/cpu/``: attention repeats key-value heads for grouped query heads, and linear layers save the
    gathered input of a sequence that is split over tp."""


class LayerActivations:
    """Activation bytes per token of a model's layers on a rank. ``longest``: tokens of the longest sequence."""

    def __init__(
        self,
        table: ParameterTable,
        parallel: ParallelConfig,
        kernels: Kernels,
        *,
        longest: int,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.adapters = adapters
        self.plan, self.parallel, self.kernels = table.plan, parallel, kernels
        self.top_k, self.longest = table.top_k, longest
        self.dims = table.plan.shape.dims
        self.sequence = 1 / parallel.tp  # share of the tokens outside tensor-parallel regions
        self._qk_norm = table.of_layers.get("self_attention.q_layernorm.weight")
        self._normed = 8 if adapters is None else 4  # fp32 input of a norm, and its output if the weight is trained
        self._gates_shared = "mlp.shared_experts.gate_weight" in table.of_layers
        self._gates_heads = any(isinstance(row, GatedQkv) for row in table.plan.family.attention)
        unfused = kernels.width == 4  # in half precision ``runtime/model/joined_attention.py`` makes no scores
        self._has_sinks = unfused and "self_attention.core_attention.softmax_offset" in table.of_layers

    @property
    def hidden(self) -> float:
        """The hidden states between two layers."""
        return self.dims["H"] * self.kernels.width * self.sequence

    @property
    def head(self) -> float:
        """Activations saved by the last norm and the output layer."""
        return self._norm(self.dims["H"])

    def kept(self, kind: Kind, modules: frozenset[str] = frozenset()) -> float:
        """Return the activations that a layer saves for its backward pass. ``modules``: those that are recomputed."""
        moe, mixer = kind
        mixing = self._delta_net(modules) if mixer == DELTA_NET else self._attention_block(modules)
        return mixing + self._mlp_block(moe, modules) + self._adapters(kind)

    def backward(self, kind: Kind, modules: frozenset[str] = frozenset()) -> float:
        """Return the temporary memory of a layer's backward pass, in addition to :meth:`kept`."""
        moe, mixer = kind
        again = self.kept(kind) - self.kept(kind, modules)
        mixing = self._delta_net_at_work if mixer == DELTA_NET else self.attention_at_work
        at_work = max(self._mlp_at_work(moe), mixing - self._mlp_block(moe, frozenset()))
        return again + at_work + self._adapters_at_work(kind)

    def forward(self, kind: Kind) -> float:
        """Return the memory of a layer's forward pass without gradients."""
        moe, mixer = kind
        rotated = self.dims["P" if self.plan.shape.mla else "D"]
        angles = 0 if self.kernels.fused else 2 * rotated * 4  # fp32 sines and cosines (``model/rotary.py``)
        mixing = self._delta_net_at_work if mixer == DELTA_NET else self.attention_at_work
        if self._has_sinks and self.kernels.width == 4:  # masked scores with the sinks, and their fp32 softmax
            mixing += self._scores * 4
        at_work = max(self._mlp_at_work(moe), mixing) + self._adapters_at_work(kind)
        return 3 * self.hidden + at_work + angles

    @property
    def attention_at_work(self) -> float:
        """Temporary heads of attention or their gradients; with attention sinks, also the scores of all keys."""
        dims, fused = self.dims, self.kernels.fused
        query, key = (dims["U"], dims["O"]) if self.plan.shape.mla else (dims["Q"], dims["K"])
        heads = ((4 if fused else 7) * query + 4 * key) / self.parallel.tp * self.kernels.width
        return heads + (self._scores * 8 if self._has_sinks else 0.0)  # two gradients in fp32; forward: see below

    @property
    def _scores(self) -> float:
        """Attention scores of a token: each head with each key of the longest sequence."""
        return self.dims["A"] / self.parallel.tp * self.longest

    @property
    def _delta_net_at_work(self) -> float:
        """Temporary matrices of a chunk, three at a time, and their input vectors."""
        dims, wide = self.dims, self.dims["m"] / self.parallel.tp * 4
        return wide * (3 * CHUNK + 4 * (dims["k"] + dims["v"]))

    def _mlp_at_work(self, moe: bool) -> float:
        """Gradients of the block's inputs and outputs; with experts, before and after the token dispatch."""
        width, dims = self.kernels.width, self.dims
        if not moe:
            return (2 * dims["H"] + 3 * dims["F"] / self.parallel.tp) * width
        return self._dispatched() * (2 * dims["H"] + 3 * dims["M"] / self.parallel.etp) * width

    def _adapters(self, kind: Kind) -> float:
        """Count A·x of each adapted linear layer, the dropout mask, and the output of Transformer Engine's fused norm.

        The layer's input is counted with the layer. The weight is frozen, so the adapter saves the input.
        """
        if self.adapters is None:
            return 0.0
        total = 0.0
        for adapter in self.adapters.in_layer(kind):
            entry, columns = adapter.entry, adapter.entry.shape[1]
            by_rows, by_columns = entry.split.dim == 0, entry.split.dim == 1
            if entry.is_expert:
                tokens = x = self._dispatched()
                columns //= self.parallel.etp if by_columns else 1
            else:
                tokens = 1.0 if by_rows else self.sequence
                x = self.sequence if by_rows else 1.0
                columns //= self.parallel.tp if by_columns else 1
            total += tokens * adapter.pairs * adapter.rank * self.kernels.width
            has_norm = self.kernels.fused and by_rows and not entry.is_expert
            mask = self.kernels.width if self.kernels.on_cpu else 1
            copies = (mask if self.adapters.dropout else 0) + has_norm * self.kernels.width
            total += x * columns * copies
        return total

    def _adapters_at_work(self, kind: Kind) -> float:
        """Count the widest adapter output, and the same output times the scale."""
        if self.adapters is None:
            return 0.0
        rows = []
        for entry in (adapter.entry for adapter in self.adapters.in_layer(kind)):
            over = self.parallel.etp if entry.is_expert else self.parallel.tp
            local = entry.shape[0] / (over if entry.split.dim == 0 else 1)
            rows.append(local * (self._dispatched() if entry.is_expert else 1.0))
        return 2 * max(rows, default=0.0) * self.kernels.width

    # ------------------------------------------------------------------ parts of a layer
    def _attention_block(self, modules: frozenset[str]) -> float:
        return self._norm(self.dims["H"], again="layernorm" in modules) + self._attention(modules)

    def _mlp_block(self, moe: bool, modules: frozenset[str]) -> float:
        norm = self._norm(self.dims["H"], again="layernorm" in modules, feeds_matrix=not moe)
        if not moe:
            if "mlp" in modules:
                return self.hidden if self.kernels.fused else norm
            return norm + self._gated(self.dims["F"], modules)
        if "moe" in modules:
            return norm
        shared = self.dims.get("S", 0)
        if shared and "shared_experts" not in modules:
            norm += self._gated(shared, modules)
        return norm + (self.hidden if self._gates_shared else 0.0) + self._router() + self._experts(modules)

    def _norm(self, size: int, *, again: bool = False, split: bool = True, feeds_matrix: bool = True) -> float:
        """Count the input of a norm, and its output, which the next linear layer saves. ``split``: tp splits the
        tokens."""
        share = self.sequence if split else 1.0
        kept = self.kernels.width if self.kernels.fused else self._normed
        output = 1.0 if feeds_matrix and self.kernels.on_cpu else share
        return size * (share * kept + (0 if again else output * self.kernels.width))

    def _attention(self, modules: frozenset[str]) -> float:
        """Count rotated queries and keys, values, the output, softmax statistics, and activations of q and k norms."""
        dims, width, tp = self.dims, self.kernels.width, self.parallel.tp
        if self.plan.shape.mla:
            return self._latent_attention(modules)
        query = dims["Q"] / tp
        key = max(dims["K"] / tp, dims["K"] / dims["G"])
        again = "core_attn" in modules  # recomputed from queries, keys and values, which are saved then
        repeated = query if self.kernels.on_cpu and not again else key
        results = 2
        if not self.kernels.fused and self.parallel.cp > 1:  # gathered for both chunks of a sequence, and reordered
            repeated *= (1 + 2 * self.parallel.cp) / 2
            results = 3
        total = (results * query + 2 * repeated) * width + (0.0 if again else dims["A"] / tp * 4)
        if self.kernels.fused:
            return total + ((query + 2 * key) * width if self._qk_norm else 0.0)
        if self._qk_norm:
            total += (query + key) * self._normed
            if width == 4 and self._qk_norm.shape[0] < dims["Q"]:
                total += (query * (1 + self._gates_heads) + key) * 4  # keys are a view of the whole projection
        if self._gates_heads:  # the gate in fp32, and its input
            total += query * (4 + width)
        if self._has_sinks and not again:
            total += self._scores * (6 if width == 2 else 4)  # unfused attention saves all scores
        return total + 2 * dims["D"] * (8 / width)  # sines and cosines

    def _delta_net(self, modules: frozenset[str]) -> float:
        """Count a gated delta net and its input norm: the input of each convolution tap, the token-by-token matrices
        of a chunk, their input and output keys and values, and the output of the gated norm."""
        d, width, exact = self.dims, self.kernels.width, self.kernels.width == 4
        key, value, heads, shared = d["k"], d["v"], d["m"], d["n"]
        rule = CHUNK * (4 * heads + 2 * shared) + heads * (4 * key + 3 * value + key * value / CHUNK + 7)
        rule += shared * (6 * key + 2)
        inputs = (2 * d["c"] + d["o"] + 2 * heads) if exact else d["c"] + heads
        fp32 = rule + d["t"] * d["c"] + 4 * d["o"] + (d["c"] if exact else 2 * shared * key)
        kept = fp32 * 4 + (inputs + (1 if exact else 2) * d["o"]) * width
        return self._norm(d["H"], again="layernorm" in modules) + kept / self.parallel.tp

    def _latent_attention(self, modules: frozenset[str]) -> float:
        """Count latent vectors, and queries, keys and values with all heads."""
        dims, width, tp = self.dims, self.kernels.width, self.parallel.tp
        query, value = dims["U"] / tp, dims["O"] / tp
        latent = sum(self._norm(dims[rank], split=False) for rank in "CR")
        if self.kernels.on_cpu and tp > 1:
            latent += dims["H"] * width  # both down projections save the gathered input
        if self.kernels.fused:
            kept = value if "mla_up_proj" in modules else 2 * query + dims["W"] / tp + value
        elif "core_attn" in modules:
            kept = 2 * query + 2 * value
        else:
            kept = 4 * query + value  # values and their result are padded to the width of keys
        return latent + dims["A"] / tp * 4 + (kept + 4 * dims["P"]) * width

    def _gated(self, size: int, modules: frozenset[str]) -> float:
        """Count gate and up outputs of a gated feed-forward block of ``size``, and the input of its second matrix."""
        kept = 3 if self.kernels.fused else 5
        return size / self.parallel.tp * self.kernels.width * (2 if "mlp_act" in modules else kept)

    def _router(self) -> float:
        return self.sequence * (self.dims["E"] * 4 * 2 + self.top_k * 16)

    def _experts(self, modules: frozenset[str]) -> float:
        """Count the dispatched tokens, gate and up outputs of the experts, and the input of their second matrix."""
        size = self.dims["M"] / self.parallel.etp
        rows = (2 if "moe_act" in modules else 3) if self.kernels.fused else 5
        return self._dispatched() * (self.dims["H"] + rows * size) * self.kernels.width

    def _dispatched(self) -> float:
        """Return the rows dispatched to this rank's experts per token of the rank."""
        spread = IMBALANCE if self.parallel.ep > 1 else 1.0
        return self.top_k * spread * self.parallel.etp / self.parallel.tp


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations the backward pass recomputes (``transformer_config_kwargs.recompute_*``)."""

    granularity: str | None = None
    method: str | None = None
    layers: int = 1
    modules: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], *, enabled: bool = True) -> Recompute:
        """Read the fields; ``enabled``: ``trainer.gradient_checkpointing``."""
        if not enabled or not kwargs.get("recompute_granularity"):
            return cls()
        if kwargs["recompute_granularity"] == AUTO:
            return cls() if kwargs.get(OVERLAP) else cls("full", "uniform")
        modules = frozenset(kwargs.get("recompute_modules") or ("core_attn",))
        return cls(
            kwargs["recompute_granularity"],
            kwargs.get("recompute_method"),
            int(kwargs.get("recompute_num_layers") or 1),
            modules if kwargs["recompute_granularity"] == "selective" else frozenset(),
        )


def activations_in_flight(
    layers: LayerActivations, tokens: int, stage: int, recompute: Recompute, micro_batches: int
) -> float:
    """Return the activation bytes on a stage of all micro-batches in flight, when the first backward pass starts."""
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
    """Return the bytes per token that a chunk of layers saves."""
    if recompute.granularity == "full":
        if recompute.method == "block":
            again = kinds[: recompute.layers]
            return len(again) * layers.hidden + sum(layers.kept(kind) for kind in kinds[recompute.layers :])
        return -(-len(kinds) // recompute.layers) * layers.hidden
    return sum(layers.kept(kind, recompute.modules) for kind in kinds)


def working_set(layers: LayerActivations, tokens: int, recompute: Recompute) -> float:
    """Return the bytes of the layer in its backward pass, in addition to :func:`activations_in_flight`."""

    def size(kind: Kind) -> float:
        if recompute.granularity == "full":
            together = 1 if recompute.method == "block" else recompute.layers
            return layers.kept(kind) * together + layers.backward(kind)
        return layers.backward(kind, recompute.modules)

    return max(size(kind) for kind in set(layers.plan.shape.kinds)) * tokens


def forward_set(layers: LayerActivations, tokens: int) -> float:
    """Return the bytes of a forward pass without gradients: those of the running layer."""
    return max(layers.forward(kind) for kind in set(layers.plan.shape.kinds)) * tokens


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """How log-probs are computed from hidden states (``runtime/logprobs.py``)."""

    chunk: int | None
    """Tokens whose log-probs are computed at a time; None: all."""
    fused: bool
    """``fused_lm_head_logprob``: only one chunk of logits exists at a time."""


def logits(layers: LayerActivations, tokens: int, head: HeadMemory, *, training: bool) -> float:
    """Return the bytes of the last stage's head: logits, which their gradient overwrites."""
    width, hidden = layers.kernels.width, layers.dims["H"]
    columns = -(-layers.dims["V"] // layers.parallel.tp)
    if not head.fused:
        return tokens * columns * width
    sums = 4 if width < 4 else 0  # fp32 gradient of the hidden states
    gradients = columns * hidden * width + tokens * hidden * (2 * width + sums) if training else 0
    return min(head.chunk or tokens, tokens) * columns * width + gradients
