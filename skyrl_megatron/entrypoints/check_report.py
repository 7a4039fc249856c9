"""The report of ``--check``: configuration, machine, topology, parameters and bytes per rank, batch arithmetic.

Reads ``config.json`` of the models and nothing else of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from bridges.errors import BridgeError
from bridges.plan import Plan
from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_yaml_str
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.hf_model import kv_bytes_per_token, read_hf_config
from skyrl_megatron.config.rules.layout import ParallelConfig, stage_layers
from skyrl_megatron.config.rules.placement import gpus_asked
from skyrl_megatron.config.rules.role_layout import active_roles, engine_ranks, rank_position, role_layout
from skyrl_megatron.config.rules.training import longest_sequence
from skyrl_megatron.entrypoints.memory_budget import active_parameters, model_parameters, rank_bytes, stage_parameters
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.weight_sync import DEFAULT_BUCKET_BYTES


def report(cfg: SkyRLTrainConfig, hardware: Hardware) -> Iterator[str]:
    """Yield the report on a resolved configuration line by line. Raises ConfigError for an unsupported model."""
    yield "# resolved configuration"
    yield get_config_as_yaml_str(cfg)
    yield "# machine"
    yield f"{hardware}"
    asked = gpus_asked(cfg)
    unit = "rank processes" if hardware.is_cpu else "GPUs"
    yield f"the run takes {sum(asked.values())} {unit}: " + ", ".join(f"{who} {n}" for who, n in asked.items())
    yield ""
    plans: dict[str, Plan] = {}
    for role in active_roles(cfg):
        yield from _role(cfg, role, plans)
    yield from _engines(cfg, plans.get("policy"))
    yield from _batch(cfg)


def _plan(cfg: SkyRLTrainConfig, role: str) -> Plan | None:
    """Return names and shapes of a role's model; None for a hub model whose ``config.json`` cannot be fetched."""
    key, path = f"trainer.{role}.model.path", getattr(cfg.trainer, role).model.path
    hf = read_hf_config(path, key, download=True)
    if hf is None:
        return None
    try:
        return Plan.of(hf)
    except BridgeError as error:
        raise ConfigError([Problem(key, path, str(error))]) from None


def _role(cfg: SkyRLTrainConfig, role: str, plans: dict[str, Plan]) -> Iterator[str]:
    """Yield model, layout and memory of one role."""
    section, parallel, plan = getattr(cfg.trainer, role), role_layout(cfg, role), _plan(cfg, role)
    yield f"# {role}: {section.model.path}"
    yield f"layout: {_degrees(parallel)}"
    if plan is None:
        yield "config.json is neither here nor to be had: layers, parameters and bytes are not known"
        yield ""
        return
    plans[role] = plan
    moe, experts = plan.shape.moe, plan.shape.dims.get("E", 0)
    kind = f"{sum(moe)} of {len(moe)} layers with {experts} experts" if experts else f"{len(moe)} layers"
    total, top_k = model_parameters(plan), int(plan.hf_config.get("num_experts_per_tok") or experts)
    active = f", {active_parameters(plan, top_k):,} active per token" if experts else ""
    yield f"model: {plan.family.model_type}, {total:,} parameters{active}, {kind}"
    yield from _topology(parallel, len(moe), experts)
    yield from _memory(cfg, role, parallel, plan)
    yield ""


def _degrees(p: ParallelConfig) -> str:
    return (
        f"{p.world_size} ranks = tp {p.tp} · pp {p.pp} · cp {p.cp} · dp {p.dp}; "
        f"experts etp {p.etp} · ep {p.ep} · edp {p.edp}" + (f"; vpp {p.vpp}" if p.vpp > 1 else "")
    )


def _topology(parallel: ParallelConfig, num_layers: int, experts: int) -> Iterator[str]:
    """Yield one line for all ranks that hold the same layers and experts."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(parallel.world_size):
        position = rank_position(parallel, rank)
        groups.setdefault((position.pp, position.ep if experts else 0), []).append(rank)
    share = experts // parallel.ep
    for (stage, ep), ranks in groups.items():
        chunks = [stage_layers(parallel, num_layers, stage, chunk) for chunk in range(parallel.vpp)]
        holds = "layers " + ", ".join(_range(layers[0], layers[-1]) for layers in chunks)
        if experts:
            holds += f", experts {_range(ep * share, (ep + 1) * share - 1)}"
        yield f"  {'ranks' if len(ranks) > 1 else 'rank'} {_ranges(ranks)}: stage {stage}, {holds}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write ``[0, 1, 2, 4]`` as ``0-2, 4``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(_range(span[0], span[-1]) for span in spans)


def _memory(cfg: SkyRLTrainConfig, role: str, parallel: ParallelConfig, plan: Plan) -> Iterator[str]:
    trainer, section = cfg.trainer, getattr(cfg.trainer, role)
    adapter = section.model.lora.rank > 0
    yield "  per rank:     parameters     weights   gradients   optimizer     buffers       total"
    for stage in range(parallel.pp):
        count = stage_parameters(plan, parallel, stage, value_head=role == "critic")
        size = rank_bytes(
            count,
            parallel,
            section.megatron_config,
            bf16=trainer.bf16,
            trained=role != "ref" and not adapter,
            bucket_bytes=DEFAULT_BUCKET_BYTES if role == "policy" else 0,
        )
        columns = (size.weights, size.gradients, size.optimizer, size.buffers, size.device)
        yield f"  stage {stage:<3} {count.parameters:>15,}" + "".join(f" {_bytes(value):>11}" for value in columns)
        if size.host_optimizer:
            yield f"            and {_bytes(size.host_optimizer)} of optimizer state in host memory"
    if adapter:
        yield "  weights are frozen: gradients and optimizer state of the LoRA adapter come on top"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


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
            f"KV cache: {_bytes(token)} per token and rank; {_bytes(token * longest)} for a sequence of {longest} "
            f"tokens, {_bytes(full)} for max_num_seqs={engine.max_num_seqs} of them"
        )
    yield ""


def _batch(cfg: SkyRLTrainConfig) -> Iterator[str]:
    trainer, n = cfg.trainer, cfg.generator.n_samples_per_prompt
    train = trainer.train_batch_size
    yield "# one step"
    yield f"{train} prompts · {n} samples = {train * n} sequences of at most {longest_sequence(cfg)} tokens"
    for role in active_roles(cfg):
        if role == "ref":
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
