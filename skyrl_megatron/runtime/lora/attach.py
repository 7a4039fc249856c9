"""Adapters on a model: where they hang, what is trained, and the sums of gradients that Megatron does not make."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.nn import functional as F

from bridges.conversions import InterleaveQkv, JoinByGroup
from bridges.names import canonical
from bridges.rules import Entry
from skyrl_megatron.runtime.lora.layers import (
    JOINED,
    Adapter,
    AdapterSettings,
    EmbeddingLowRank,
    Factor,
    LowRank,
    RowOrder,
    TensorSplit,
    first_factor,
    second_factor,
)
from skyrl_megatron.runtime.lora.targets import Selection
from skyrl_megatron.runtime.model.build import ModelChunks, returns_hidden_states
from skyrl_megatron.runtime.model.local_weights import ADAPTERS, first_expert
from skyrl_megatron.runtime.model.scaled_weights import weight_data
from skyrl_megatron.runtime.parallel_state import ProcessGroups


class Adapters:
    """All adapters of this rank's chunks. The base is frozen; they are switched off with :meth:`disabled`."""

    def __init__(
        self, model: ModelChunks, groups: ProcessGroups, selection: Selection, settings: AdapterSettings
    ) -> None:
        self.model, self.groups, self.selection, self.settings = model, groups, selection, settings
        self.of_weight: dict[int, Adapter] = {}
        """``id`` of a base parameter → the adapter that its map has."""
        self.hung: list[AdapterList] = []
        """The adapters of each chunk."""
        self.of_head: Adapter | None = None
        """That of the output layer."""
        self._enabled = True

    def hang(self) -> None:
        """Let the model compute with these adapters, and its chunks have their factors among their parameters."""
        for chunk, hung in zip(self.model.chunks, self.hung, strict=True):
            chunk.adapters = hung
        self._enabled = True

    def take_off(self) -> None:
        """Leave the model to other adapters: nothing of it computes with these or finds them."""
        for chunk in self.model.chunks:
            del chunk.adapters
        self._enabled = False

    @property
    def enabled(self) -> bool:
        """Whether the model computes with its adapters."""
        return self._enabled

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as the base model does: the reference of a policy that is trained by adapters."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def on_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (h [P, rank], this rank's rows of B [V_padded / tp, rank]) for hidden states [P, H]: the output
        layer's adapter adds h·Bᵀ to their logits. None where it has none, or adapters are off."""
        return self.of_head.narrow(hidden) if self.of_head is not None and self.enabled else None

    def factors(self) -> Iterator[Factor]:
        """Yield the parameters of all adapters, chunk by chunk."""
        for hung in self.hung:
            for adapter in adapter_modules(hung):
                yield from adapter.factors()

    def merged(self, parameter: Tensor) -> Tensor:
        """Return a base weight with its adapter added, in the weight's dtype; the weight itself where it has none."""
        adapter, weight = self.of_weight.get(id(parameter)), weight_data(parameter)
        if adapter is None:
            return weight
        return (weight.float() + adapter.delta().view_as(parameter)).to(parameter.dtype)

    def sum_over_etp(self) -> None:
        """Sum the reduced gradients of factors that all ranks of an expert have whole, each from its columns or rows.

        Collective over etp, after Megatron's own reduction (distributed/finalize_model_grads.py does the same for
        parameters that sequence parallelism replicates over tp).
        """
        parameters: list[Any] = [factor.tensor for factor in self.factors()]
        grads = [parameter.main_grad for parameter in parameters if parameter.sum_over_etp]
        if grads:
            flat = torch.cat([grad.view(-1) for grad in grads])
            dist.all_reduce(flat, group=self.groups.etp)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))


class AdapterList(torch.nn.ModuleList):
    """The adapters of a chunk, a part of its tree: where buffers, optimizer and checkpoints look for parameters."""

    def __init__(self, adapters: list[Adapter], experts: int) -> None:
        super().__init__(adapters)
        self.experts = experts

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe every factor by its canonical name; experts are an axis in front of the matrix."""
        return {
            f"{prefix}{factor.name}{'' if factor.experts is None else factor.experts[0]}": ShardedTensorFactory(
                f"{ADAPTERS}.{factor.name}",
                factor.tensor,
                functools.partial(_shards, factor=factor, groups=adapter.groups, total=self.experts),
                _never_merged,
            )
            for adapter in adapter_modules(self)
            for factor in adapter.factors()
        }


def attach(
    model: ModelChunks,
    groups: ProcessGroups,
    selection: Selection,
    settings: AdapterSettings,
    *,
    separate: bool = False,
    shared_outer: bool = False,
    expert_rank: int | None = None,
) -> Adapters:
    """Freeze ``model`` and hang an adapter on each of this rank's selected linear maps.

    ``separate``: a pair of factors for each HF projection. ``shared_outer``: the factor at the outside of the experts
    (A before ``linear_fc1``, B behind ``linear_fc2``) is one for all experts of a layer. ``expert_rank``: rank of the
    experts' adapters, default that of all.
    """
    adapters = Adapters(model, groups, selection, settings)
    for chunk in model.chunks:
        for module in chunk.modules():
            module.frozen_expert_bias = True  # Megatron would go on balancing the router
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
    offset = first_expert(model, groups)
    for index, chunk in enumerate(model.chunks):
        hung: list[Adapter] = []
        first_layer = model.layers(groups.pp.rank(), index).start
        for name, module in chunk.named_modules():
            weight = _weight(module)
            if weight is None:
                continue
            full = canonical(_parameter_name(name, module), layer_offset=first_layer, expert_offset=offset)
            entry = model.hf.plan.by_name.get(full)
            taken = selection.modules.get(full.removesuffix(".weight"))
            if entry is None or taken is None:
                continue
            rank = expert_rank or settings.rank if entry.is_expert else settings.rank
            build = _Builder(entry, module, weight, groups, settings, rank, offset)
            adapter = build.adapter(taken, separate=separate, shared_outer=shared_outer)
            for parameter in _weights(module):
                adapters.of_weight[id(parameter)] = adapter
            if full == "output_layer.weight":
                adapters.of_head = adapter
            module.register_forward_hook(_Addition(adapters, adapter, module))
            hung.append(adapter)
        device = next(chunk.parameters()).device
        adapters.hung.append(AdapterList(hung, model.config.num_moe_experts or 0).to(device))
        _let_gradients_in(chunk)
    adapters.hang()
    return adapters


def _let_gradients_in(chunk: Any) -> None:
    """Let the embedding's output ask for a gradient: recomputed blocks pass none on to adapters otherwise."""
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


class _Addition:
    """The forward hook of a linear map: adds the adapter's output to the map's."""

    def __init__(self, adapters: Adapters, adapter: Adapter, module: torch.nn.Module) -> None:
        self.adapters, self.adapter = adapters, adapter
        self.norm: Any = getattr(module, "layer_norm_weight", None)  # Transformer Engine's norm inside the map
        self.epsilon = getattr(module, "eps", None)

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self.adapters.enabled or returns_hidden_states(module):
            return output
        x = inputs[0]
        if self.norm is not None:
            x = F.rms_norm(x, self.norm.shape, self.norm, self.epsilon)
        counts = torch.as_tensor(inputs[1]) if self.adapter.expert and len(inputs) > 1 else None
        first = output[0] if isinstance(output, tuple) else output
        added = self.adapter(x, counts, first)
        return (added, *output[1:]) if isinstance(output, tuple) else added


class _Builder:
    """The adapter of one map: sizes of this rank's shares, and their first values."""

    def __init__(
        self,
        entry: Entry,
        module: torch.nn.Module,
        weight: Tensor,
        groups: ProcessGroups,
        settings: AdapterSettings,
        rank: int,
        first: int,
    ) -> None:
        self.entry, self.groups, self.settings, self.rank = entry, groups, settings, rank
        self.over = groups.etp if entry.is_expert else groups.tp
        self.stacked = weight.dim() == 3 or _is_te_grouped(module)
        self.experts: range | None = None
        if entry.expert is not None:
            count = len(weight) if weight.dim() == 3 else len(_weights(module))
            self.experts = range(first, first + count) if self.stacked else range(entry.expert, entry.expert + 1)
        self.rows, self.module = weight.shape[-2], module
        self.dtype = weight.dtype
        split = entry.split.dim
        whole = split is None or (self.over.size() > 1 and weight.shape[-2:] == torch.Size(entry.shape))
        self.tensor_split = TensorSplit.WHOLE if whole else TensorSplit.COLUMN if split == 0 else TensorSplit.ROW

    def adapter(self, taken: tuple[str, ...], *, separate: bool, shared_outer: bool) -> Adapter:
        order, projections = self._order()
        name = self.entry.name.removesuffix(".weight")
        if self.experts is not None:
            name = name.replace(f".experts.{self.entry.expert}.", ".experts.")
        heights = dict(zip(projections, order.sizes, strict=True))
        pairs: Mapping[str, LowRank]
        if separate and len(projections) > 1:
            pairs = {p: self._pair(f"{name}.{p}", order.groups * heights[p], shared_outer) for p in taken}
        else:
            pairs = {JOINED: self._pair(name, self.rows, shared_outer, self.entry.parts)}
        return Adapter(
            name,
            pairs,
            order,
            projections,
            scale=self.settings.scale(self.rank),
            dropout=self.settings.dropout,
            parts=self.entry.parts,
            experts=self.experts,
            vocab_size=self.entry.shape[0] if self.entry.split.vocab else None,
        )

    def _order(self) -> tuple[RowOrder, tuple[str, ...]]:
        projections = tuple(piece.name.removesuffix(".weight").rpartition(".")[2] for piece in self.entry.hf)
        conversion = self.entry.bound.conversion
        if isinstance(conversion, InterleaveQkv):
            sizes = (conversion.queries * conversion.dim, conversion.dim, conversion.value or conversion.dim)
            if self.rows % sum(sizes) == 0:
                return RowOrder(self.rows // sum(sizes), sizes), projections
            return RowOrder(1, (self.rows, 0, 0)), projections  # more tp ranks than KV groups: one run of rows
        if isinstance(conversion, JoinByGroup):
            of_a_group = tuple(map(sum, conversion.sections))
            return RowOrder(self.rows // sum(of_a_group), of_a_group), projections
        return RowOrder(1, (self.rows // len(projections),) * len(projections)), projections

    def _pair(self, name: str, rows: int, shared_outer: bool, parts: int = 1) -> LowRank:
        split_rows, split_columns = self.tensor_split is TensorSplit.COLUMN, self.tensor_split is TensorSplit.ROW
        padded = rows * (self.over.size() if split_rows else 1)
        height = self.entry.shape[0] if self.entry.split.vocab else padded
        width = self.entry.shape[1]
        shared = ("B" if split_columns else "A") if shared_outer and self.stacked else None

        def share(matrix: Tensor, dim: int | None, parts: int = 1) -> Tensor:
            if dim is None:
                return matrix
            pieces = [part.chunk(self.over.size(), dim)[self.over.rank()] for part in matrix.chunk(parts, 0)]
            return torch.cat(pieces)

        def factor(letter: str) -> Tensor:
            def one(full: str) -> Tensor:
                if letter == "A":
                    matrix = first_factor(f"{full}.A", (self.rank, width), self.settings)
                    return share(matrix, 1 if split_columns else None)
                matrix = second_factor(f"{full}.B", (height, self.rank), self.settings)
                matrix = F.pad(matrix, (0, 0, 0, padded - height))
                return share(matrix, 0 if split_rows else None, parts)

            if self.experts is None or letter == shared:
                return one(name).to(self.dtype)
            drawn = [one(f"{name}.{expert}").to(self.dtype) for expert in self.experts]
            return torch.stack(drawn) if self.stacked else drawn[0]

        expert = self.entry.is_expert
        if hasattr(self.module, "reduce_scatter_embeddings"):
            return EmbeddingLowRank(factor("A"), factor("B"), self.module, self.groups)
        return LowRank(factor("A"), factor("B"), self.tensor_split, self.groups, expert=expert, shared=shared)


def _weight(module: torch.nn.Module) -> Tensor | None:
    found = _weights(module)
    return found[0] if found and found[0].dim() >= 2 else None


def _weights(module: torch.nn.Module) -> list[Tensor]:
    """Return a map's own weights: one, or with Transformer Engine's grouped experts one for each."""
    if _is_te_grouped(module):
        own = dict(module.named_parameters(recurse=False))
        return [own[f"weight{number}"] for number in range(len(own)) if f"weight{number}" in own]
    weight = module._parameters.get("weight")
    return [] if weight is None else [weight]


def _is_te_grouped(module: torch.nn.Module) -> bool:
    return "weight0" in module._parameters


def _parameter_name(name: str, module: torch.nn.Module) -> str:
    weight = module._parameters.get("weight")
    stacked = _is_te_grouped(module) or (weight is not None and weight.dim() == 3)
    return f"{name}.weight0" if stacked else f"{name}.weight"


def _shards(
    key: str,
    tensor: Tensor,
    replica_id: Any,
    flattened_range: Any,
    *,
    factor: Factor,
    groups: ProcessGroups,
    total: int,
) -> list[ShardedTensor]:
    """Describe a factor as blocks of its global tensor; experts, ``total`` of them, are an axis in front."""
    over, replicas = (groups.tp, groups.dp_cp) if factor.experts is None else (groups.etp, groups.edp)
    split, parts = factor.split, factor.parts
    replica = (0, over.rank() if split is None else 0, replicas.rank())
    shards = []
    for expert, matrix in factor.matrices(tensor.detach()):
        lead = [] if expert is None else [(0, expert, total)]
        for part, piece in enumerate(matrix.chunk(parts, 0)):
            at = []
            if split is not None:
                at = [(len(lead) + split, part * over.size() + over.rank(), parts * over.size())]
            shards.append(
                ShardedTensor.from_rank_offsets(
                    key,
                    piece,
                    *lead,
                    *at,
                    replica_id=replica,
                    prepend_axis_num=len(lead),
                    allow_shape_mismatch=factor.rows is not None,  # the vocabulary's padding depends on tp
                )
            )
    return shards


def _never_merged(parts: Any) -> Any:
    raise NotImplementedError("checkpoints read blocks in place")


def adapter_modules(chunk: Any) -> Iterator[Adapter]:
    """Yield the adapters of a chunk (or of its list of them)."""
    for adapter in getattr(chunk, ADAPTERS, chunk):
        assert isinstance(adapter, Adapter)
        yield adapter
