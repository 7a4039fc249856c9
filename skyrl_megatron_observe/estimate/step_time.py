"""Seconds of a training step on paper, term by term, from the configuration, ``config.json`` and published peaks.

FLOPs are counted by ``runtime/flops.py``, parameters, states and activations by ``memory_*.py``, micro-batches by
``data/splitting.py``, bytes of a sync by the layouts of trainer and engines (``estimate/sync_time.py``). Rates and
their uncertainty are in ``machine_rates.py``. Not counted: environments, evaluation and checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from skyrl_megatron.algorithms.objective import PolicyObjective
from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.layout import stage_layers
from skyrl_megatron.config.resolve import generates_ahead
from skyrl_megatron.config.roles import (
    distils_in_reward,
    has_value_head,
    is_frozen,
    needs_reference,
    policy_is_reference,
    ranks_exchange_weights,
    shares_policy_gpus,
    weight_bucket_sizes,
    weight_transport,
)
from skyrl_megatron.config.rules.placement_rules import gpus_requested
from skyrl_megatron.data.splitting import aligned, plan_micro_batches, split_for_dp
from skyrl_megatron.runtime.flops import ModelFlops, described_config, layer_flops
from skyrl_megatron.trainer.step_batch import training_pass_scores
from skyrl_megatron.weight_sync.tensors import FUSED_EXPERTS
from skyrl_megatron_observe.estimate.engine_time import engine_gpus, sampling_time
from skyrl_megatron_observe.estimate.machine_rates import NETWORK, NONE, NVLINK, Machine, Seconds
from skyrl_megatron_observe.estimate.memory_activations import IMBALANCE, Recompute
from skyrl_megatron_observe.estimate.memory_budget import gigabytes
from skyrl_megatron_observe.estimate.memory_phases import GENERATION, TRAINING, RoleModel, engine_bytes, resident
from skyrl_megatron_observe.estimate.shared_tokens import PassRows, pass_rows
from skyrl_megatron_observe.estimate.sync_time import BUSIEST, SyncSizes, on_shared_gpus, over_network, share_away
from skyrl_megatron_parts.muon_settings import muon_settings

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

GENERATE, SCORE, TRAIN, SYNC = "generate", "fwd_logprobs_values_reward", "train_critic_and_policy", "sync_weights"
REST = "rest"
PHASES = (GENERATE, SCORE, TRAIN, SYNC, REST)
"""Phases of a step as ``timing/<phase>`` measures them, in order, and the rest of the step."""
LIKELY_IMBALANCE = 1.15
"""Tokens of the busiest expert-parallel rank over the average of a model with balanced experts."""


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a step's time, by the phase in which it passes."""

    name: str
    phases: Mapping[str, Seconds]
    note: str = ""
    elsewhere: Seconds | None = None
    """What the term takes in the frameworks whose steps are published, if this code was measured to be faster."""

    @property
    def seconds(self) -> Seconds:
        """Return the seconds of the term in all phases."""
        return sum(self.phases.values(), NONE)


@dataclass(frozen=True)
class StepEstimate:
    """The terms of a step. ``hidden``: what passes while other terms do, if rollouts run ahead of the training."""

    terms: tuple[Term, ...]
    tokens: float
    """Tokens of all sequences of the step."""
    gpus: int
    machine: Machine
    ahead: bool = False
    """Whether rollouts run ahead of the training."""
    hidden: Seconds = field(default=NONE)

    def phase(self, name: str) -> Seconds:
        """Return the seconds of one of :data:`PHASES`."""
        return sum((term.phases.get(name, NONE) for term in self.terms), NONE)

    @property
    def step(self) -> Seconds:
        """Return the seconds of the step: the sum of its terms, less what is hidden."""
        whole = sum((term.seconds for term in self.terms), NONE)
        return whole.minus(self.hidden)

    def with_terms(self, terms: Sequence[Term]) -> StepEstimate:
        """Return the step with other terms; what is hidden is that of the new ones."""
        changed = dataclasses.replace(self, terms=tuple(terms), hidden=NONE)
        if not self.ahead:
            return changed
        trained = changed.phase(SCORE) + changed.phase(TRAIN)
        return dataclasses.replace(changed, hidden=changed.phase(GENERATE).shorter(trained))

    def published(self) -> Seconds:
        """Return the seconds of the step with the terms of the frameworks whose steps are published."""
        more = ((term.elsewhere, term.seconds) for term in self.terms if term.elsewhere is not None)
        return sum((theirs.minus(ours) for theirs, ours in more), self.step)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Return the throughput of the likely step."""
        return self.tokens / self.step.likely / self.gpus


def longest_work(cfg: SkyRLTrainConfig, share: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return (prompts, responses) of a step, [B] tokens each: prompts of the maximum length, and responses of
    ``share`` of theirs. Rows of supervised training count as responses."""
    rows, taught = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt, supervised(cfg)
    longest = cfg.generator.sampling_params.max_generate_length if taught is None else taught.max_length
    prompt = cfg.trainer.max_prompt_length if taught is None else 0
    return np.full(rows, prompt), np.full(rows, max(int(longest * share), 1))


def estimate_step(
    cfg: SkyRLTrainConfig,
    models: Mapping[str, RoleModel],
    machine: Machine,
    prompts: np.ndarray,
    responses: np.ndarray,
    gpu_bytes: int | None = None,
) -> StepEstimate:
    """Return the terms of a step on sequences of ``prompts`` + ``responses`` tokens, [B] each. ``models``: role → its
    model. Without local engines, prefill, decode and sync are left out."""
    lengths = prompts + responses
    roles = {role: _Role(model, machine) for role, model in models.items()}
    policy, local = roles["policy"], cfg.generator.inference_engine.run_engines_locally
    terms: list[Term] = []
    if local:
        terms += _sampling(cfg, policy, prompts, responses, gpu_bytes)
    terms += _scoring(cfg, roles, prompts, lengths)
    for name, role in roles.items():
        if not is_frozen(name):
            terms += _training(cfg, role, prompts, lengths)
    terms += _offload(cfg, roles)
    if local:
        terms.append(_sync(cfg, policy.model, machine))
    if supervised(cfg) is None:
        terms.append(_data(float(lengths.sum())))
    gpus = sum(gpus_requested(cfg).values())
    estimate = StepEstimate((), float(lengths.sum()), gpus, machine, generates_ahead(cfg))
    return estimate.with_terms(_joined(terms))


def sampling_seconds(
    cfg: SkyRLTrainConfig,
    policy: RoleModel,
    machine: Machine,
    prompts: np.ndarray,
    responses: np.ndarray,
    gpu_bytes: int | None = None,
) -> Seconds:
    """Return the seconds that the engines take to sample ``responses`` [B] tokens after ``prompts`` [B] tokens."""
    flops = _Role(policy, machine).flops
    sampled = sampling_time(cfg, policy.table, flops, machine, prompts, responses, gpu_bytes)
    return sampled.prefill + sampled.decode


def training_rows(policy: RoleModel, machine: Machine, prompts: np.ndarray, responses: np.ndarray) -> PassRows:
    """Return the rows of a training pass over samples of ``prompts`` + ``responses`` tokens, [B] each."""
    return _Role(policy, machine).rows(prompts, prompts + responses, training=True)


def _joined(terms: list[Term]) -> tuple[Term, ...]:
    """Join the terms of one name, in the order of their first."""
    by_name: dict[str, Term] = {}
    for term in terms:
        joined = by_name.get(term.name, Term(term.name, {}))
        phases = {
            phase: joined.phases.get(phase, NONE) + term.phases.get(phase, NONE)
            for phase in PHASES
            if phase in joined.phases or phase in term.phases
        }
        by_name[term.name] = Term(term.name, phases, joined.note or term.note, joined.elsewhere or term.elsewhere)
    return tuple(by_name.values())


@dataclass(frozen=True)
class _Pass:
    """A forward pass over sequences, without bubbles, and the share of it that the bubbles add."""

    work: Seconds
    wire: Seconds
    bubbles: float
    """Waits of a rank for other stages and replicas, over the time of the pass."""


@dataclass(frozen=True, eq=False)
class _Role:
    """The passes of one role's model."""

    model: RoleModel
    machine: Machine

    @functools.cached_property
    def layers(self) -> list[tuple[ModelFlops, ModelFlops]]:
        """FLOPs of (attention, MLP) by layer."""
        plan = self.model.table.plan
        return layer_flops(described_config(plan.family.megatron_config(plan.hf_config)))

    @functools.cached_property
    def head(self) -> ModelFlops:
        """FLOPs of the output layer."""
        dims = self.model.table.plan.shape.dims
        return ModelFlops(
            2.0 * dims["H"] * (1 if has_value_head(self.model.cfg, self.model.role) else dims["V"]), 0.0, 0.0, 0
        )

    @functools.cached_property
    def flops(self) -> ModelFlops:
        """FLOPs of the whole model."""
        return sum((part for layer in self.layers for part in layer), self.head)

    def rows(self, prompts: np.ndarray, lengths: np.ndarray, *, training: bool) -> PassRows:
        """Return the rows of a pass over samples of ``prompts`` [B] tokens, ``lengths`` [B] with their prompts."""
        trainer = self.model.cfg.trainer
        micro = trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu
        return pass_rows(self.model, self.flops, prompts, lengths, micro)

    def stages(self, rows: PassRows) -> np.ndarray:
        """Return the forward FLOPs of each pipeline stage, [pp]."""
        p, found = self.model.parallel, []
        by_layer = [float(sum(rows.flops(part).sum() for part in layer)) for layer in self.layers]
        for stage in range(p.pp):
            own = [layer for chunk in range(p.vpp) for layer in stage_layers(p, len(by_layer), stage, chunk)]
            found.append(sum(by_layer[layer] for layer in own))
        found[-1] += float(rows.flops(self.head).sum())
        return np.array(found)

    def micro_batches(self, passed: PassRows, *, training: bool) -> tuple[int, float]:
        """Return the number of micro-batches of a replica, and the FLOPs of the fullest replica over the average."""
        p, trainer = self.model.parallel, self.model.cfg.trainer
        costs, lengths = passed.flops(self.flops), passed.computed
        parts = split_for_dp(costs, p.dp) if len(lengths) >= p.dp else [np.arange(len(lengths))]
        fullest = max(parts, key=lambda rows: float(costs[rows].sum()))
        rows = trainer.micro_train_batch_size_per_gpu if training else trainer.micro_forward_batch_size_per_gpu
        most, longest = trainer.max_tokens_per_microbatch, int(aligned(passed.lengths, p.alignment).max())
        plan = plan_micro_batches(
            lengths[fullest],
            alignment=p.alignment,
            max_tokens=max(most, longest) if most > 0 else most,
            rows=rows,
            multiple_of=p.pp if p.vpp > 1 else 1,
            dp_maximum=list,
        )
        return len(plan), float(costs[fullest].sum()) * p.dp / float(costs.sum())

    def forward(self, rows: PassRows, *, training: bool) -> _Pass:
        """Return a forward pass."""
        p, machine, width = self.model.parallel, self.machine, self.model.kernels.width
        count, fullest = self.micro_batches(rows, training=training)
        stages = self.stages(rows)
        work = machine.train(float(stages.sum()) / p.world_size, width)
        if p.ep > 1:
            experts = sum(float(rows.flops(mlp).sum()) for _, mlp in self.layers) / float(stages.sum())
            more = (1.0, 1 + experts * (LIKELY_IMBALANCE - 1), 1 + experts * (IMBALANCE - 1))
            work = Seconds(work.low * more[0], work.likely * more[1], work.high * more[2])
        work += machine.elementwise(self._between(rows.tokens) / p.world_size)
        held = max(self.model.state(stage).weights for stage in range(p.pp))
        exchanging = sum(self.model.table.plan.shape.moe) if p.ep > 1 else 0
        exchange = machine.fused_exchange_launch if self._fused_exchange else machine.exchange_launch
        launches = machine.launch.times(len(self.layers) - exchanging) + exchange.times(exchanging)
        least = launches.times(1 / p.pp).or_longer(machine.read(held))
        uneven = float(stages.max() / stages.mean())
        bubbles = fullest * uneven * (count + (p.pp - 1) / p.vpp) / count - 1
        return _Pass(work.or_longer(least.times(count)), self._wire(rows.tokens), bubbles)

    @property
    def _fused_exchange(self) -> bool:
        """Whether a token is sent once to each rank that has experts for it, by kernels that need no sizes."""
        return bool(self.model.settings.megatron_config.moe_token_dispatcher_type == "flex")

    def _between(self, tokens: float) -> float:
        """Return the bytes that a forward pass reads and writes between its products, on all ranks together."""
        dims, table = self.model.table.plan.shape.dims, self.model.table
        vectors, moe = 30 * dims["H"], table.plan.shape.moe  # norms, residuals, rotation, attention's sides
        routed = table.top_k * (4 * dims["H"] + 6 * dims.get("M", 0)) + 6 * dims.get("S", 0)
        by_layer = sum(vectors + (routed if is_moe else 6 * dims.get("F", 0)) for is_moe in moe)
        logits = 8 if not has_value_head(self.model.cfg, self.model.role) else 0
        return tokens * (by_layer * self.model.kernels.width + logits * dims["V"])

    def _wire(self, computed: float) -> Seconds:
        """Return the seconds that tp, ep and cp exchange activations in a forward pass."""
        p, dims, width = self.model.parallel, self.model.table.plan.shape.dims, self.model.kernels.width
        moe = self.model.table.plan.shape.moe
        tokens = computed / max(p.dp * p.cp, 1)
        vector = tokens * dims["H"] * width
        split = sum(2 if is_moe and not dims.get("S") else 4 for is_moe in moe) / p.pp
        seconds = self.machine.across(p.tp, split * vector * (p.tp - 1) / p.tp)
        routed = 2 * vector / p.tp * sum(moe) / p.pp
        top_k, extent = self.model.table.top_k, p.ep * p.etp
        if self._fused_exchange:
            seconds += self.machine.sent_once(extent, p.ep, routed, top_k)
        else:
            seconds += self.machine.exchanged(extent, p.ep, routed * top_k)
        keys = dims["O" if self.model.table.plan.shape.mla else "K"] / p.tp
        return seconds + self.machine.across(p.tp * p.cp, len(moe) / p.pp * 2 * keys * tokens * width * (p.cp - 1))

    def recomputed(self, rows: PassRows) -> float:
        """Return the FLOPs that the backward pass computes again, over those of the forward pass."""
        again: Recompute = self.model.recompute
        if again.granularity is None:
            return 0.0
        forward = float(rows.flops(self.flops).sum())
        if again.granularity == "full":
            chunk_layers = len(self.layers) / (self.model.parallel.pp * self.model.parallel.vpp)
            layers = min(again.layers / chunk_layers, 1.0) if again.method == "block" else 1.0
            return layers * (1 - float(rows.flops(self.head).sum()) / forward)
        repeated = 0.0
        for is_moe, (attention, mlp) in zip(self.model.table.plan.shape.moe, self.layers, strict=True):
            if ("moe" if is_moe else "mlp") in again.modules:
                repeated += float(rows.flops(mlp).sum())
            if "core_attn" in again.modules:
                repeated += float(rows.flops(attention).sum()) - attention.linear * rows.tokens
        return repeated / forward

    def backward(self, rows: PassRows) -> float:
        """Return the FLOPs of the backward pass over those of the forward pass: two products for each, and only the
        one for the inputs where the weight is frozen under adapters."""
        if self.model.adapters is None:
            return 2.0
        linear = self.flops.linear * rows.tokens / float(rows.flops(self.flops).sum())
        return 2.0 - linear


def _sampling(
    cfg: SkyRLTrainConfig, policy: _Role, prompts: np.ndarray, responses: np.ndarray, gpu_bytes: int | None
) -> list[Term]:
    """Return prefill and decode. Rollouts that run several steps ahead sample the batches of those together, so that
    the long responses of one pass overlap with the next one."""
    ahead = 1
    if generates_ahead(cfg):
        settings, batch = cfg.trainer.fully_async, cfg.trainer.train_batch_size
        ahead = max(min(settings.max_staleness_steps, settings.num_parallel_generation_workers // batch), 1)
    together = np.tile(prompts, ahead), np.tile(responses, ahead)
    sampled = sampling_time(cfg, policy.model.table, policy.flops, policy.machine, *together, gpu_bytes)
    read = f"{sampled.steps:,.0f} steps, {sampled.concurrent:,.0f} sequences an engine"
    return [
        Term("prefill", {GENERATE: sampled.prefill.times(1 / ahead)}),
        Term("decode", {GENERATE: sampled.decode.times(1 / ahead)}, read),
    ]


def _scoring(
    cfg: SkyRLTrainConfig, roles: Mapping[str, _Role], prompts: np.ndarray, lengths: np.ndarray
) -> list[Term]:
    """Return the passes without gradients. Roles with GPUs of their own compute at the same time as the others."""
    shared, waits, apart, passes = NONE, NONE, NONE, 0
    for name, role in roles.items():
        times = 1 if name != "policy" else policy_passes(cfg)
        if not times:
            continue
        passes += times
        one_pass = role.forward(role.rows(prompts, lengths, training=False), training=False)
        seconds = (one_pass.work + one_pass.wire).times(times)
        if name == "policy" or shares_policy_gpus(cfg, name):
            shared, waits = shared + seconds, waits + seconds.times(one_pass.bubbles)
        else:
            apart = apart.or_longer(seconds.times(1 + one_pass.bubbles))
    shared += apart.excess(shared + waits)
    note = f"{passes} pass{'es' if passes != 1 else ''} without gradients"
    return [Term("log-probs", {SCORE: shared}, note), Term("bubbles", {SCORE: waits})]


def policy_passes(cfg: SkyRLTrainConfig) -> int:
    """Count the passes of the policy without gradients: its log-probs before the update, unless no loss reads them or
    the training pass has them, and those of the reference, if that is the policy without its adapters."""
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    megatron = trainer.policy.megatron_config
    replays = megatron.moe_enable_routing_replay and megatron.moe_routing_replay_source == "trainer"
    in_reward = algorithm.use_kl_in_reward or distils_in_reward(cfg)
    read = in_reward or PolicyObjective(algorithm).needs_old_log_probs
    once = trainer.train_batch_size == trainer.policy_mini_batch_size
    before_update = (read and not (once and training_pass_scores(cfg))) or replays
    return int(before_update) + int(policy_is_reference(cfg) and needs_reference(cfg))


def _training(cfg: SkyRLTrainConfig, role: _Role, prompts: np.ndarray, lengths: np.ndarray) -> list[Term]:
    """Return the passes and optimizer steps of a role that is trained."""
    trainer, name = cfg.trainer, role.model.role
    updates = trainer.train_batch_size // getattr(trainer, f"{name}_mini_batch_size")
    rows = max(len(lengths) // updates, 1)
    times = updates * trainer.update_epochs_per_batch
    parts = [np.resize(tokens, rows) if updates == 1 else tokens[::updates][:rows] for tokens in (prompts, lengths)]
    of_one = role.rows(*parts, training=True)
    scale = times * float(lengths.sum()) / updates / float(of_one.lengths.sum())
    one_pass, again = role.forward(of_one, training=True), role.recomputed(of_one)
    forward = (one_pass.work + one_pass.wire).times(scale)
    backward = (one_pass.work.times(role.backward(of_one)) + one_pass.wire).times(scale)
    recompute = forward.times(again)
    waits = (forward + backward + recompute).times(one_pass.bubbles)
    kept = role.model.recompute.granularity or "none"
    update, products = _optimizer(role), _orthogonalised(role)
    muon = f", {products.times(times).likely:.3g} s of them Muon's products" if products.likely else ""
    return [
        Term("forward", {TRAIN: forward}, f"{of_one.saved:.0%} of the tokens are shared" if of_one.saved else ""),
        Term("backward", {TRAIN: backward}),
        Term("recomputation", {TRAIN: recompute}, f"{kept}: {again:.0%} of the forward pass"),
        Term("bubbles", {TRAIN: waits}, f"{one_pass.bubbles:.0%} of the passes"),
        Term("optimizer", {TRAIN: (update + products).times(times)}, f"{times} steps{muon}"),
    ]


def _optimizer(role: _Role) -> Seconds:
    """Return the seconds of one optimizer step: gradients over dp, the update on device and host, weights over dp."""
    model, machine, p = role.model, role.machine, role.model.parallel
    megatron = model.settings.megatron_config
    options, ddp = megatron.optimizer_config_kwargs, megatron.ddp_config
    most = NONE
    for stage in range(p.pp):
        factors, parameters = model.factors(stage), model.parameters(stage)
        dense, expert = (parameters.dense, parameters.expert) if factors is None else (factors.dense, factors.expert)
        shard = dense / p.dp_cp + expert / p.edp
        if not options.get("use_distributed_optimizer", True):
            shard = dense + expert
        hosted = float(options.get("optimizer_offload_fraction") or 0) if options.get("optimizer_cpu_offload") else 0
        on_host = shard * hosted
        copies = machine.to_host(on_host * 8)
        update = machine.host_adam.times(on_host)
        overlapped = options.get("overlap_cpu_optimizer_d2h_h2d")
        hosted_s = copies.or_longer(update) if overlapped else copies + update
        width = 4 if ddp.grad_reduce_in_fp32 else model.kernels.width
        summed = dense * (p.dp_cp - 1) / p.dp_cp + expert * (p.edp - 1) / p.edp
        wire = machine.across(p.world_size // p.pp, summed * (width + model.kernels.width))
        most = most.or_longer(machine.adam(shard - on_host) + hosted_s + wire)
    return most


def _orthogonalised(role: _Role) -> Seconds:
    """Return the seconds that Muon adds to an optimizer step: Newton-Schulz on the whole matrices that a rank owns,
    and fp32 momentum and updates on their ways over dp and tp; none with another optimizer."""
    model, machine, p = role.model, role.machine, role.model.parallel
    if model.settings.optimizer_config.optimizer != "muon":
        return NONE
    options = model.settings.megatron_config.optimizer_config_kwargs
    settings, sharded = muon_settings(options), options.get("use_distributed_optimizer", True)
    width = 2 if settings.fp32_matmul_prec in (None, "medium") else 4
    dp, edp = (p.dp_cp, p.edp) if sharded else (1, 1)
    table = model.table if model.adapters is None else model.adapters
    most = NONE
    for stage in range(p.pp):
        dense, expert = table.newton_schulz(p, stage)
        held = model.factors(stage) or model.parameters(stage)
        owned = (held.matrices[0] / dp, held.matrices[1] / edp)
        products = machine.train((dense / dp + expert / edp) * settings.num_ns_steps, width)
        there_and_back = 8 * (owned[0] * (dp > 1) + owned[1] * (edp > 1))
        gathered = 4 * (owned[0] * (p.tp - 1) + owned[1] * (p.etp - 1))
        wire = machine.across(p.world_size // p.pp, there_and_back) + machine.across(max(p.tp, p.etp), gathered)
        most = most.or_longer(products + wire)
    return most


def _offload(cfg: SkyRLTrainConfig, roles: Mapping[str, _Role]) -> list[Term]:
    """Return the copies of states that leave the GPU for other roles and engines, and come back."""
    terms, moved = [], 0
    for name, role in roles.items():
        away = resident(cfg, name, TRAINING, name) - resident(cfg, name, GENERATION) - {"gradients"}
        states = [role.model.state(stage) for stage in range(role.model.parallel.pp)]
        sizes = {what: max(getattr(state, what) for state in states) for what in away}
        moved += sum(sizes.values())
        weights, optimizer = (role.machine.to_host(sizes.get(what, 0)) for what in ("weights", "optimizer"))
        back = Seconds(optimizer.low * 0.2, optimizer.likely * 0.5, optimizer.high)  # copied while the model computes
        phases = {SCORE: weights} if is_frozen(name) else {SCORE: weights, TRAIN: back}
        terms.append(Term("offload", phases | {SYNC: weights + optimizer}))
    if cfg.trainer.placement.colocate_all:
        terms.append(Term("offload", {SYNC: roles["policy"].machine.switch}))
    note = f"{gigabytes(moved)} a rank, both ways" if moved else ""
    return [Term("offload", {}, note), *terms]


def sync_sizes(cfg: SkyRLTrainConfig, model: RoleModel) -> SyncSizes:
    """Return what a weight sync moves to each engine worker."""
    engine, p, plan = cfg.generator.inference_engine, model.parallel, model.table.plan
    degrees = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size
    nodes = max(cfg.trainer.placement.policy_num_nodes, 1)
    sizes, sliced = engine_bytes(cfg, model.table), engine.weight_sync_routes and engine.backend == "vllm"
    layers = plan.shape.moe
    experts = sum(1 for entry in plan.entries if entry.is_expert) * 2
    all_tensors = sum(len(entry.hf) for entry in plan.entries)
    fused = plan.family.model_type in FUSED_EXPERTS
    tensors = all_tensors - experts + 2 * sum(layers) if fused and experts else all_tensors
    width = model.kernels.width
    if sizes.received:  # adapters alone
        received, sliced = float(sizes.received), False
    else:
        received = float(sizes.weights) if sliced else float(model.table.total() * width)
    sent = received * (engine_gpus(cfg) / p.world_size * BUSIEST if sliced else 1 / p.world_size)
    away = share_away(nodes, min(p.edp, nodes)) if ranks_exchange_weights(cfg) else 0.0
    tensors = round(tensors / degrees[1])
    return SyncSizes(received, sent, tensors, weight_bucket_sizes(cfg)[-1], away)


def _sync(cfg: SkyRLTrainConfig, model: RoleModel, machine: Machine) -> Term:
    sizes, seconds = sync_sizes(cfg, model), []
    alone = model.parallel.world_size + engine_gpus(cfg) <= machine.per_node
    peak, shares = (machine.nvlink, NVLINK) if alone else (machine.network, NETWORK)
    for copies, share in zip(machine.sync_copies, shares, strict=True):
        if weight_transport(cfg) == "ipc":
            seconds.append(on_shared_gpus(sizes, machine.network * share, copies).total)
        else:
            seconds.append(over_network(sizes, peak * share, copies).total)
    low, likely, high = seconds[::-1]
    model_bytes = (
        float(model.table.total() * model.kernels.width) if not engine_bytes(cfg, model.table).received else 0.0
    )
    rates = REFIT_SHARED if weight_transport(cfg) == "ipc" else REFIT_APART
    elsewhere = REFIT_CALLS + Seconds(*(model_bytes / rate for rate in rates[::-1]))
    return Term("sync", {SYNC: Seconds(low, likely, high)}, f"{gigabytes(sizes.received)} a worker", elsewhere)


REFIT_CALLS, REFIT_SHARED, REFIT_APART = Seconds(2.0, 4.5, 8.0), (15e9, 27e9, 45e9), (30e9, 55e9, 90e9)
"""A weight sync of other frameworks: seconds of its calls, and bytes/s at which every rank gathers the whole model, on
GPUs that it shares with engines or not. Published: 5 to 8 s for 16 GB, 11 to 16 s for 61 GB, 24 to 59 s for 470 GB."""
DATA_CALLS, DATA_TOKEN = Seconds(0.1, 0.3, 1.0), Seconds(0.1e-6, 0.2e-6, 0.5e-6)
"""Batches between phases: seconds of a step, and of a token. Measured: 0.87 s of 4.36 M tokens, of verl 40.3 s."""
ELSEWHERE_CALLS, ELSEWHERE_TOKEN = Seconds(1.0, 2.0, 4.0), Seconds(0.5e-6, 1.3e-6, 3e-6)
"""The same of other frameworks, with rewards and records. Published: 3 s of 1.9 M tokens, 12.6 s of 6.7 M tokens."""


def _data(tokens: float) -> Term:
    ours, theirs = DATA_CALLS + DATA_TOKEN.times(tokens), ELSEWHERE_CALLS + ELSEWHERE_TOKEN.times(tokens)
    return Term("data", {REST: ours}, "batches between phases", theirs)
