"""Parallel layouts as integers: which are possible, and which rank holds which layers.

Pure arithmetic, so that the command line can check a layout before a process group, Ray or a device exists, and
``runtime/parallel_state.py`` can build groups from the same numbers. Degrees: ``world = tp · pp · cp · dp`` for the
dense part and ``world = etp · ep · pp · edp`` for the experts (megatron/core/parallel_state.py, RankGenerator).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_megatron.errors import Problem

PREFIX = "trainer.policy.megatron_config."
"""Where the keys of a layout live; problems of another role are reported under its own prefix."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism of one model. ``etp`` None means equal to ``tp`` without experts' own tensor parallelism.

    ``vpp`` is the number of model chunks per pipeline stage (1: no virtual pipelining).
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    overlap_p2p: bool | None = None
    """Overlapped instead of batched point-to-point sends between stages. None: what the layout needs."""

    @property
    def dp(self) -> int:
        """Data-parallel degree of the dense part, cp not included."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def dp_cp(self) -> int:
        """Ranks over which dense gradients are summed."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Ranks over which expert gradients are summed."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def alignment(self) -> int:
        """Every packed sequence is padded to a multiple of this: 2·cp chunks for zig-zag, tp for sequence parallel."""
        return self.tp * self.cp * 2 if self.cp > 1 else self.tp

    @property
    def uses_overlapped_p2p(self) -> bool:
        """Whether stages overlap their sends: always for two interleaved stages, where batched sends between the same
        two ranks are matched in the wrong order and gradients come out silently wrong."""
        return self.overlap_p2p if self.overlap_p2p is not None else self.vpp > 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that limit its layouts."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    num_experts: int = 0
    hidden_size: int = 0


def layout_problems(parallel: ParallelConfig, model: ModelShape | None = None, prefix: str = PREFIX) -> list[Problem]:
    """Everything that makes a layout impossible, each with key, numbers and fix. Empty when it can be built."""
    return [*_degree_problems(parallel, prefix), *(_model_problems(parallel, model, prefix) if model else ())]


def _degree_problems(p: ParallelConfig, prefix: str) -> Iterator[Problem]:
    degrees = {
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
        "expert_tensor_parallel_size": p.etp,
    }
    bad = [Problem(prefix + key, value, "must be at least 1") for key, value in degrees.items() if value < 1]
    if p.world_size < 1:
        bad.append(Problem("world size", p.world_size, "must be at least 1"))
    if bad:
        yield from bad
        return
    dense, expert = p.tp * p.pp * p.cp, p.pp * p.etp * p.ep
    if p.world_size % dense:
        fix = f"tp·pp·cp = {p.tp}·{p.pp}·{p.cp} = {dense} must divide the {p.world_size} ranks of the model"
        yield Problem(prefix + "tensor_model_parallel_size", p.tp, fix)
    if p.world_size % expert:
        fix = f"pp·etp·ep = {p.pp}·{p.etp}·{p.ep} = {expert} must divide the {p.world_size} ranks of the model"
        yield Problem(prefix + "expert_model_parallel_size", p.ep, fix)
    if p.vpp > 1 and p.pp == 1:
        fix = "virtual pipeline stages need pipeline_model_parallel_size > 1: set it to 1, or raise pp"
        yield Problem(prefix + "virtual_pipeline_model_parallel_size", p.vpp, fix)
    if p.vpp > 1 and p.pp == 2 and p.overlap_p2p is False:
        fix = (
            "with vpp on two stages batched sends reach the wrong receiver and gradients are silently wrong: "
            "remove it (overlap_p2p_comm=true, batch_p2p_comm=false is then used)"
        )
        yield Problem(prefix + "transformer_config_kwargs.overlap_p2p_comm", False, fix)
    uneven = (p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage)
    for key, layers in zip(("first", "last"), uneven, strict=True):
        name = f"{prefix}num_layers_in_{key}_pipeline_stage"
        if layers is not None and p.pp == 1:
            yield Problem(name, layers, "needs pipeline_model_parallel_size > 1: remove it, or raise pp")
        elif layers is not None and layers < 1:
            yield Problem(name, layers, "must be at least 1")


def _model_problems(p: ParallelConfig, m: ModelShape, prefix: str) -> Iterator[Problem]:
    if min(p.tp, p.pp, p.vpp, p.cp, p.ep, p.etp) < 1:
        return
    tp_key = prefix + "tensor_model_parallel_size"
    if m.num_attention_heads % p.tp:
        yield Problem(tp_key, p.tp, f"must divide the model's {m.num_attention_heads} attention heads")
    if m.num_query_groups % p.tp:
        yield Problem(tp_key, p.tp, f"must divide the model's {m.num_query_groups} key-value heads")
    if m.hidden_size % p.tp:
        yield Problem(tp_key, p.tp, f"must divide the model's hidden size {m.hidden_size}")
    if p.ep > 1 and not m.num_experts:
        yield Problem(prefix + "expert_model_parallel_size", p.ep, "the model has no experts: set it to 1")
    elif m.num_experts and m.num_experts % p.ep:
        fix = f"must divide the model's {m.num_experts} experts"
        yield Problem(prefix + "expert_model_parallel_size", p.ep, fix)
    yield from _pipeline_problems(p, m, prefix)


def _pipeline_problems(p: ParallelConfig, m: ModelShape, prefix: str) -> Iterator[Problem]:
    first, last = p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage
    given = [layers for layers in (first, last) if layers is not None]
    stages, layers = p.pp - len(given), m.num_layers - sum(given)
    key = prefix + "pipeline_model_parallel_size"
    if p.pp == 1:
        return
    if not given:
        if m.num_layers % (p.pp * p.vpp):
            fix = (
                f"pp·vpp = {p.pp}·{p.vpp} must divide the model's {m.num_layers} layers, or set "
                "num_layers_in_first_pipeline_stage / num_layers_in_last_pipeline_stage"
            )
            yield Problem(key, p.pp, fix)
        return
    if (stages == 0 and layers != 0) or layers < stages or (stages and layers % (stages * p.vpp)):
        fix = (
            f"{m.num_layers} layers less {' and '.join(map(str, given))} of the first/last stage leave {layers} for "
            f"{stages} stages of {p.vpp} chunks: they must divide evenly"
        )
        yield Problem(key, p.pp, fix)
    for name, count in (("first", first), ("last", last)):
        if count is not None and count % p.vpp:
            yield Problem(
                f"{prefix}num_layers_in_{name}_pipeline_stage", count, f"vpp = {p.vpp} chunks must divide it"
            )


def stage_layers(parallel: ParallelConfig, num_layers: int, pp_rank: int, vpp_rank: int = 0) -> range:
    """The global layer numbers of one model chunk, for a layout without problems.

    Chunk ``v`` of stage ``p`` follows chunk ``v`` of stage ``p − 1``; with uneven first and last stages every chunk
    row is cut alike (megatron/core/transformer/transformer_block.py, get_num_layers_to_build).
    """
    p = parallel
    first, last = p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage
    given = (first or 0) + (last or 0)
    middle_stages = p.pp - (first is not None) - (last is not None)
    middle = (num_layers - given) // middle_stages // p.vpp if middle_stages else 0
    sizes = [middle] * p.pp
    if first is not None:
        sizes[0] = first // p.vpp
    if last is not None:
        sizes[-1] = last // p.vpp
    start = vpp_rank * sum(sizes) + sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])
