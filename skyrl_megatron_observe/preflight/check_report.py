"""Lines of ``--check``: time and disk of the run, memory, layout, parameters, batch sizes and the time of a step.

It starts neither Ray nor CUDA.

Of a model it reads ``config.json`` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from bridges.plan import Plan
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import kv_bytes_per_token
from skyrl_megatron.config.layout import ParallelConfig, stage_layers
from skyrl_megatron.config.resolve import longest_sequence
from skyrl_megatron.config.roles import active_roles, engine_ranks, is_frozen, rank_position, role_layout, weight_path
from skyrl_megatron_observe.estimate.memory_budget import (
    Budget,
    gigabytes,
    other_lines,
    parameter_tables,
    report_lines,
)
from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable
from skyrl_megatron_observe.estimate.memory_phases import RoleModel
from skyrl_megatron_observe.estimate.memory_recompute import recomputation
from skyrl_megatron_observe.estimate.step_report import RunEstimate
from skyrl_megatron_parts.experts.plan import HORIZON, MoveCosts


def report(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[str]:
    """Yield the whole run, the tightest memory, layout, parameters and batch sizes of a resolved configuration.

    Raises ConfigError for an unsupported model.
    """
    tables = parameter_tables(cfg)
    complete = set(tables) == set(active_roles(cfg))
    estimate = RunEstimate.of(cfg, tables, hardware) if complete else None
    if estimate is not None:
        yield "# the run, without environments, evaluation and checkpoints"
        yield from estimate.totals()
        yield ""
    if (budget := _budget(cfg, tables, hardware)) is not None:
        yield "# memory: the GPU or node with the least room (--show-config: all)"
        yield from report_lines(budget)
        yield ""
    for role in active_roles(cfg):
        yield from _role(cfg, role, tables.get(role), hardware)
    if supervised(cfg) is None:
        yield from _engines(cfg, tables["policy"].plan if "policy" in tables else None)
    if cfg.trainer.exact_rollouts:
        yield _exact(hardware)
        yield ""
    yield from _batch(cfg)
    if estimate is not None:
        yield from estimate.shared()
        yield ""
        yield from estimate.terms()


def details(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[str]:
    """Yield what ``--show-config`` adds: the memory of the other phases."""
    if (budget := _budget(cfg, parameter_tables(cfg), hardware)) is not None:
        yield ""
        yield "# memory of the other phases: the fullest GPU of each, and a node"
        yield from other_lines(budget)


def _budget(cfg: SkyRLTrainConfig, tables: dict[str, ParameterTable], hardware: Hardware) -> Budget | None:
    """Return the memory of GPUs and nodes; None without GPUs, or if a model is unknown."""
    if hardware.is_cpu or set(tables) != set(active_roles(cfg)):
        return None
    return Budget.of(cfg, tables, hardware)


def _role(cfg: SkyRLTrainConfig, role: str, table: ParameterTable | None, hardware: Hardware) -> Iterator[str]:
    """Yield model, layout and memory of one role."""
    section, parallel = getattr(cfg.trainer, role), role_layout(cfg, role)
    yield f"# {role}: {section.model.path}"
    policy = cfg.trainer.policy
    same = role != "policy" and section.model.path == policy.model.path and parallel == role_layout(cfg, "policy")
    yield f"layout: {'as the policy' if same else _degrees(parallel)}"
    if table is None:
        yield "config.json is not in the cache of the Hugging Face hub: layers, parameters and bytes are unknown"
        yield ""
        return
    plan = table.plan
    moe, experts = plan.shape.moe, plan.shape.dims.get("E", 0)
    if not same:
        kind = f"{sum(moe)} of {len(moe)} layers with {experts} experts" if experts else f"{len(moe)} layers"
        active = f", {table.active(table.top_k):,} active per token" if experts else ""
        yield f"model: {plan.family.model_type}, {table.total():,} parameters{active}, {kind}"
        yield from _topology(parallel, len(moe), experts)
    model = RoleModel.of(cfg, role, table, on_cpu=hardware.is_cpu)
    yield from _memory(model)
    if model.trained:
        yield f"  {recomputation(model)}"
        if section.megatron_config.moe_expert_moves != "none":
            yield _moves(cfg, role, plan, parallel, hardware)
    yield ""


def _moves(cfg: SkyRLTrainConfig, role: str, plan: Plan, parallel: ParallelConfig, hardware: Hardware) -> str:
    """Return what a move of an expert between ranks takes, and when it pays back."""
    dims, width = plan.shape.dims, 2 if cfg.trainer.bf16 else 4
    costs = MoveCosts.of(
        dims["H"],
        dims["M"],
        weight_bytes=width,
        edp=parallel.edp,
        etp=parallel.etp,
        gpu=None if hardware.is_cpu else hardware.gpu or "",
        flops=cfg.trainer.peak_flops_per_rank,
        frozen=role == "policy" and cfg.trainer.policy.model.lora.rank > 0,
    )
    return (
        f"  moving an expert of a layer takes {1e3 * costs.move:.2f} ms; it pays back in {HORIZON} steps if the "
        f"busiest rank gets {costs.tokens:,.0f} tokens less in each"
    )


def _degrees(p: ParallelConfig) -> str:
    return (
        f"{p.world_size} ranks = tp {p.tp} · pp {p.pp} · cp {p.cp} · dp {p.dp}; "
        f"experts etp {p.etp} · ep {p.ep} · edp {p.edp}" + (f"; vpp {p.vpp}" if p.vpp > 1 else "")
    )


def _topology(parallel: ParallelConfig, num_layers: int, experts: int) -> Iterator[str]:
    """Yield one line for all stages with equally many layers: its ranks, and what a rank holds."""
    ranks, kinds = dict[int, list[int]](), dict[tuple[int, ...], list[int]]()
    for rank in range(parallel.world_size):
        ranks.setdefault(rank_position(parallel, rank).pp, []).append(rank)
    chunks = [[stage_layers(parallel, num_layers, stage, chunk) for chunk in range(parallel.vpp)] for stage in ranks]
    for stage, layers in enumerate(chunks):
        kinds.setdefault(tuple(map(len, layers)), []).append(stage)
    share = f", {experts // parallel.ep} of {experts} experts a rank" if experts and parallel.ep > 1 else ""
    for stages in kinds.values():
        of = sorted(rank for stage in stages for rank in ranks[stage])
        held = "; ".join(", ".join(_range(part[0], part[-1]) for part in chunks[stage]) for stage in stages)
        name = "stage" if len(stages) == 1 else "stages"
        yield f"  {name} {_ranges(stages)}, {'rank' if len(of) == 1 else 'ranks'} {_ranges(of)}: layers {held}{share}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write ``[0, 1, 2, 4]`` as ``0-2, 4``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(_range(span[0], span[-1]) for span in spans)


def _memory(model: RoleModel) -> Iterator[str]:
    yield "  per rank:     parameters     weights   gradients   optimizer     buffers       total"
    alike: dict[tuple[str, str], list[int]] = {}
    for stage in range(model.parallel.pp):
        size = model.state(stage)
        columns = (size.weights, size.gradients, size.optimizer, size.buffers, size.device)
        row = "".join(f" {gigabytes(value):>11}" for value in columns)
        host = gigabytes(size.host_optimizer) if size.host_optimizer else ""
        alike.setdefault((f"{model.parameters(stage).parameters:>15,}{row}", host), []).append(stage)
    for (row, host), stages in alike.items():
        yield f"  stage {_ranges(stages):<3} {row}"
        if host:
            yield f"            plus {host} of optimizer state in host memory"
    if model.settings.model.lora.rank:
        yield "  the base weights are frozen; gradients and optimizer state are those of the LoRA adapter"


def _engines(cfg: SkyRLTrainConfig, plan: Plan | None) -> Iterator[str]:
    engine = cfg.generator.inference_engine
    yield "# engines"
    if not engine.run_engines_locally:
        yield "started elsewhere"
    else:
        yield (
            f"{engine.num_engines} · {engine_ranks(cfg)} ranks (tp {engine.tensor_parallel_size} · pp "
            f"{engine.pipeline_parallel_size} · dp {engine.data_parallel_size}, ep {engine.expert_parallel_size})"
        )
    if plan is not None:
        hf = plan.family.config(plan.hf_config).to_dict()  # with transformers' defaults filled in
        tp, pp, longest = engine.tensor_parallel_size, engine.pipeline_parallel_size, longest_sequence(cfg)
        token = kv_bytes_per_token(hf, engine.model_dtype, tp=tp, pp=pp)
        full = token * longest * engine.max_num_seqs
        yield (
            f"KV cache: {gigabytes(token)} per token and rank; {gigabytes(token * longest)} for a sequence of "
            f"{longest} tokens, {gigabytes(full)} for max_num_seqs={engine.max_num_seqs} of them"
        )
    # only vLLM workers report the slices that they need; whether they can for this model shows at the first sync
    sliced = engine.weight_sync_routes and engine.backend == "vllm"
    yield f"weight sync: {weight_path(cfg, sliced=sliced)}"
    yield ""


def _exact(hardware: Hardware) -> str:
    """Return what ``trainer.exact_rollouts`` costs (``benchmarks/exact_rollouts.py``)."""
    if hardware.is_cpu:
        return "exact rollouts: generation takes about 6 times as long, log-probs 1.8 times, a training step 1.4 times"
    return "exact rollouts: batch-invariant kernels, whose cost and remaining gap are not measured on a GPU"


def _batch(cfg: SkyRLTrainConfig) -> Iterator[str]:
    trainer, n = cfg.trainer, cfg.generator.n_samples_per_prompt
    train = trainer.train_batch_size
    yield "# one step"
    rows = f"{train} rows" if supervised(cfg) else f"{train} prompts · {n} samples = {train * n} sequences"
    yield f"{rows} of at most {longest_sequence(cfg)} tokens"
    for role in active_roles(cfg):
        if is_frozen(role):
            continue
        mini, dp = getattr(trainer, f"{role}_mini_batch_size"), role_layout(cfg, role).dp
        steps = train // mini * trainer.update_epochs_per_batch
        share = mini * n // dp
        if trainer.max_tokens_per_microbatch > 0:
            cut = f"micro-batches of at most {trainer.max_tokens_per_microbatch} tokens"
        else:
            micro = trainer.micro_train_batch_size_per_gpu
            cut = f"{math.ceil(share / micro)} micro-batches of {micro}"
        yield (
            f"{role}: {steps} optimizer steps ({train}/{mini} · {trainer.update_epochs_per_batch} epochs), each on "
            f"{mini * n} sequences = dp {dp} · {share}, in {cut}"
        )
