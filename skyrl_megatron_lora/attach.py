"""Attach adapters to a model, freeze the base, and reduce the gradients that Megatron does not reduce."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.nn import functional as F

from bridges.conversions import InterleaveQkv, JoinByGroup
from bridges.rules import Entry
from bridges.tensor_names import canonical
from skyrl_megatron.runtime.adapters import TrainedAdapters
from skyrl_megatron.runtime.model.build import ModelChunks, returns_hidden_states
from skyrl_megatron.runtime.model.expert_placement import ExpertPlacement
from skyrl_megatron.runtime.model.local_weights import ADAPTERS
from skyrl_megatron.runtime.model.moe import freeze_expert_bias
from skyrl_megatron.runtime.model.scaled_weights import weight_data
from skyrl_megatron.runtime.parallel_state import ProcessGroups
from skyrl_megatron_lora.layers import (
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
from skyrl_megatron_lora.targets import Selection


class Adapters(TrainedAdapters):
    """An adapter of the policy on this rank: the factors of all selected layers of its chunks. The base is frozen."""

    def __init__(
        self, model: ModelChunks, groups: ProcessGroups, selection: Selection, settings: AdapterSettings
    ) -> None:
        self.model, self.groups, self.selection, self.settings = model, groups, selection, settings
        self.by_weight: dict[int, Adapter] = {}
        """``id`` of a base parameter → the adapter of its layer."""
        self.by_chunk: list[AdapterList] = []
        """The adapters of each chunk."""
        self.output_adapter: Adapter | None = None
        """The adapter of the output layer."""
        self._enabled = True

    def attach(self) -> None:
        """Make the model compute with these adapters, and register their factors as parameters of its chunks."""
        for chunk, adapters in zip(self.model.chunks, self.by_chunk, strict=True):
            chunk.adapters = adapters
        self._enabled = True

    def detach(self) -> None:
        """Remove these adapters from the model, so that others can be attached."""
        for chunk in self.model.chunks:
            del chunk.adapters
        self._enabled = False

    @property
    def enabled(self) -> bool:
        """Whether the model computes with these adapters."""
        return self._enabled

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as the base model within the block. The base model is the reference of a policy with adapters."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def on_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (h [P, rank], this rank's rows of B [V_padded / tp, rank]) for hidden states [P, H].

        The output layer's adapter adds h·Bᵀ to the logits. None if the layer has no adapter, or adapters are off.
        """
        return self.output_adapter.narrow(hidden) if self.output_adapter is not None and self.enabled else None

    def factors(self) -> Iterator[Factor]:
        """Yield the parameters of all adapters, chunk by chunk."""
        for chunk in self.by_chunk:
            for adapter in adapter_modules(chunk):
                yield from adapter.factors()

    def merged(self, parameter: Tensor) -> Tensor:
        """Return a base weight, [out, in] or [E, out, in], with its adapter merged, in the weight's dtype; the weight
        itself if it has none."""
        adapter, weight = self.by_weight.get(id(parameter)), weight_data(parameter)
        if adapter is None:
            return weight
        return (weight.float() + adapter.delta().view_as(parameter)).to(parameter.dtype)

    def sum_over_etp(self) -> None:
        """Sum the gradients of experts' factors that are replicated over etp. Each rank has its columns' or rows'
        part.

        Collective over etp, after Megatron's reduction. distributed/finalize_model_grads.py does the same for
        parameters that sequence parallelism replicates over tp.
        """
        parameters: list[Any] = [factor.tensor for factor in self.factors()]
        grads = [parameter.main_grad for parameter in parameters if parameter.sum_over_etp]
        if grads:
            flat = torch.cat([grad.view(-1) for grad in grads])
            dist.all_reduce(flat, group=self.groups.etp)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))


class AdapterList(torch.nn.ModuleList):
    """The adapters of a chunk, as a submodule: DDP buffers, optimizer and checkpoints find the factors there."""

    def __init__(self, adapters: list[Adapter], experts: int) -> None:
        super().__init__(adapters)
        self.experts = experts

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe every factor by its canonical name; experts are a leading axis."""
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
    """Freeze ``model`` and attach an adapter to each of this rank's selected linear layers.

    ``separate``: one pair of factors for each HF projection. ``shared_outer``: all experts of a layer share the outer
    factor (A of ``linear_fc1``, B of ``linear_fc2``). ``expert_rank``: rank of the experts' adapters, default
    ``settings.rank``.
    """
    adapters = Adapters(model, groups, selection, settings)
    # The base is the reference model and must not change, and the bias changes without a gradient.
    freeze_expert_bias(model.chunks)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)

    def expert(layer: int, number: int) -> int:
        return model.experts.held(layer, groups.ep.rank())[number]

    for index, chunk in enumerate(model.chunks):
        attached: list[Adapter] = []
        first_layer = model.layers(groups.pp.rank(), index).start
        for name, module in chunk.named_modules():
            weight = _weight(module)
            if weight is None:
                continue
            # By canonical name: chunks number layers from 0, and layer kinds spell experts differently.
            full = canonical(_parameter_name(name, module), layer_offset=first_layer, expert=expert)
            entry = model.hf.plan.by_name.get(full)
            taken = selection.modules.get(full.removesuffix(".weight"))
            if entry is None or taken is None:
                continue
            rank = expert_rank or settings.rank if entry.is_expert else settings.rank
            build = _Builder(entry, module, weight, groups, settings, rank, model.experts)
            adapter = build.adapter(taken, separate=separate, shared_outer=shared_outer)
            for parameter in _weights(module):
                adapters.by_weight[id(parameter)] = adapter
            if full == "output_layer.weight":
                adapters.output_adapter = adapter
            # A hook and not a wrapper: names of parameters, and with them checkpoints, stay those of the base.
            module.register_forward_hook(_Addition(adapters, adapter, module))
            attached.append(adapter)
        # Factors were drawn on the host, so that initial values do not depend on the device.
        device = next(chunk.parameters()).device
        adapters.by_chunk.append(AdapterList(attached, model.config.num_moe_experts or 0).to(device))
        _let_gradients_in(chunk)
    adapters.attach()
    return adapters


def _let_gradients_in(chunk: Any) -> None:
    """Make the embedding's output require a gradient. Without it recomputed blocks pass no gradient to adapters."""
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


class _Addition:
    """The forward hook of a linear layer: adds the adapter's output to the layer's output."""

    def __init__(self, adapters: Adapters, adapter: Adapter, module: torch.nn.Module) -> None:
        self.adapters, self.adapter = adapters, adapter
        self.norm: Any = getattr(module, "layer_norm_weight", None)  # Transformer Engine's norm inside the layer
        self.epsilon = getattr(module, "eps", None)

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        # A head that returns hidden states has no logits to add to; Adapters.on_hidden serves it.
        if not self.adapters.enabled or returns_hidden_states(module):
            return output
        x = inputs[0]
        # The fused layer normalises inside, and a hook sees its input before that.
        if self.norm is not None:
            x = F.rms_norm(x, self.norm.shape, self.norm, self.epsilon)
        counts = torch.as_tensor(inputs[1]) if self.adapter.expert and len(inputs) > 1 else None
        first = output[0] if isinstance(output, tuple) else output
        added = self.adapter(x, counts, first)
        return (added, *output[1:]) if isinstance(output, tuple) else added


class _Builder:
    """Builds the adapter of one layer: sizes of this rank's shards, and their initial values."""

    def __init__(
        self,
        entry: Entry,
        module: torch.nn.Module,
        weight: Tensor,
        groups: ProcessGroups,
        settings: AdapterSettings,
        rank: int,
        placement: ExpertPlacement,
    ) -> None:
        self.entry, self.groups, self.settings, self.rank = entry, groups, settings, rank
        self.over = groups.etp if entry.is_expert else groups.tp
        self.stacked = weight.dim() == 3 or _is_te_grouped(module)
        self.held: Callable[[], Sequence[int]] | None = None
        if entry.expert is not None:
            every = functools.partial(placement.held, entry.layer_number, groups.ep.rank())
            number = every().index(entry.expert)
            self.held = every if self.stacked else lambda: (every()[number],)
        self.rows, self.module = weight.shape[-2], module
        self.dtype = weight.dtype
        split = entry.split.dim
        # A layer can be replicated although the table names a split: then it has the whole shape.
        unsplit = split is None or (self.over.size() > 1 and weight.shape[-2:] == torch.Size(entry.shape))
        self.tensor_split = TensorSplit.WHOLE if unsplit else TensorSplit.COLUMN if split == 0 else TensorSplit.ROW

    def adapter(self, taken: tuple[str, ...], *, separate: bool, shared_outer: bool) -> Adapter:
        order, projections = self._order()
        name = self.entry.name.removesuffix(".weight")
        if self.held is not None:
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
            held=self.held,
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
                # Rows of the padded vocabulary are zero, as an adapter of the unpadded one has none.
                matrix = F.pad(matrix, (0, 0, 0, padded - height))
                return share(matrix, 0 if split_rows else None, parts)

            if self.held is None or letter == shared:
                return one(name).to(self.dtype)
            # Drawn by the name of each expert: equal wherever the expert is.
            drawn = [one(f"{name}.{expert}").to(self.dtype) for expert in self.held()]
            return torch.stack(drawn) if self.stacked else drawn[0]

        expert = self.entry.is_expert
        if hasattr(self.module, "reduce_scatter_embeddings"):
            return EmbeddingLowRank(factor("A"), factor("B"), self.module, self.groups)
        return LowRank(factor("A"), factor("B"), self.tensor_split, self.groups, expert=expert, shared=shared)


def _weight(module: torch.nn.Module) -> Tensor | None:
    found = _weights(module)
    return found[0] if found and found[0].dim() >= 2 else None


def _weights(module: torch.nn.Module) -> list[Tensor]:
    """Return the weights of a layer: one, or one per expert with Transformer Engine's grouped experts."""
    if _is_te_grouped(module):
        parameters = dict(module.named_parameters(recurse=False))
        return [parameters[f"weight{number}"] for number in range(len(parameters)) if f"weight{number}" in parameters]
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
    """Describe a factor as blocks of its global tensor; the ``total`` experts are a leading axis."""
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
    """Yield the adapters of a chunk, or of an :class:`AdapterList`."""
    for adapter in getattr(chunk, ADAPTERS, chunk):
        assert isinstance(adapter, Adapter)
        yield adapter
