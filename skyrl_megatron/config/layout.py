"""Which parallel layouts are valid. Validation asks this before a process starts, and so does the runtime.

A rank belongs to a (tp, cp, dp, pp) grid for attention and dense layers and to an (etp, ep, edp, pp) grid for experts:
``world = tp·cp·dp·pp = etp·ep·edp·pp``. Layers are split into pp stages, and each stage into vpp chunks, so that
chunk ``v`` of all stages comes before chunk ``v + 1`` (megatron/core/transformer/transformer_block.py,
``get_num_layers_to_build``; transformer_layer.py, ``get_transformer_layer_offset``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_megatron.errors import ConfigError, Problem

PREFIX = "trainer.policy.megatron_config."
"""Section of the policy's parallel degrees. The other roles have their own sections."""

_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage": "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage": "num_layers_in_last_pipeline_stage",
    "overlap_p2p": "transformer_config_kwargs.overlap_p2p_comm",
}


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Parallel degrees of one role's Megatron model on ``world_size`` ranks. :func:`layout_problems` checks them.

    ``overlap_p2p``: how pipeline stages send to each other. True: ``overlap_p2p_comm=True, batch_p2p_comm=False``;
    False: Megatron's batched default; None: whichever the layout needs.
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

    @property
    def dp(self) -> int:
        """Data-parallel replicas of the dense part, without cp."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients of dense parameters are summed: dp · cp."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Replicas of an expert: ranks over which its gradients are summed."""
        return self.world_size // (self.pp * self.etp * self.ep)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between tensor-parallel regions are split along the sequence: whenever tp > 1."""
        return self.tp > 1

    @property
    def uses_overlapped_p2p(self) -> bool:
        """Whether stages overlap their sends: the default with virtual pipelining, never without it."""
        return self.vpp > 1 and self.overlap_p2p is not False

    @property
    def alignment(self) -> int:
        """Multiple to which each packed sequence is padded: cp splits it into 2·cp chunks, tp into tp slices."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """The sizes of a model that the parallel degrees must divide. 0: the model has no such part."""

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int = 0
    """Feed-forward size of dense layers."""
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    """Feed-forward size of one expert."""
    shared_expert_size: int = 0
    """Feed-forward size of all shared experts together."""
    latent_rows: tuple[int, ...] = ()
    """Rows of the down projections of multi-latent attention, which tp splits."""
    delta_net_heads: int = 0
    """Key heads of gated delta nets, which tp·cp splits."""


def layers_per_stage(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage. Raises ConfigError when the layers cannot be split."""
    problems = list(_layer_problems(parallel, num_layers, PREFIX))
    if problems:
        raise ConfigError(problems)
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    end_sizes = [size for size in (first, last) if size is not None]
    middle = parallel.pp - len(end_sizes)
    share = (num_layers - sum(end_sizes)) // middle if middle else 0
    stages = [share] * parallel.pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return tuple(stages)


def stage_layers(parallel: ParallelConfig, num_layers: int, pp_rank: int, vpp_stage: int = 0) -> range:
    """Return the global indices (from 0) of the layers in chunk ``vpp_stage`` of stage ``pp_rank``.

    With 8 layers, pp=2, vpp=2: stage 0 holds 0–1 and 4–5, stage 1 holds 2–3 and 6–7.
    Raises ConfigError when the layers cannot be split.
    """
    chunks = [layers // parallel.vpp for layers in layers_per_stage(parallel, num_layers)]
    start = vpp_stage * sum(chunks) + sum(chunks[:pp_rank])
    return range(start, start + chunks[pp_rank])


def layout_problems(
    parallel: ParallelConfig, dims: ModelDimensions | None = None, prefix: str = PREFIX
) -> list[Problem]:
    """Return everything that makes a layout impossible, each with its config key, value and fix; [] if it is valid.

    ``dims``: sizes of the model, checked too if given. ``prefix``: the section of this role's degrees.
    """
    problems = list(_positive(parallel, prefix))
    if problems:  # the rules below divide by the degrees
        return problems
    problems += _grid_problems(parallel, prefix)
    problems += _pipeline_problems(parallel, prefix)
    if dims is not None:
        problems += _layer_problems(parallel, dims.num_layers, prefix)
        problems += _width_problems(parallel, dims, prefix)
        problems += _expert_problems(parallel, dims, prefix)
    return problems


def _problem(parallel: ParallelConfig, name: str, fix: str, prefix: str) -> Problem:
    return Problem(f"{prefix}{_KEYS[name]}", getattr(parallel, name), fix)


def _positive(parallel: ParallelConfig, prefix: str) -> Iterator[Problem]:
    if parallel.world_size < 1:
        yield Problem("world_size", parallel.world_size, "a layout needs ranks: set it to at least 1")
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        if getattr(parallel, name) < 1:
            yield _problem(parallel, name, "must be a whole number of at least 1", prefix)


def _grid_problems(parallel: ParallelConfig, prefix: str) -> Iterator[Problem]:
    dense, name = parallel.tp * parallel.pp * parallel.cp, ""
    if parallel.world_size % dense:
        name = next(n for n in ("cp", "pp", "tp") if getattr(parallel, n) > 1)
        product = f"tp·pp·cp = {parallel.tp}·{parallel.pp}·{parallel.cp}"
        yield _problem(parallel, name, _indivisible(parallel, name, product, dense), prefix)
    experts = parallel.pp * parallel.etp * parallel.ep
    if parallel.world_size % experts and (parallel.ep > 1 or parallel.etp > 1) and name != "pp":  # said already
        name = "ep" if parallel.ep > 1 else "etp"
        product = f"pp·etp·ep = {parallel.pp}·{parallel.etp}·{parallel.ep}"
        yield _problem(parallel, name, _indivisible(parallel, name, product, experts), prefix)


def _indivisible(parallel: ParallelConfig, name: str, product: str, size: int) -> str:
    """Return the fix: the largest value of the degree ``name`` with which the product divides the ranks, if any."""
    ranks, degree = parallel.world_size, getattr(parallel, name)
    fits = [n for n in range(1, degree) if ranks % (size // degree * n) == 0]
    lower = f"set it to {fits[-1]}" if fits else "lower the degrees"
    return f"{product} = {size} must divide the {ranks} ranks: {lower}, or use a multiple of {size} ranks"


def _pipeline_problems(parallel: ParallelConfig, prefix: str) -> Iterator[Problem]:
    needs_stages = "needs pipeline_model_parallel_size of at least 2; set it, or remove this key"
    if parallel.vpp > 1 and parallel.pp == 1:
        yield _problem(parallel, "vpp", needs_stages, prefix)
    if parallel.vpp > 1 and parallel.pp == 2 and not parallel.uses_overlapped_p2p:
        fix = (
            f"with pp=2 and vpp={parallel.vpp} batched sends are matched in the wrong order and gradients are "
            "wrong: set it to true, or remove this key"
        )
        yield _problem(parallel, "overlap_p2p", fix, prefix)
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        layers = getattr(parallel, name)
        if layers is None:
            continue
        if parallel.pp == 1:
            yield _problem(parallel, name, needs_stages, prefix)
        elif layers < 1:
            yield _problem(parallel, name, "must be at least 1", prefix)


def _layer_problems(parallel: ParallelConfig, num_layers: int, prefix: str) -> Iterator[Problem]:
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    sizes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    named = {name: layers for name, layers in sizes.items() if layers is not None}
    left, stages = num_layers - sum(named.values()), parallel.pp - len(named)
    if named and (left < stages or (stages <= 0 and left != 0)):
        name = next(iter(named))
        fix = f"the model has {num_layers} layers, so {left} remain for {stages} other stages; choose other sizes"
        yield _problem(parallel, name, fix, prefix)
        return
    if stages > 0 and (left % stages or left == 0):
        fix = f"{left} layers cannot be split evenly into {stages} stages; use a divisor of {left}"
        hint = "" if named else ", or set num_layers_in_first_pipeline_stage and/or num_layers_in_last_pipeline_stage"
        yield _problem(parallel, "pp", fix + hint, prefix)
        return
    share = left // stages if stages else 0
    for name, layers in [*named.items(), ("vpp", share)]:
        if parallel.vpp > 1 and layers % parallel.vpp:
            fix = f"{layers} layers of a stage cannot be split into {parallel.vpp} chunks; use a multiple or divisor"
            yield _problem(parallel, name, fix, prefix)


def _width_problems(parallel: ParallelConfig, dims: ModelDimensions, prefix: str) -> Iterator[Problem]:
    sizes = [
        ("attention heads", dims.num_attention_heads),
        ("KV groups", dims.num_query_groups),
        ("rows of a dense feed-forward layer", dims.ffn_hidden_size),
        ("rows of the shared experts", dims.shared_expert_size),
        *(("rows of a latent projection", rows) for rows in dims.latent_rows),
    ]
    for what, size in sizes:
        if size % parallel.tp:
            yield _problem(parallel, "tp", f"the model has {size} {what}; use a divisor of {size}", prefix)
    if dims.delta_net_heads % (parallel.tp * parallel.cp):
        name, heads = "tp" if dims.delta_net_heads % parallel.tp else "cp", dims.delta_net_heads
        fix = f"tp·cp splits the {heads} key heads of gated delta nets: tp·cp must divide {heads}"
        yield _problem(parallel, name, fix, prefix)


def _expert_problems(parallel: ParallelConfig, dims: ModelDimensions, prefix: str) -> Iterator[Problem]:
    if not dims.num_experts:
        for name in ("ep", "etp"):
            if getattr(parallel, name) > 1:
                yield _problem(parallel, name, "the model has no experts; use 1", prefix)
        return
    if dims.num_experts % parallel.ep:
        fix = f"the model has {dims.num_experts} experts; use a divisor of {dims.num_experts}"
        yield _problem(parallel, "ep", fix, prefix)
    if dims.moe_ffn_hidden_size % parallel.etp:
        fix = f"an expert has {dims.moe_ffn_hidden_size} rows; use a divisor of {dims.moe_ffn_hidden_size}"
        yield _problem(parallel, "etp", fix, prefix)
