"""The estimate of a run and of its step: their lines in ``--check``, and next to the measurement in a run."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skyrl_megatron.config.derive import supervised
from skyrl_megatron.config.hardware import GPU_TYPES
from skyrl_megatron.config.resolve import generates_ahead, longest_sequence
from skyrl_megatron.config.roles import active_roles
from skyrl_megatron.trainer.recorders import RecordedRun, RunRecorder
from skyrl_megatron_observe.estimate.lengths import StepLengths, step_lengths
from skyrl_megatron_observe.estimate.machine_rates import Machine, Seconds
from skyrl_megatron_observe.estimate.memory_budget import gigabytes, parameter_tables
from skyrl_megatron_observe.estimate.memory_phases import RoleModel
from skyrl_megatron_observe.estimate.run_totals import StepsSoFar, totals
from skyrl_megatron_observe.estimate.shared_tokens import ONE_SAMPLE, why_unshared
from skyrl_megatron_observe.estimate.staleness import groups_in_flight, run_ahead, stream_limits
from skyrl_megatron_observe.estimate.step_time import (
    GENERATE,
    PHASES,
    REST,
    SCORE,
    SYNC,
    TRAIN,
    StepEstimate,
    estimate_step,
    longest_work,
    sampling_seconds,
    training_rows,
)

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

SHOWN = {GENERATE: "generate", SCORE: "log-probs", TRAIN: "train", SYNC: "sync", REST: "rest"}
"""Phase → its name in a line."""
COMPARED_STEP = 2
"""The step of a process whose measurement is compared: the first one also compiles and allocates."""


@dataclass(frozen=True)
class RunEstimate:
    """What is known of a run before it starts."""

    cfg: SkyRLTrainConfig
    hardware: Hardware
    models: Mapping[str, RoleModel]
    lengths: StepLengths
    measured: StepsSoFar
    step: StepEstimate | None
    """A step with those lengths; None if the type of the GPUs is unknown."""

    @classmethod
    def of(cls, cfg: SkyRLTrainConfig, tables: Mapping[str, ParameterTable], hardware: Hardware) -> RunEstimate:
        """Estimate a run. ``tables``: role → its parameters, of all roles."""
        measured = StepsSoFar.of(cfg)
        lengths = step_lengths(cfg, measured.steps)
        on_cpu = hardware.is_cpu
        models = {role: RoleModel.of(cfg, role, tables[role], on_cpu=on_cpu) for role in active_roles(cfg)}
        found = cls(cfg, hardware, models, lengths, measured, None)
        if hardware.gpu is None and not on_cpu:
            return found
        return dataclasses.replace(found, step=found.estimate(lengths.prompts, lengths.responses))

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine of the run."""
        gpu = self.hardware.gpu
        return Machine.of_gpu(gpu, self.hardware.gpus_per_node) if gpu else Machine.of_cpu()

    def estimate(self, prompts: np.ndarray, responses: np.ndarray) -> StepEstimate:
        """Return the terms of a step on sequences of ``prompts`` + ``responses`` tokens, [B] each."""
        return estimate_step(self.cfg, self.models, self.machine, prompts, responses, self.hardware.gpu_bytes)

    def shared(self) -> Iterator[str]:
        """Yield a line of what the policy computes once for several rows, or why it computes each row by itself."""
        cfg, policy = self.cfg, self.models["policy"]
        if (why := why_unshared(policy)) == ONE_SAMPLE:
            return
        wanted = cfg.trainer.share_prefixes
        if why:
            yield f"shared prefixes: none ({wanted}): {why}"
            return
        rows = training_rows(policy, self.machine, self.lengths.prompts, self.lengths.responses)
        line = f"shared prefixes: {rows.saved:.0%} of the tokens of an update are computed once for several rows"
        if rows.saved:
            n = cfg.generator.n_samples_per_prompt
            together, apart = (round(float(tokens.mean()) * n) for tokens in (rows.computed, rows.lengths))
            stages = range(policy.parallel.pp)
            kept, more = (max(policy.training(stage, tokens) for stage in stages) for tokens in (together, apart))
            line += f" ({wanted}); a prompt's {n} rows train in {gigabytes(kept)} instead of {gigabytes(more)}"
            if self.step is not None:
                never = self.without_sharing()
                passes = [step.phase(SCORE).likely + step.phase(TRAIN).likely for step in (self.step, never)]
                line += f", a step's passes take {_number(passes[0])} s instead of {_number(passes[1])} s"
        yield line

    def without_sharing(self) -> StepEstimate:
        """Return the terms of a step that computes each row by itself."""
        cfg = copy.deepcopy(self.cfg)
        cfg.trainer.share_prefixes = "never"
        models = {role: dataclasses.replace(model, cfg=cfg) for role, model in self.models.items()}
        return dataclasses.replace(self, cfg=cfg, models=models).estimate(self.lengths.prompts, self.lengths.responses)

    def totals(self) -> Iterator[str]:
        """Yield the lines of the whole run."""
        yield from totals(self.cfg, self.models, self.step, self.lengths, self.measured)

    def terms(self) -> Iterator[str]:
        """Yield the terms of a step, each with its bounds, and the step with the longest responses."""
        cfg, step = self.cfg, self.step
        yield "# one step on paper, without environments, evaluation and checkpoints"
        if step is None:
            yield f"the type of the GPUs is unknown: add --gpu {next(iter(GPU_TYPES)).lower()}, or another of them"
            return
        yield f"{self.lengths.source}, on {self.machine.name}: seconds, and from the best to the worst case"
        yield from term_lines(step)
        if generates_ahead(cfg) and cfg.generator.inference_engine.run_engines_locally:
            yield _staleness(cfg, self.models["policy"], step, self.hardware.gpu_bytes)
        longest = longest_sequence(cfg) if supervised(cfg) else cfg.generator.sampling_params.max_generate_length
        worst = self.estimate(*longest_work(cfg))
        of = "sequence" if supervised(cfg) else "response"
        yield f"if every {of} has {longest} tokens: {_bounds(worst.step)}, {_speed(worst)}"


def _staleness(cfg: SkyRLTrainConfig, policy: RoleModel, estimate: StepEstimate, gpu_bytes: int | None) -> str:
    """Return the line of how stale the batches of an asynchronous run are."""
    rows = groups_in_flight(cfg) * cfg.generator.n_samples_per_prompt
    prompts, responses = (np.resize(tokens, rows) for tokens in longest_work(cfg))
    group_s = sampling_seconds(cfg, policy, estimate.machine, prompts, responses, gpu_bytes).likely
    train_s = estimate.phase(SCORE).likely + estimate.phase(TRAIN).likely
    queue = run_ahead(stream_limits(cfg), lambda number: group_s, train_s, estimate.phase(SYNC).likely)
    bound, workers = "trainer.fully_async.max_staleness_steps", "num_parallel_generation_workers"
    return (
        f"  {'staleness':<14}{queue.mean:>8.2f} steps on average, at most {queue.most}"
        f"   {bound}={cfg.trainer.fully_async.max_staleness_steps}, {workers}="
        f"{cfg.trainer.fully_async.num_parallel_generation_workers}"
    )


def term_lines(estimate: StepEstimate) -> Iterator[str]:
    """Yield a line for each term, and one for the step."""
    for term in estimate.terms:
        notes = [term.note] if term.note else []
        if term.elsewhere is not None and term.seconds.likely:
            ratio = term.seconds.likely / term.elsewhere.likely
            notes.append(f"{ratio:.2f}x of what published frameworks take")
        note = f"   {', '.join(notes)}" if notes else ""
        yield f"  {term.name:<14}{_bounds(term.seconds)}{note}"
    if estimate.hidden.likely:
        yield f"  {'overlapped':<14}−{_number(estimate.hidden.likely)} s: rollouts run ahead"
    yield f"  {'a step':<14}{_bounds(estimate.step)}   {_speed(estimate)}"


def _speed(estimate: StepEstimate) -> str:
    unit = "rank" if estimate.machine.name not in GPU_TYPES else "GPU"
    return f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s per {unit}"


def _bounds(seconds: Seconds) -> str:
    return f"{_number(seconds.likely):>8} s  ({_number(seconds.low)} … {_number(seconds.high)})"


def _number(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return f"{seconds:.3g}" if seconds >= 1e-3 else "0"


class EstimateRecorder(RunRecorder):
    """Adds the estimate of the second step to its metrics, next to what was measured."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run)
        self._compare = StepComparison(run.cfg, run.tracker.say)

    def step_metrics(
        self, lengths: np.ndarray, metrics: Mapping[str, float], device_type: Callable[[], str | None]
    ) -> dict[str, float]:
        return self._compare(lengths, metrics, device_type)


class StepComparison:
    """Compares the second step of a run with its estimate on the sequences that the step had."""

    def __init__(self, cfg: SkyRLTrainConfig, say: Callable[[str], None]) -> None:
        self.cfg, self._say, self._steps = cfg, say, 0

    def __call__(
        self, lengths: np.ndarray, metrics: Mapping[str, float], device_type: Callable[[], str | None]
    ) -> dict[str, float]:
        """Return ``estimate/<phase>_s``, the step and its bounds, and print them with what was measured; {} for other
        steps than the second.

        ``lengths``: tokens of the step's sequences, [B]. ``metrics``: of the step. ``device_type``: returns the key of
        the policy's devices in ``GPU_TYPES``; "" if unknown, None for a CPU.
        """
        self._steps += 1
        if self._steps != COMPARED_STEP:
            return {}
        try:
            estimate = self._estimate(lengths, metrics.get("generate/avg_num_tokens", 0.0), device_type())
        except Exception as error:  # a run does not end because of an estimate
            self._say(f"no estimate of the step: {type(error).__name__}: {error}")
            return {}
        if estimate is None:
            return {}
        estimated = {"estimate/step_s": estimate.step.likely}
        estimated |= {"estimate/step_low_s": estimate.step.low, "estimate/step_high_s": estimate.step.high}
        estimated |= {f"estimate/{phase}_s": estimate.phase(phase).likely for phase in PHASES}
        rows = [(SHOWN[phase], estimate.phase(phase), metrics.get(f"timing/{phase}")) for phase in PHASES]
        rows.append(("step", estimate.step, metrics.get("timing/step")))
        parts = [
            f"{name} {_number(took)} s ({_number(paper.likely)}, {_number(paper.low)} … {_number(paper.high)})"
            for name, paper, took in rows
            if took is not None
        ]
        self._say("measured (on paper): " + " · ".join(parts))
        return estimated

    def _estimate(self, lengths: np.ndarray, response: float, gpu: str | None) -> StepEstimate | None:
        cfg, tables = self.cfg, parameter_tables(self.cfg)
        if gpu == "" or set(tables) != set(active_roles(cfg)):
            return None
        models = {role: RoleModel.of(cfg, role, table, on_cpu=gpu is None) for role, table in tables.items()}
        per_node = cfg.trainer.placement.policy_num_gpus_per_node
        machine = Machine.of_cpu() if gpu is None else Machine.of_gpu(gpu, per_node)
        memory = None if gpu is None or (mib := GPU_TYPES[gpu].mib) is None else mib << 20
        prompts = np.full(len(lengths), max(round(float(lengths.mean()) - response), 1))
        return estimate_step(cfg, models, machine, prompts, np.maximum(lengths - prompts, 1), memory)
