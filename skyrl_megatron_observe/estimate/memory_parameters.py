"""Memory of parameters, gradients, optimizer states and adapters on each rank, from the model's plan and the layout.

No model is built. The plan (``bridges/``) contains every Megatron parameter with its global shape and split, so the
counts equal those of the built model.

The optimizer follows megatron/core 0.19: gradient buffers (distributed/param_and_grad_buffer.py), the distributed
optimizer, which shards its state over the ranks that sum a gradient (optimizer/distrib_optimizer.py), the
precision-aware optimizer, whose state is Transformer Engine's, and CPU offloading (optimizer/cpu_offloading).

Adapters follow ``skyrl_megatron_lora/attach.py``: A [rank, in] and B [out, rank] for each selected linear layer, with
the same split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridges.plan import Plan
from bridges.quantisation import Quantisation
from bridges.rules import Entry, is_matrix, local_shape, matrix_blocks, padded_rows
from skyrl_megatron.config.hf_model import experts_per_token
from skyrl_megatron.config.layout import ParallelConfig, stage_layers
from skyrl_megatron.config.schema.algorithm import OPTIMIZER_DTYPES
from skyrl_megatron_lora.targets import configured_selection, expert_rank
from skyrl_megatron_lora.tensors import Pairs, adapter_slots
from skyrl_megatron_parts.muon_settings import WINDOW

if TYPE_CHECKING:
    from skyrl_megatron.config import MegatronConfig, SkyRLTrainConfig


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Number of elements on each rank of one pipeline stage."""

    dense: int
    """Parameters whose gradients are summed over dp·cp: all but the experts."""
    expert: int
    """Parameters of this rank's experts, whose gradients are summed over edp."""
    buffers: int
    """Elements of fp32 buffers (router biases)."""
    router: int = 0
    """Router weights, part of ``dense``, which ``freeze_moe_router`` freezes."""
    pinned_rounding: float = 1.0
    """Size of a pinned copy, in which each parameter is rounded up to a power of two, over the exact size."""
    scaled: int = 0
    """Frozen parameters that stay in the 8-bit format of the checkpoint."""
    scales: int = 0
    """fp32 scales of the 8-bit parameters."""
    made: int = 0
    """Maximum number of 8-bit elements that are dequantised at a time: those of a linear layer, or of all experts of a
    layer."""
    indexer: int = 0
    """Weights of the sparse-attention indexer, part of ``dense``, which are frozen without
    ``dsa_indexer_loss_coeff``."""
    matrices: tuple[int, int] = (0, 0)
    """Linear weights, which Muon updates: parts of ``dense`` and of ``expert``."""
    largest: int = 0
    """Elements of the largest of them, whole."""

    @property
    def parameters(self) -> int:
        """All parameters of a rank."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor with the same shape in several layers, or in all experts of a layer."""

    entry: Entry
    layers: frozenset[int]
    """Empty for tensors outside the layers."""

    @property
    def is_embedding(self) -> bool:
        return self.entry.name.startswith("embedding.")

    @property
    def is_head(self) -> bool:
        return self.entry.name.startswith("output_layer.")


class ParameterTable:
    """The distinct tensors of a model, each with the layers that have it. Counting them in a layout takes
    microseconds."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.experts = plan, plan.shape.dims.get("E", 0)
        self.quantisation = Quantisation.of(plan.hf_config, "config.json")
        rows: dict[tuple[int, str], tuple[Entry, set[int]]] = {}
        for entry in plan.entries:
            key = (id(entry.bound), entry.name if entry.layer is None else "")
            layers = rows.setdefault(key, (entry, set()))[1]
            if entry.layer is not None:
                layers.add(entry.layer)
        self._rows = [_Row(entry, frozenset(layers)) for entry, layers in rows.values()]
        self.hf_config: dict[str, Any] = plan.family.config(plan.hf_config).to_dict()
        """config.json with transformers' defaults filled in."""
        self.top_k = experts_per_token(self.hf_config)
        """Number of experts per token."""
        self.of_layers = {row.entry.name.partition("layers.")[2].partition(".")[2]: row.entry for row in self._rows}
        """Name within a layer → one tensor of that name."""
        self.adapters: Sequence[AdapterTable] = ()
        """Adapters of the policy."""

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self.plan.shape.moe)

    def total(self) -> int:
        """Count the parameters of the whole model, without vocabulary padding, tied embeddings once."""
        return self._count(self.experts)

    def active(self, top_k: int) -> int:
        """Count the active parameters per token: ``top_k`` routed experts of each layer, and everything else."""
        return self._count(top_k)

    def _count(self, experts: int) -> int:
        return sum(
            math.prod(row.entry.shape) * (len(row.layers) or 1) * (experts if row.entry.is_expert else 1)
            for row in self._rows
            if not row.entry.is_buffer
        )

    def stage(
        self, parallel: ParallelConfig, stage: int, *, value_head: bool = False, te: bool = False, frozen: bool = False
    ) -> StageParameters:
        """Count the parameters on each rank of pipeline stage ``stage``, with all its chunks.

        ``value_head``: a critic, whose last stage has one row instead of the output layer. ``te``: Transformer
        Engine's layers, which replicate the down projections of MLA on every rank. ``frozen``: the base model of
        adapters.
        """
        layers = {
            layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, self.layers, stage, chunk)
        }
        first, last = stage == 0, stage == parallel.pp - 1
        if last and self.plan.draft_layer is not None:
            layers.add(self.plan.draft_layer)
        dense = expert = buffers = router = rounded = scaled = scales = made = indexer = largest = 0
        matrices = [0, 0]
        for row in self._rows:
            entry = row.entry
            if row.layers:
                times = len(row.layers & layers)
            else:
                times = int(first if row.is_embedding else last and not (value_head and row.is_head))
            if entry.is_expert:
                times, over = times * self.experts // parallel.ep, parallel.etp
                size = _local_size(entry, over)
                expert += times * size
                rounded += times * _power_of_two(size)
            elif entry.is_buffer:
                buffers += times * _local_size(entry, parallel.tp)
            else:
                over = 1 if te and entry.split.whole_under_te else parallel.tp
                size = _local_size(entry, over)
                dense += times * size
                rounded += times * _power_of_two(size)
                router += times * size if ".router." in entry.name else 0
                indexer += times * size if ".indexer." in entry.name else 0
            if times and is_matrix(entry) and ".indexer." not in entry.name:
                matrices[entry.is_expert] += times * size
                largest = max(largest, math.prod(entry.shape))
            if frozen and (tensor_scales := self._scales(entry, parallel.etp if entry.is_expert else parallel.tp)):
                scaled, scales = scaled + times * size, scales + times * tensor_scales
                at_once = self.experts // parallel.ep if entry.is_expert else 1
                made = max(made, size * at_once if times else 0)
        dims = self.plan.shape.dims
        if last and value_head:
            dense += dims["H"]
        elif last and not first and "untied" not in self.plan.shape.flags:  # the last stage's copy of the embedding
            dense += padded_rows(dims["V"], parallel.tp) // parallel.tp * dims["H"]
        rest = (scaled, scales, made, indexer, (matrices[0], matrices[1]), largest)
        return StageParameters(dense, expert, buffers, router, max(1.0, rounded / (dense + expert)), *rest)

    def newton_schulz(self, parallel: ParallelConfig, stage: int) -> tuple[float, float]:
        """Return the FLOPs of one Newton-Schulz step on all whole matrices of a stage's rank: dense, and experts'."""
        layers = {
            layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, self.layers, stage, chunk)
        }
        flops = [0.0, 0.0]
        for entry, of in ((row.entry, row.layers) for row in self._rows):
            times = len(of & layers) * (self.experts // parallel.ep if entry.is_expert else 1)
            if times and ".indexer." not in entry.name and (blocks := matrix_blocks(entry)) is not None:
                sizes = ((blocks.groups * rows, entry.shape[1]) for rows in blocks.rows)
                flops[entry.is_expert] += times * sum(_newton_schulz(*size) for size in sizes)
        return flops[0], flops[1]

    def _scales(self, entry: Entry, over: int) -> int:
        """Count the scales of a weight that ``over`` ranks split, on the rank with the most; 0 if the weight is not
        in 8 bits."""
        pieces = [(piece.name, piece.shape) for piece in entry.hf]
        if self.quantisation is None or not entry.can_be_scaled:
            return 0
        widths = {block and block[1] for block in (self.quantisation.block(*piece) for piece in pieces)}
        if len(widths) > 1 or (width := widths.pop()) is None:
            return 0
        rows, columns = local_shape(entry, over)
        starts = [rank * columns % width for rank in range(over if entry.split.dim == 1 else 1)]
        return rows * max(-(-(start + columns) // width) for start in starts)

    def experts_of_a_layer(self) -> int:
        """Count the parameters of all routed experts of one layer; 0 without experts."""
        return sum(math.prod(row.entry.shape) for row in self._rows if row.entry.is_expert) * self.experts

    def engine_rank(self, tp: int, pp: int, ep: int) -> int:
        """Count the parameters on the fullest rank of an engine with these degrees.

        vLLM splits over tp what Megatron splits over tp, and experts over ``ep`` ranks if that is above 1. It splits
        layers evenly into stages, and replicates key-value heads if there are fewer heads than ranks.
        """
        share, dims = -(-self.layers // pp), self.plan.shape.dims
        inner = outer = 0.0
        for row in self._rows:
            entry = row.entry
            if entry.is_buffer:
                continue
            size = float(math.prod(entry.shape))
            if entry.is_expert:
                size *= self.experts / (ep if ep > 1 else tp)
            elif entry.split.dim is not None and not entry.split.whole_under_te:
                size /= tp
                if entry.name.endswith("linear_qkv.weight") and tp > dims["G"]:
                    size += 2 * dims["K"] * dims["H"] * (1 / dims["G"] - 1 / tp)
            if row.layers:
                inner += size * len(row.layers) / self.layers
            else:
                outer += size
        return round(inner * share + (outer if pp == 1 else outer / 2))


def _newton_schulz(rows: int, columns: int) -> float:
    """Return the FLOPs of X ← aX + (bA + cA²)X with A = XXᵀ, on the shorter side."""
    short, long = sorted((rows, columns))
    return 4.0 * short * short * long + 2.0 * short**3


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _local_size(entry: Entry, size: int) -> int:
    return math.prod(local_shape(entry, size))


_FP32 = 4


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes on each rank of one pipeline stage for one role."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    """Master weights and moments in device memory."""
    buffers: int = 0
    """fp32 buffers of the model: router biases."""
    step: int = 0
    """Additional memory of an optimizer step: fp32 copies of gradients that are not fp32."""
    unscaled: int = 0
    """Host memory while a checkpoint is saved or loaded: fp32 copies of optimizer state in lower precision."""
    host_optimizer: int = 0
    """Host memory of ``optimizer_cpu_offload``: master weights, moments and gradients. Pinned tensors are rounded up
    to powers of two, as PyTorch's allocator does."""

    @property
    def device(self) -> int:
        """Device memory that stays allocated between steps."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def rank_bytes(
    count: StageParameters,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    *,
    bf16: bool,
    trained: bool,
    adapters: Factors | None = None,
    muon: bool = False,
) -> RankBytes:
    """Return the bytes on each rank of a stage. ``trained``: include gradients and optimizer state; with ``adapters``,
    only those of the adapters. ``muon``: linear weights have one moment instead of two."""
    width = 2 if bf16 else _FP32
    weights, buffers = (count.parameters - count.scaled) * width, count.buffers * _FP32
    weights += count.scaled + count.scales * _FP32
    if adapters is not None:
        weights += adapters.parameters * width
    if not trained:
        return RankBytes(weights, buffers=buffers)
    options = megatron.optimizer_config_kwargs
    frozen = count.router if megatron.freeze_moe_router else 0
    frozen += 0 if megatron.transformer_config_kwargs.get("dsa_indexer_loss_coeff") else count.indexer
    dense, expert = (count.dense - frozen, count.expert) if adapters is None else (adapters.dense, adapters.expert)
    gradient_width = _FP32 if megatron.ddp_config.grad_reduce_in_fp32 else width
    gradients = (dense + expert) * gradient_width
    if options.get("use_distributed_optimizer", True):
        shard = -(-dense // parallel.dp_cp) + -(-expert // parallel.edp)
    else:
        shard = dense + expert
    state = _state(options, bf16)
    copied = 0 if gradient_width == _FP32 else round(shard * state.copied) * _FP32
    saved = 0
    if muon:
        over = (parallel.dp_cp, parallel.edp) if options.get("use_distributed_optimizer", True) else (1, 1)
        updated = count if adapters is None else adapters
        saved = sum(_FP32 * (part // ranks) for part, ranks in zip(updated.matrices, over, strict=True))
        copied += max(updated.largest, min(WINDOW, parallel.tp * sum(updated.matrices))) * _WORK_BYTES
    on_host = round(shard * state.offloaded)
    return RankBytes(
        weights,
        gradients,
        optimizer=shard * state.kept + (shard - on_host) * state.device - saved,
        buffers=buffers,
        step=copied,
        unscaled=shard * state.unscaled,
        host_optimizer=round(on_host * (state.host + state.pinned * count.pinned_rounding)),
    )


_WORK_BYTES = 28
"""Of each element of the matrices that Muon orthogonalises together: shards, the whole, the stack, and the terms of a
Newton-Schulz step in fp32."""


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes of Adam's state per parameter of a shard."""

    device: int
    """Device memory of parameters that are updated on the device."""
    kept: int = 0
    """Device memory of all parameters, also of those updated on the host."""
    host: int = 0
    """Pageable host memory of parameters that are updated on the host."""
    pinned: int = 0
    """Pinned host memory of parameters that are updated on the host."""
    offloaded: float = 0.0
    """Share of the parameters that are updated on the host."""
    copied: float = 1.0
    """Share of the gradients that are copied to fp32 on the device, unless they are fp32."""
    unscaled: int = 0
    """fp32 copies that a checkpoint makes (``runtime/checkpoint/rank_state.py``)."""


def _state(options: Mapping[str, Any], bf16: bool) -> _State:
    aware = bool(options.get("use_precision_aware_optimizer"))
    if options.get("optimizer_cpu_offload"):
        offloaded = float(options.get("optimizer_offload_fraction") or 0.0)
        # Moments are fp32 regardless of the options. On the host: master weight, gradient and two moments.
        if aware:  # the master weight is created from a pinned bf16 copy, whose memory the allocator keeps
            return _State(device=12, host=12, pinned=6, offloaded=offloaded, copied=1.0 - offloaded)
        # The distributed optimizer creates fp32 master weights on the device, which stay there in addition to the
        # host's.
        return _State(device=8, kept=_FP32 if bf16 else 0, host=8, pinned=8, offloaded=offloaded)
    if not aware:
        return _State(device=12 if bf16 else 8)
    types = [options.get(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")]
    *moments, master = [_width_of(dtype) for dtype in types]
    unscaled = _FP32 * sum(map(_is_scaled, types))
    if bf16 and master == _FP32 and options.get("store_param_remainders", True):
        master = 2  # the other half of an fp32 weight is the bf16 weight itself
        unscaled += _FP32
    return _State(device=sum(moments) + master, copied=0.0, unscaled=unscaled)


def _width_of(dtype: object) -> int:
    """Return the bytes of a torch dtype or its name; those of fp32 if it is None. FP8 takes two bytes, because, except
    on Blackwell, Transformer Engine also stores the transpose (``runtime/offload.py``)."""
    return {"float16": 2, "bfloat16": 2, "uint8": 2}.get(_torch_name(dtype), _FP32)


def _is_scaled(dtype: object) -> bool:
    """Return whether state of this dtype has a scale. A checkpoint stores such state in fp32, without the scale."""
    return _torch_name(dtype) in ("float16", "uint8")


def _torch_name(dtype: object) -> str:
    """Return torch's name of a dtype, given by any of its names."""
    name = str(dtype).removeprefix("torch.")
    return OPTIMIZER_DTYPES.get(name, name)


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """A linear layer with an adapter, of the same shape in several layers and in all experts of a layer."""

    entry: Entry
    layers: frozenset[int]
    """Empty for embedding and output layer."""
    share: float
    """Share of its rows that are adapted; below 1 if only some of its projections are."""
    pairs: int
    """Number of A-B pairs: one, or one per adapted projection (``canonical_lora``)."""
    projections: int
    """Number of adapted HF projections."""
    rank: int
    shared: str | None
    """The matrix (``A`` or ``B``) that all experts of a layer share."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Number of adapter elements (A and B matrices) on a rank of a stage."""

    dense: int
    """Elements whose gradients are summed over dp·cp."""
    expert: int
    """Elements whose gradients are summed over edp."""
    gathered: int
    """Elements that a merged weight sync gathers: the unsharded A and B of every projection."""
    matrices: tuple[int, int] = (0, 0)
    """Factors of linear weights, which Muon updates: parts of ``dense`` and of ``expert``."""
    largest: int = 0
    """Elements of the largest of them, whole."""

    @property
    def parameters(self) -> int:
        """All adapter elements of a rank."""
        return self.dense + self.expert

    def __add__(self, other: Factors) -> Factors:
        dense, expert = (mine + its for mine, its in zip(self.matrices, other.matrices, strict=True))
        return Factors(
            self.dense + other.dense,
            self.expert + other.expert,
            self.gathered + other.gathered,
            (dense, expert),
            max(self.largest, other.largest),
        )


@dataclass(frozen=True)
class AdapterTable:
    """All adapters of a model."""

    maps: tuple[AdaptedMap, ...]
    plan: Plan
    dropout: bool

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, plan: Plan, top_k: int) -> AdapterTable:
        """Read ``policy.model.lora`` and ``lora_config``. Raises ConfigError for unknown modules."""
        selection = configured_selection(cfg, plan).modules
        lora, megatron = cfg.trainer.policy.model.lora, cfg.trainer.policy.megatron_config
        how = megatron.lora_config
        of_experts = expert_rank(cfg, top_k or None)
        stacked = how.experts_shared_outer_loras and megatron.moe_grouped_gemm
        adapted: dict[tuple[int, str, tuple[str, ...]], tuple[Entry, set[int]]] = {}
        for entry in plan.entries:
            taken = selection.get(entry.name.removesuffix(".weight"))
            if taken and not entry.expert:  # the first expert of a layer stands for all
                key = (id(entry.bound), entry.name if entry.layer is None else "", taken)
                adapted.setdefault(key, (entry, set()))[1].update(() if entry.layer is None else (entry.layer,))
        maps = []
        for (_, _, taken), (entry, layers) in adapted.items():
            heights = {piece.name.removesuffix(".weight").rpartition(".")[2]: piece.shape[0] for piece in entry.hf}
            maps.append(
                AdaptedMap(
                    entry,
                    frozenset(layers),
                    sum(heights[name] for name in taken) / sum(heights.values()),
                    len(taken) if how.lora_type == "canonical_lora" else 1,
                    len(taken),
                    of_experts if entry.is_expert else lora.rank,
                    ("B" if entry.split.dim == 1 else "A") if stacked and entry.is_expert else None,
                )
            )
        return cls(tuple(maps), plan, lora.dropout > 0)

    def stage(self, parallel: ParallelConfig, stage: int, *, te: bool) -> Factors:
        """Count the adapter elements on each rank of a pipeline stage."""
        count = len(self.plan.shape.moe)
        layers = {layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, count, stage, chunk)}
        experts = self.plan.shape.dims.get("E", 0)
        gathered = largest = 0
        elements, matrices = [0, 0], [0, 0]
        for adapted in self.maps:
            entry, over = adapted.entry, parallel.etp if adapted.entry.is_expert else parallel.tp
            if adapted.layers:
                times = len(adapted.layers & layers)
            else:
                times = int(stage == (0 if entry.name.startswith("embedding.") else parallel.pp - 1))
            local = experts // parallel.ep if entry.is_expert else 1
            sizes = dict(zip("AB", _sizes(adapted, over, te), strict=True))
            for letter, size in sizes.items():
                alone = entry.is_expert and letter != adapted.shared
                elements[alone] += times * size * (local if alone else 1)
                matrices[alone] += times * size * (local if alone else 1) if is_matrix(entry) else 0
            a, b = _sizes(adapted, 1, te)
            gathered += times * local * (a // adapted.pairs * adapted.projections + b)
            largest = max(largest, max(a, b) if times and is_matrix(entry) else 0)
        return Factors(elements[0], elements[1], gathered, (matrices[0], matrices[1]), largest)

    def newton_schulz(self, parallel: ParallelConfig, stage: int) -> tuple[float, float]:
        """As :meth:`ParameterTable.newton_schulz`, on the factors."""
        count = len(self.plan.shape.moe)
        layers = {layer for chunk in range(parallel.vpp) for layer in stage_layers(parallel, count, stage, chunk)}
        flops = [0.0, 0.0]
        for adapted in self.maps:
            if is_matrix(adapted.entry):
                expert = adapted.entry.is_expert
                times = len(adapted.layers & layers)
                times *= self.plan.shape.dims["E"] // parallel.ep if expert else 1
                a, b = (size // adapted.rank for size in _sizes(adapted, 1, te=False))
                flops[expert] += times * (_newton_schulz(adapted.rank, a) + _newton_schulz(b, adapted.rank))
        return flops[0], flops[1]

    def in_layer(self, kind: tuple[bool, str]) -> Iterator[AdaptedMap]:
        """Yield the adapted linear layers of a layer of this kind (``ModelShape.kinds``)."""
        kinds = self.plan.shape.kinds
        yield from (each for each in self.maps if any(kinds[layer] == kind for layer in each.layers))


def slot_bytes(cfg: SkyRLTrainConfig, plan: Plan, pairs: Pairs, width: int) -> int:
    """Return the bytes of adapter slots on each rank of an engine: in every slot, vLLM allocates the largest rank for
    each module that any adapter has (vllm/lora/layers, ``create_lora_weights``)."""
    engine = cfg.generator.inference_engine
    slots = adapter_slots(pairs, engine.engine_init_kwargs.get("max_loras"))
    assert slots is not None
    tp, ep, elements = engine.tensor_parallel_size, engine.expert_parallel_size, 0.0
    for entry in plan.entries:
        ends = {piece.name.removesuffix(".weight").rpartition(".")[2] for piece in entry.hf}
        if not ({"experts"} if entry.is_expert else ends) & set(slots.targets):
            continue
        over = 1 if entry.is_expert and ep > 1 else tp
        for rows, columns in (piece.shape for piece in entry.hf):
            split = rows / over + columns if entry.split.dim == 0 else rows + columns / over
            elements += split / (ep if entry.is_expert and ep > 1 else 1)
    layers = len(plan.shape.moe)
    of_a_stage = math.ceil(layers / engine.pipeline_parallel_size) / layers
    return round(elements * of_a_stage) * slots.rank * slots.slots * width


def received_bytes(pairs: Pairs, width: int) -> int:
    """Return the bytes of all adapters that an engine worker receives, in addition to its slots."""
    of_all = (pair for own in pairs.values() for pair in own.values())
    return sum((pair.experts or 1) * pair.rank * (pair.rows + pair.columns) for pair in of_all) * width


def _sizes(each: AdaptedMap, over: int, te: bool) -> tuple[int, int]:
    """Return the elements of A and of B on a rank, if ``over`` ranks split the linear layer."""
    entry = each.entry.whole() if te and each.entry.split.whole_under_te else each.entry
    rows, columns = local_shape(entry, over)
    return each.pairs * each.rank * columns, math.ceil(rows * each.share) * each.rank
