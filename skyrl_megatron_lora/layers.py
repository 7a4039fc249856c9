"""Low-rank adapters (Hu et al., arXiv:2106.09685) on Megatron's linear layers: y = W·x + scale · B·(A·x).

Next to a frozen layer, adapters are memory-bound: plain autograd writes B·h, its scaled copy and the sum, each as
large as the layer's output, and concatenates those of the experts. Here one kernel scales and adds B·h in place.

The layer's tensor parallelism determines how the two factors are sharded (``TensorSplit``):

=======  ==============================  ==================  =============================================
COLUMN   output rows split               A whole, B split    A·x of the own tokens, all-gather, then B
ROW      input columns split             A split, B whole    A·x, reduce-scatter to the own tokens, then B
WHOLE    replicated                      both whole          no communication
=======  ==============================  ==================  =============================================

A whole factor sees only the rank's own tokens (Megatron's sequence parallelism), so its gradient is summed over tp
(``sequence_parallel``). Experts see tokens that the dispatcher has already gathered over etp and reduces after them.
So their adapters do not communicate, and the gradients of their whole factors are summed over etp (``attach.py``).
"""

from __future__ import annotations

import copy
import enum
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from torch import Tensor
from torch.nn import functional as F

from skyrl_megatron.runtime.cpu_patches import grouped_gemm
from skyrl_megatron.runtime.parallel_state import ProcessGroups

_ALIGNED = 16
"""The rows of a grouped GEMM on CUDA must be multiples of this many bytes."""


def factor_product(x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
    """Compute x · weightᵀ: [..., k] × [m, k] → [..., m]; with [E, m, k] the rows of ``x`` are sorted by expert, and
    ``counts`` [E] is their number per expert. Differentiable."""
    if weight.dim() == 3 and x.is_cuda:
        return _grouped(x, weight, _required(counts))
    return _product(None, x, weight, counts, 1.0)


def add_factor_product(base: Tensor, x: Tensor, weight: Tensor, counts: Tensor | None, scale: float) -> Tensor:
    """Add scale · :func:`factor_product` to ``base`` [..., m] in place, and return it. Differentiable.

    Nothing else may read ``base`` afterwards; a backward pass that needs its old values raises autograd's error. The
    forward hook meets this, because it replaces the layer's output. The dtype is that of ``base``.
    """
    if weight.dim() == 3 and base.is_cuda:
        # grouped kernels cannot add to a matrix, so this costs one more tensor of the output's size on GPUs
        return base + _grouped(x * scale, weight, _required(counts))
    return _product(base, x, weight, counts, scale)


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Call :func:`grouped_gemm`, with a rank that grouped kernels do not support padded with zeros.

    Without padding the host would wait for ``counts`` in every layer, and launch one kernel per expert.
    """
    missing_in, missing_out = (-size % (_ALIGNED // x.element_size()) for size in (x.shape[-1], weight.shape[-2]))
    if not missing_in and not missing_out:
        # the common case: ranks are multiples of 8 in bfloat16
        return grouped_gemm(x, weight, counts)
    padded = grouped_gemm(F.pad(x, (0, missing_in)), F.pad(weight, (0, missing_in, 0, missing_out)), counts)
    return padded[..., : weight.shape[-2]]


def _product(base: Tensor | None, x: Tensor, weight: Tensor, counts: Tensor | None, scale: float) -> Tensor:
    rows = [x.numel() // x.shape[-1]] if weight.dim() == 2 else _required(counts).tolist()
    product: Tensor = _FactorProduct.apply(base, x, weight, rows, scale)  # type: ignore[no-untyped-call]
    return product


class _FactorProduct(torch.autograd.Function):
    """Compute base[rows of e] + scale · x[rows of e] @ w[e]ᵀ for each expert e, in place in ``base``; without a base,
    in a new tensor. A layer without experts counts as one expert."""

    @staticmethod
    def forward(ctx: Any, base: Tensor | None, x: Tensor, weight: Tensor, counts: list[int], scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.scale = counts, scale
        # detach() shares memory and version counter: a backward pass that needs the old values raises an error
        # instead of using the sum
        out = x.new_empty(*x.shape[:-1], weight.shape[-2]) if base is None else base.detach().contiguous()
        kept = 0.0 if base is None else 1.0  # with beta=0, memory is not read: it is uninitialised
        for rows, own, matrix in zip(_split(out, counts), _split(x, counts), _each(weight), strict=True):
            rows.addmm_(own, matrix.t(), beta=kept, alpha=scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shares = _split(grads[0], ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for rows, grad, matrix in zip(_split(grad_x, ctx.counts), shares, _each(weight), strict=True):
                rows.addmm_(grad, matrix, beta=0.0, alpha=ctx.scale)
        if ctx.needs_input_grad[2]:
            # An expert without rows gets zeros.
            products = [_weight_gradient(*pair) for pair in zip(shares, _split(x, ctx.counts), strict=True)]
            grad_weight = torch.stack(products).view(weight.shape).mul_(ctx.scale)
        # the base's gradient passes through unchanged: it was added to
        return grads[0] if ctx.needs_input_grad[0] else None, grad_x, grad_weight, None, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return gradᵀ · x, in the order that is faster for a thin matrix: for A it is ``grad``, for B it is ``x``."""
    return grad.t() @ x if grad.shape[-1] < x.shape[-1] else (x.t() @ grad).t()


def _required(counts: Tensor | None) -> Tensor:
    assert counts is not None
    return counts


def _each(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 3 else weight[None]


def _split(rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return the rows of each matrix, as views where ``rows`` are contiguous."""
    parts: tuple[Tensor, ...] = rows.reshape(-1, rows.shape[-1]).split(counts)
    return parts


class TensorSplit(enum.Enum):
    """How the linear layer of an adapter is split over tp (experts: etp)."""

    COLUMN = enum.auto()
    ROW = enum.auto()
    WHOLE = enum.auto()


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of the rows of several projections in one rank's shard of a Megatron tensor: ``groups`` groups, each
    with ``sizes`` rows of each projection. ``q0 q1 k0 v0 | q2 q3 k1 v1`` is (2, (2, 1, 1))."""

    groups: int
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of all projections together."""
        return self.groups * sum(self.sizes)

    def join(self, outputs: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Join outputs [..., groups · size] in Megatron's order, [..., rows]; None means zeros."""
        lead = like.shape[:-1]
        pieces = [
            like.new_zeros(*lead, self.groups, size) if out is None else out.reshape(*lead, self.groups, size)
            for out, size in zip(outputs, self.sizes, strict=True)
        ]
        # expert, group, part: the order in which Megatron's rows alternate
        return torch.cat(pieces, dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The settings that all adapters of a run share."""

    rank: int
    alpha: int
    dropout: float
    init: str
    rank_stabilised: bool = False
    seed: int = 0

    def scale(self, rank: int) -> float:
        """Return alpha / rank, or alpha / √rank (rsLoRA, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


@dataclass(frozen=True, slots=True)
class Factor:
    """A parameter of an adapter as a tensor of the whole model, for checkpoints, folders and syncs."""

    name: str
    """Canonical name, e.g. ``decoder.layers.3.self_attention.linear_qkv.A`` or ``….linear_qkv.q_proj.B``."""
    tensor: torch.nn.Parameter
    """This rank's shard: [rows, columns], or [local experts, rows, columns]."""
    split: int | None
    """Dimension of the matrix that is split over tp (etp); None if every rank has the whole matrix."""
    parts: int
    """Number of equal parts along dim 0, each of which is split separately."""
    experts: Sequence[int] | None
    """Numbers of the experts whose factors the tensor holds; None if it belongs to no single expert. A factor without
    experts is split over tp and replicated over dp·cp, others over etp and edp."""
    rows: int | None = None
    """Rows of the whole matrix without padding, if the rows are the vocabulary; else None."""

    def matrices(self, tensor: Tensor | None = None) -> Iterator[tuple[int | None, Tensor]]:
        """Yield (expert, matrix [rows, columns]) of the parameter, or of another ``tensor`` of its shape."""
        tensor = self.tensor.data if tensor is None else tensor
        if self.experts is None or tensor.dim() == 2:
            yield (None if self.experts is None else self.experts[0]), tensor
        else:
            yield from zip(self.experts, tensor, strict=True)


class LowRank(torch.nn.Module):
    """Two factors, ``A`` [rank, in] and ``B`` [out, rank]; several experts are a leading axis.

    ``expert``: the layer belongs to experts. ``shared``: the factor (``A`` or ``B``) that all experts of the layer
    share.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        tensor_split: TensorSplit,
        groups: ProcessGroups,
        *,
        expert: bool,
        shared: str | None = None,
    ) -> None:
        super().__init__()
        self.A, self.B = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.shared = shared
        self.tensor_split, self.groups, self.expert = tensor_split, groups, expert
        split = {
            "A": 1 if tensor_split is TensorSplit.ROW else None,
            "B": 0 if tensor_split is TensorSplit.COLUMN else None,
        }
        self.split: Mapping[str, int | None] = split
        sequence_parallel = groups.parallel.sequence_parallel
        parameter: Any  # Megatron stores its metadata as attributes of the parameter
        for name, parameter in self.named_parameters():
            dim = split[name]
            alone = expert and name != shared
            parameter.allreduce = not alone  # experts' gradients are summed over edp instead of dp
            parameter.tensor_model_parallel = dim is not None  # else it counts once in the gradient norm
            if dim is not None:
                parameter.partition_dim, parameter.partition_stride = dim + parameter.dim() - 2, 1
            # Each tp rank sees different tokens, or different experts.
            parameter.sequence_parallel = sequence_parallel and not alone and (dim is None or expert)
            parameter.sum_over_etp = alone and dim is None and groups.etp.size() > 1

    def forward(self, x: Tensor, counts: Tensor | None) -> Tensor:
        """Map [..., in] → [..., out] without scale. ``counts`` [experts]: number of rows of ``x`` per expert."""
        return factor_product(self.narrow(x, counts), self.B, counts)

    def add_to(self, base: Tensor, x: Tensor, counts: Tensor | None, scale: float) -> Tensor:
        """Add scale · :meth:`forward` of ``x`` [..., in] to ``base`` [..., out], see :func:`add_factor_product`."""
        return add_factor_product(base, self.narrow(x, counts), self.B, counts, scale)

    def narrow(self, x: Tensor, counts: Tensor | None) -> Tensor:
        """Map [..., in] → A·x [..., rank], for the tokens of the layer's output."""
        hidden = factor_product(x, self.A, counts)
        if self.groups.parallel.sequence_parallel and not self.expert:
            if self.tensor_split is TensorSplit.COLUMN:
                hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
            elif self.tensor_split is TensorSplit.ROW:
                hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self.groups.tp)
        return hidden


class EmbeddingLowRank(LowRank):
    """The factors of an embedding: ``A`` [rank, hidden], ``B`` [vocabulary / tp, rank]. PEFT's ``lora_embedding_A`` is
    Bᵀ, its ``lora_embedding_B`` is Aᵀ.

    Rows of ``B`` are looked up like rows of Megatron's embedding, with its masks and its sum over tp.
    """

    def __init__(self, a: Tensor, b: Tensor, embedding: torch.nn.Module, groups: ProcessGroups) -> None:
        super().__init__(a, b, TensorSplit.COLUMN, groups, expert=False)
        lookup: Any = copy.copy(embedding)
        # without the adapter's own hook, which the copy would otherwise call for ever
        lookup._forward_hooks = type(embedding._forward_hooks)()
        lookup._parameters = {"weight": self.B}
        self._lookup = (lookup,)  # in a tuple, so that it is not a submodule: it shares the parameter B
        # Each tp rank continues with its own tokens, as whole factors expect.
        assert lookup.reduce_scatter_embeddings == groups.parallel.sequence_parallel

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Map token ids [b, s] → [s / tp, b, hidden] with sequence parallelism, else [b, s, hidden]."""
        found: Tensor = self._lookup[0](x) @ self.A
        return found


class Adapter(torch.nn.Module):
    """The adapter of one of Megatron's linear layers: one :class:`LowRank` for all its rows, or one for each of its HF
    projections, by name."""

    def __init__(
        self,
        name: str,
        low_ranks: Mapping[str, LowRank],
        order: RowOrder,
        projections: tuple[str, ...],
        *,
        scale: float,
        dropout: float = 0.0,
        parts: int = 1,
        held: Callable[[], Sequence[int]] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.name, self.order, self.projections, self.parts = name, order, projections, parts
        self.vocab_size = vocab_size
        """Rows without padding, if the layer's rows are the vocabulary; else None."""
        self._held = held
        self.low_ranks = torch.nn.ModuleDict(dict(low_ranks))
        self.scale, self.dropout = scale, dropout
        first = next(iter(low_ranks.values()))
        self.expert, self.groups, self.tensor_split = first.expert, first.groups, first.tensor_split

    def forward(self, x: Tensor, counts: Tensor | None, base: Tensor) -> Tensor:
        """Return ``base``, the layer's output [..., out], plus the adapter's output. May overwrite ``base``.
        ``x``: inputs of the layer [..., in]."""
        if self.embeds:  # without dropout, as in PEFT
            embedded: Tensor = self.low_ranks[JOINED](x) * self.scale
            return base + embedded.to(base.dtype)
        x = self._dropped(x, self._random_state())
        if self.is_joined:
            # in place only if no value is converted: the sum is in the base's dtype
            if base.dtype == x.dtype:
                return low_rank_of(self, JOINED).add_to(base, x, counts, self.scale)
            joined: Tensor = self.low_ranks[JOINED](x, counts) * self.scale
            return base + joined.to(base.dtype)
        outputs = {name: low_rank(x, counts) for name, low_rank in self.low_ranks.items()}
        some = next(iter(outputs.values()))
        ordered = self.order.join([outputs.get(name) for name in self.projections], some)
        return base + (ordered * self.scale).to(base.dtype)

    def narrow(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (scale · A·x [..., rank], this rank's rows of B). Their product is what :meth:`forward` adds, for
        inputs that are equal on every tp rank."""
        low_rank = low_rank_of(self, JOINED)
        # the output layer's input is equal on all tp ranks, so its masks must be equal as well
        x = self._dropped(x, (get_data_parallel_rng_tracker_name(),))
        return F.linear(x, low_rank.A) * self.scale, low_rank.B

    def _dropped(self, x: Tensor, random_state: tuple[str, ...]) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        if self.dropout and self.training:
            with get_cuda_rng_tracker().fork(*random_state):
                x = F.dropout(x, self.dropout)
        return x

    def _random_state(self) -> tuple[str, ...]:
        """Return the name of the random state of dropout masks.

        Inputs differ between tp ranks, so masks must differ. Before the experts' first layer all etp ranks have the
        same tokens, so masks must be equal.
        """
        if not self.expert:
            return ()
        same = self.tensor_split is TensorSplit.COLUMN and self.groups.etp.size() > 1
        return (get_data_parallel_rng_tracker_name() if same else get_expert_parallel_rng_tracker_name(),)

    @property
    def experts(self) -> Sequence[int] | None:
        """Numbers of the experts of the layer, which change when experts move; None if it has none."""
        return None if self._held is None else self._held()

    @property
    def embeds(self) -> bool:
        """Whether the layer is an embedding, whose inputs are token ids."""
        return self.is_joined and isinstance(self.low_ranks[JOINED], EmbeddingLowRank)

    @property
    def is_joined(self) -> bool:
        """Whether one pair of factors serves all projections."""
        return JOINED in self.low_ranks

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return this rank's shard of scale · B·A, [out, in] or [experts, out, in], in fp32, rows in Megatron's
        order."""
        a, b = self.whole_factors()
        return b @ a * self.scale

    @torch.no_grad()
    def whole_factors(self) -> tuple[Tensor, Tensor]:
        """Return A [R, in] and B [out, R] in fp32, whose product is this rank's shard, rows in Megatron's order.

        Experts are a leading axis, unless they share a factor. R: the sum of the ranks of all projections; each
        projection has its own rows of A and columns of B.
        """
        factors = {name: low_rank_of(self, name) for name in self.low_ranks}
        if self.is_joined:
            return factors[JOINED].A.float(), factors[JOINED].B.float()
        lead = () if self.experts is None else (len(self.experts),)
        # one product for all projections: their factors stand side by side, with zeros between them
        a = torch.cat([low_rank.A.float().expand(*lead, -1, -1) for low_rank in factors.values()], -2)
        columns: dict[str, Tensor] = {}  # of B, transposed
        before = 0
        for name, low_rank in factors.items():
            b = low_rank.B.float().expand(*lead, -1, -1).transpose(-1, -2)
            after = a.shape[-2] - before - b.shape[-2]
            columns[name] = F.pad(b, (0, 0, before, after))
            before += b.shape[-2]
        return a, self.order.join([columns.get(name) for name in self.projections], a).transpose(-1, -2)

    def factors(self) -> list[Factor]:
        """List the parameters."""
        factors = []
        for projection in self.low_ranks:
            low_rank = low_rank_of(self, projection)
            prefix = self.name if projection == JOINED else f"{self.name}.{projection}"
            for letter, parameter in low_rank.named_parameters():
                split = low_rank.split[letter]
                parts = self.parts if letter == "B" and projection == JOINED and split == 0 else 1
                experts = None if letter == low_rank.shared else self.experts
                rows = self.vocab_size if letter == "B" else None
                factors.append(Factor(f"{prefix}.{letter}", parameter, split, parts, experts, rows))
        return factors


JOINED = "joined"
"""The key of a pair of factors for all projections of a layer."""


def low_rank_of(adapter: Adapter, projection: str) -> LowRank:
    """Return the factors of one projection."""
    found = adapter.low_ranks[projection]
    assert isinstance(found, LowRank)
    return found


def first_factor(name: str, shape: tuple[int, int], settings: AdapterSettings) -> Tensor:
    """Draw a whole A [rank, in] in fp32 on the host from the seed and its global name, so that it is equal at every
    layout.

    ``kaiming``: uniform as torch's ``Linear``; ``xavier``: normal; ``normal``: deviation 1 / rank; ``zero``: zeros.
    """
    matrix = torch.empty(shape)
    generator = torch.Generator().manual_seed(_seed(name, settings.seed))
    match settings.init:
        case "kaiming":
            torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
        case "xavier":
            torch.nn.init.xavier_normal_(matrix, generator=generator)
        case "normal":
            torch.nn.init.normal_(matrix, std=1 / shape[0], generator=generator)
        case "zero":
            matrix.zero_()
        case _:
            raise ValueError(f"unknown init {settings.init}: choose kaiming, xavier, normal or zero")
    return matrix


def second_factor(name: str, shape: tuple[int, int], settings: AdapterSettings) -> Tensor:
    """Return a whole B [out, rank]: zeros, so that the adapter has no effect at first. If A is zero, B is uniform,
    because otherwise both gradients would stay zero."""
    matrix = torch.zeros(shape)
    if settings.init == "zero":
        generator = torch.Generator().manual_seed(_seed(name, settings.seed))
        torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
    return matrix


def _seed(name: str, seed: int) -> int:
    # 7 bytes: torch's seeds are signed 64-bit numbers
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
