"""Rows of a mapping table. A row describes one tensor; both directions of its conversion follow from it.

A row has the canonical Megatron name, the HF names on disk, and a shape of named dimensions. Rows are independent of
process groups, ranks and folders. A family (``families/*.py``) is a few tuples of rows.

Shapes are words separated by spaces. Each word is a key of :attr:`ModelShape.dims`, optionally with a leading factor,
or a number: ``"Q H"``, ``"2M"``, ``"1"``.

======  ==================================  ======  =================================================
``V``   vocabulary                          ``E``   experts
``H``   hidden size                         ``F``   feed-forward size of a dense layer
``A``   attention heads                     ``M``   feed-forward size of one expert
``G``   KV groups                           ``S``   feed-forward size of the shared expert(s)
``D``   size of a head                      ``R``   q_lora_rank (MLA)
``Q``   A·D                                 ``C``   kv_lora_rank (MLA)
``K``   G·D                                 ``P``   rotary part of a head (MLA)
``U``   A·(nope + P), query rows (MLA)      ``W``   A·(nope + v), key and value rows (MLA)
``O``   A·v, attention output (MLA)          ``B``   C + P, rows of the KV down projection (MLA)
``n``   key heads (gated delta net)         ``m``   value heads, n·r (gated delta net)
``k``   size of a key head                  ``v``   size of a value head
``r``   value heads of a key head           ``w``   r·v, value rows of a key head
``o``   n·w, all value rows                 ``c``   2·n·k + o, channels of the short convolution
``g``   KV groups of sliding-window layers  ``d``   size of a value head in attention
``t``   taps of the short convolution       ``x``   2k + 2w, rows of a key head for q, k, v and gate
======  ==================================  ======  =================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridges.conversions import (
    Conversion,
    DeinterleaveGateUp,
    InterleaveGatedQkv,
    InterleaveQkv,
    InterleaveRope,
    JoinByGroup,
    Squeeze,
    Transpose,
)

Shape = tuple[int, ...]
ATTENTION, WINDOW, DELTA_NET = "attention", "window", "delta_net"
"""Token mixers of a layer: fields of a family, see :attr:`ModelShape.mixers`."""


def dim(word: str, dims: Mapping[str, int]) -> int:
    """Evaluate one dimension: a number, or a letter of the legend with an optional leading factor (``2M``)."""
    if word.isdigit():
        return int(word)
    return (int(word[:-1]) if word[:-1] else 1) * dims[word[-1]]


def resolve(shape: str, dims: Mapping[str, int]) -> Shape:
    """Evaluate a shape: ``"2M H"`` → ``(2·M, H)``."""
    return tuple(dim(word, dims) for word in shape.split())


@dataclass(frozen=True, slots=True)
class Split:
    """How a Megatron tensor is split over tp (over etp where the entry belongs to an expert).

    ``dim``: the dimension that is split, None for a copy on every rank. ``parts``: number of equally long parts along
    dim 0 that are split separately (gate and up). ``units``: number of indivisible runs of rows (KV groups, heads); a
    rank gets whole units, or if ``shared`` an equal part of one unit (more ranks than KV groups). ``vocab``: dim 0 is
    first padded with zeros to the padded vocabulary. ``whole_under_te``: the Transformer Engine spec replicates this
    parameter on every rank (MLA's down projections).
    """

    dim: int | None = None
    parts: int = 1
    units: int | None = None
    shared: bool = False
    vocab: bool = False
    whole_under_te: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One HF tensor ↔ one Megatron tensor, unchanged. Base of all rows.

    ``megatron``: canonical name with ``{layer}`` and ``{expert}``. ``hf``: HF names with the same placeholders.
    ``shape``: shape of the first HF tensor (of one expert's slice if ``stacked``). ``split``: dimension that is split
    over tp, None if replicated. ``units``, ``vocab``, ``whole_under_te``: see :class:`Split`. ``stacked``: on disk one
    tensor holds all experts, with a leading expert axis. ``when``: the row exists only if this flag is set
    (``untied``, ``qkv_bias``, … see :attr:`ModelShape.flags`). ``buffer``: a buffer of the model, not a parameter.
    ``keep_dtype``: not cast by ``--dtype``.
    """

    megatron: str
    hf: str | tuple[str, ...]
    shape: str
    split: int | None = None
    units: str | None = None
    vocab: bool = False
    stacked: bool = False
    when: str | None = None
    buffer: bool = False
    keep_dtype: bool = False
    whole_under_te: bool = False

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The HF names as a tuple, placeholders kept."""
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        """Return the conversion with concrete sizes."""
        return Conversion()

    def hf_shapes(self, dims: Mapping[str, int]) -> tuple[Shape, ...]:
        """Return the shapes of the HF tensors in the order of :attr:`hf_names`; of one slice if ``stacked``."""
        return (resolve(self.shape, dims),) * len(self.hf_names)

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        """Return the global shape of the Megatron tensor, without padding of the vocabulary."""
        return resolve(self.shape, dims)

    def sharding(self, dims: Mapping[str, int]) -> Split:
        """Return the split of the Megatron tensor over tp or etp."""
        units = dim(self.units, dims) if self.units else None
        parts = self.conversion(dims).parts
        return Split(
            dim=self.split,
            parts=parts if self.split == 0 else 1,
            units=units,
            shared=isinstance(self, Qkv),
            vocab=self.vocab,
            whole_under_te=self.whole_under_te,
        )


@dataclass(frozen=True, slots=True)
class Copy(Row):
    """One HF tensor that is the Megatron tensor."""


@dataclass(frozen=True, slots=True)
class Qkv(Row):
    """HF tensors q, k, v → rows interleaved by KV group.

    ``shape``: the dimensions after the rows, ``"H"`` or ``""``. ``units``: KV groups. ``value``: size of a value head.
    """

    split: int | None = 0
    units: str | None = "G"
    value: str = "D"

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        groups = dims[self.units or "G"]
        return InterleaveQkv(groups=groups, queries=dims["A"] // groups, dim=dims["D"], value=dims[self.value])

    def hf_shapes(self, dims: Mapping[str, int]) -> tuple[Shape, ...]:
        rest, groups = resolve(self.shape, dims), dims[self.units or "G"]
        return tuple((rows, *rest) for rows in (dims["Q"], groups * dims["D"], groups * dims[self.value]))

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        rows = dims["Q"] + dims[self.units or "G"] * (dims["D"] + dims[self.value])
        return (rows, *resolve(self.shape, dims))


@dataclass(frozen=True, slots=True)
class GatedQkv(Qkv):
    """:class:`Qkv` where each head of HF's q is followed by its output gate."""

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        return InterleaveGatedQkv(groups=dims["G"], queries=dims["A"] // dims["G"], dim=dims["D"])

    def hf_shapes(self, dims: Mapping[str, int]) -> tuple[Shape, ...]:
        rest = resolve(self.shape, dims)
        return tuple((rows, *rest) for rows in (2 * dims["Q"], dims["K"], dims["K"]))

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        return (2 * dims["Q"] + 2 * dims["K"], *resolve(self.shape, dims))


@dataclass(frozen=True, slots=True)
class ByKeyHead(Row):
    """HF tensors of a gated delta net → rows ordered by key head. ``shape``: the dimensions after the rows.

    ``sections``: for each HF tensor, the number of rows of one key head in each of its sections, in words of the
    legend. ``matrices``: rows of one key head of each linear map, if a section fuses several.
    """

    sections: tuple[tuple[str, ...], ...] = ()
    matrices: tuple[str, ...] = ()
    split: int | None = 0
    units: str | None = "n"

    def conversion(self, dims: Mapping[str, int]) -> JoinByGroup:
        sections = tuple(tuple(dim(word, dims) for word in words) for words in self.sections)
        matrices = tuple(dim(word, dims) for word in self.matrices)
        return JoinByGroup(groups=dims["n"], sections=sections, matrices=matrices)

    def hf_shapes(self, dims: Mapping[str, int]) -> tuple[Shape, ...]:
        rest = resolve(self.shape, dims)
        return tuple((dims["n"] * sum(rows), *rest) for rows in self.conversion(dims).sections)

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        rows = dims["n"] * sum(map(sum, self.conversion(dims).sections))
        return (rows, *resolve(self.shape, dims))


@dataclass(frozen=True, slots=True)
class GateUp(Row):
    """Two HF tensors gate and up → gate rows, then up rows. ``shape``: shape of one of them."""

    split: int | None = 0

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        return Conversion(parts=2)

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        rows, *rest = resolve(self.shape, dims)
        return (2 * rows, *rest)


@dataclass(frozen=True, slots=True)
class Transposed(Row):
    """One HF matrix, transposed."""

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        return Transpose()

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        return resolve(self.shape, dims)[::-1]


@dataclass(frozen=True, slots=True)
class Unsqueezed(Row):
    """One HF tensor with a leading dimension of 1 that Megatron's tensor lacks."""

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        return Squeeze()

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        return resolve(self.shape, dims)[1:]


@dataclass(frozen=True, slots=True)
class InterleavedGateUp(Row):
    """One HF tensor ``[H, 2f]`` or ``[2f]``, columns gate, up, gate, up … → gate rows, then up rows."""

    split: int | None = 0

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        return DeinterleaveGateUp()

    def megatron_shape(self, dims: Mapping[str, int]) -> Shape:
        return resolve(self.shape, dims)[::-1]


@dataclass(frozen=True, slots=True)
class RopeRows(Row):
    """One HF matrix whose rotary rows are stored in halves; Megatron's MLA needs them in pairs.

    ``heads``: number of blocks of rows (a letter of the legend or a number); the last ``P`` rows of each are rotary.
    """

    heads: str = "1"

    def conversion(self, dims: Mapping[str, int]) -> Conversion:
        heads = dim(self.heads, dims)
        rows = resolve(self.shape, dims)[0]
        return InterleaveRope(heads=heads, plain=rows // heads - dims["P"], rope=dims["P"])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and options of a HF config that determine its tensors.

    ``dims``: sizes by the letters of the legend. ``moe``: for each layer, whether it has experts. ``flags``: enable
    rows (:attr:`Row.when`). ``mla``: multi-latent attention. ``mixers``: for each layer, the field of its family with
    the rows of its token mixer; empty if all layers have the same.
    """

    dims: Mapping[str, int]
    moe: tuple[bool, ...]
    flags: frozenset[str] = frozenset()
    mla: bool = False
    mixers: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[bool, str], ...]:
        """For each layer: (whether it has experts, its entry in ``mixers``)."""
        return tuple(zip(self.moe, self.mixers or ("",) * len(self.moe), strict=True))

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same parameters; a checkpoint then stores them with a leading layer axis."""
        return len(set(self.moe)) == 1 and not self.mixers


L, M = "model.layers.{layer}.", "decoder.layers.{layer}."
"""Prefixes of a layer's tensors in HF's and in Megatron's names."""

EMBEDDING = (Copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V H", split=0, vocab=True),)
HEAD = (
    Copy("decoder.final_layernorm.weight", "model.norm.weight", "H"),
    Copy("output_layer.weight", "lm_head.weight", "V H", split=0, vocab=True, when="untied"),
)
QKV = Qkv(M + "self_attention.linear_qkv.weight", tuple(L + f"self_attn.{x}_proj.weight" for x in "qkv"), "H")
OUTPUT = Copy(M + "self_attention.linear_proj.weight", L + "self_attn.o_proj.weight", "H Q", split=1, units="A")
DENSE = (
    GateUp(M + "mlp.linear_fc1.weight", (L + "mlp.gate_proj.weight", L + "mlp.up_proj.weight"), "F H"),
    Copy(M + "mlp.linear_fc2.weight", L + "mlp.down_proj.weight", "H F", split=1),
)
ROUTER = Copy(M + "mlp.router.weight", L + "mlp.gate.weight", "E H")


def correction(hf: str = "mlp.gate.e_score_correction_bias") -> Row:
    """Return the row of the correction bias of DeepSeek-V3's router (arXiv:2412.19437, 2.1.2).

    The bias affects only the selection of experts.
    """
    return Copy(M + "mlp.router.expert_bias", L + hf, "E", buffer=True, keep_dtype=True)


CORRECTION = correction()
DRAFT = (
    Copy(M + "enorm.weight", L + "enorm.weight", "H"),
    Copy(M + "hnorm.weight", L + "hnorm.weight", "H"),
    Copy(M + "eh_proj.weight", L + "eh_proj.weight", "H 2H", split=0),
    Copy(M + "final_layernorm.weight", L + "shared_head.norm.weight", "H"),
)
"""Rows of DeepSeek-V3's multi-token-prediction layer in addition to a decoder layer (arXiv:2412.19437, 2.2)."""
DRAFT_COPIES = {
    L + "embed_tokens.weight": "model.embed_tokens.weight",
    L + "shared_head.head.weight": "lm_head.weight",
}
"""Tensors that released folders store again with this layer, although it shares those of the model."""


def decoder_layer(*attention: Row) -> tuple[Row, ...]:
    """Return the rows of every layer: ``attention``, the norm before it, and the norm before the MLP."""
    return (
        Copy(M + "input_layernorm.weight", L + "input_layernorm.weight", "H"),
        *attention,
        Copy(M + "pre_mlp_layernorm.weight", L + "post_attention_layernorm.weight", "H"),
    )


def qkv_bias(when: str | None = None) -> Row:
    """Return the row of the biases on q, k and v."""
    return Qkv(
        M + "self_attention.linear_qkv.bias", tuple(L + f"self_attn.{x}_proj.bias" for x in "qkv"), "", when=when
    )


def output_bias(when: str | None = None) -> Row:
    """Return the row of the bias of attention's output projection."""
    return Copy(M + "self_attention.linear_proj.bias", L + "self_attn.o_proj.bias", "H", when=when)


def qk_norms(q: str = "D", k: str = "D", when: str | None = None) -> tuple[Row, ...]:
    """Return the rows of the q and k norms, of sizes ``q`` and ``k``; the default is per head."""
    return tuple(
        Copy(M + f"self_attention.{x}_layernorm.weight", L + f"self_attn.{x}_norm.weight", size, when=when)
        for x, size in (("q", q), ("k", k))
    )


def experts(
    hf: str = "mlp.experts.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Row, ...]:
    """Return the rows of experts with separate tensors on disk under ``hf``."""
    megatron, one = M + "mlp.experts.{expert}.", L + hf + "{expert}."
    return (
        GateUp(megatron + "linear_fc1.weight", (f"{one}{gate}.weight", f"{one}{up}.weight"), "M H"),
        Copy(megatron + "linear_fc2.weight", f"{one}{down}.weight", "H M", split=1),
    )


def shared_expert(hf: str = "mlp.shared_experts.", when: str | None = None) -> tuple[Row, ...]:
    """Return the rows of the shared experts, which are one module."""
    megatron, one = M + "mlp.shared_experts.", L + hf
    return (
        GateUp(megatron + "linear_fc1.weight", (one + "gate_proj.weight", one + "up_proj.weight"), "S H", when=when),
        Copy(megatron + "linear_fc2.weight", one + "down_proj.weight", "H S", split=1, when=when),
    )
