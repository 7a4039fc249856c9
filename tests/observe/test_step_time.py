"""The time of a step on paper: against torch's count, sums by hand, and what more devices or more work must do."""

import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.support.released_models import DEEPSEEK_V3, QWEN3_30B_A3B, RELEASED_LATER

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"
M = "trainer.policy.megatron_config."
O = f"{M}optimizer_config_kwargs."  # noqa: E741
E = "generator.inference_engine."
NODES = "trainer.placement.policy_num_nodes"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Configuration and models of a recipe with changes: only config.json is read."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron.config.validate import find_problems
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import role_models

    def make(shape, *changes, recipe="qwen3-30b-a3b-2x8", valid=True):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(shape))
        argv = ["--config", str(RECIPES / f"{recipe}.yaml"), f"trainer.policy.model.path={folder}"]
        argv += ["trainer.logger=console", *changes]
        cfg, problems = parse(SkyRLTrainConfig, argv)
        assert not problems
        problems = find_problems(cfg, Hardware(8, cfg.trainer.placement.policy_num_nodes, elsewhere=True))
        assert not valid or not problems
        return cfg, role_models(cfg, parameter_tables(cfg))

    return make


@pytest.fixture(autouse=True)
def any_layout_warns_of_nothing_here():
    """Settings without effect in one of the variations are not what these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def h100():
    from skyrl_megatron_observe.estimate.machine_rates import Machine

    return Machine.of_gpu("H100", 8)


def estimate(cfg, models, share=1.0, gpu_bytes=80 * 10**9, machine=None):
    from skyrl_megatron_observe.estimate.step_time import estimate_step, longest_work

    return estimate_step(cfg, models, machine or h100(), *longest_work(cfg, share), gpu_bytes)


def term(found, name):
    return next(each for each in found.terms if each.name == name)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_passes_take_as_long_as_torch_counts_products(planned, model_type):
    """A forward pass at the peak's likely share, of what transformers' model computes. Eager attention computes all
    S x S scores, of which S (S + 1) / 2 count; the difference is taken out by torch's count of two lengths."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from skyrl_megatron_observe.estimate.machine_rates import TRAINING, Machine, Seconds
    from skyrl_megatron_observe.estimate.shared_tokens import PassRows
    from skyrl_megatron_observe.estimate.step_time import _Role
    from tests.bridges.tiny_models import tiny_config, tiny_model

    cfg, models = planned(tiny_config(model_type), f"{M}expert_model_parallel_size=1", valid=False)
    module = tiny_model(model_type)
    module.set_experts_implementation("eager")

    def torch_counts(length):
        with FlopCounterMode(display=False) as counter:
            module(torch.randint(0, 1003, (1, length)), use_cache=False)
        return counter.get_total_flops()

    length, rows = 16, 64
    # a·s + b·s² of two lengths: b·s² becomes b·s (s + 1) / 2
    one, two = torch_counts(length), torch_counts(2 * length)
    pairs = (two - 2 * one) / 2
    counted = rows * (one - pairs + pairs * (length + 1) / (2 * length))
    slow = dataclasses.replace(h100(), flops=1e6, launch=Seconds(), memory=1e30)
    role = _Role(models["policy"], slow)
    of_rows = PassRows.separate(np.full(rows, length))
    found = role.forward(of_rows, training=True)
    assert found.work.likely == pytest.approx(counted / 16 / 1e6 / TRAINING[1], rel=1e-9)
    assert found.wire == Seconds() and found.bubbles == pytest.approx(0)
    assert role.backward(of_rows) == 2.0
    assert isinstance(slow, Machine)


def test_decode_by_hand(planned):
    """Qwen3-30B-A3B on engines of two H100, 64 sequences each, which all have room."""
    from skyrl_megatron_observe.estimate.machine_rates import MEMORY

    cfg, models = planned(QWEN3_30B_A3B, "trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64")
    found = estimate(cfg, models, gpu_bytes=None)
    decode = term(found, "decode")
    layers, hidden, experts, top_k, ffn, vocabulary = 48, 2048, 128, 8, 768, 151936
    attention = hidden * (32 + 4 + 4) * 128 + 32 * 128 * hidden
    chosen = 1 - (1 - top_k / experts) ** 64
    weights = layers * (attention + 3 * hidden * ffn * experts * chosen) + vocabulary * hidden
    norms_and_routers = layers * (2 * hidden + 2 * 128 + hidden * experts) + hidden
    read = weights * 2 / 2 + norms_and_routers * 2  # bf16, two ranks
    cache = 64 * (1024 + 7168 / 2) * layers * 2 * (4 // 2) * 128 * 2
    step = (read + cache) / 3.35e12 / MEMORY[1]
    summed = 4 * layers * 64 * hidden * 2 / 2 / (450e9 * 0.7) + layers * (2 * 1.5e-5 + 80e-6)
    assert decode.note == "7,168 steps, 64 sequences an engine"
    assert decode.seconds.likely == pytest.approx(7168 * (step + summed + 1.5e-3 + 64 * 8e-6), rel=0.01)


def test_optimizer_and_offload_by_hand(planned):
    """Adam of the ranks' shards: experts over ep 8, of which 2 nodes hold a copy each, everything else over 16."""
    from skyrl_megatron_observe.estimate.machine_rates import OPTIMIZER

    cfg, models = planned(QWEN3_30B_A3B)
    found = estimate(cfg, models)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - experts
    shard = dense / 16 + experts / 8 / 2
    gradients = (dense * 15 / 16 + experts / 8 / 2) * (4 + 2) / (50e9 * 0.65)
    expected = 4 * (shard * 34 / (3.35e12 * OPTIMIZER[1]) + gradients)
    assert term(found, "optimizer").seconds.likely == pytest.approx(expected, rel=1e-3)
    held = 2 * (dense + experts / 8)
    away = held + 12 * shard  # of the policy, and the weights of the reference
    moved = (held + held + 0.5 * 12 * shard + held + away) / (64e9 * 0.7)
    assert term(found, "offload").seconds.likely == pytest.approx(moved + 3.0, rel=1e-3)


def test_the_products_of_muon_by_hand(planned):
    """Five Newton-Schulz steps on each whole matrix of a rank, and its momentum and update on their ways over dp."""
    from skyrl_megatron_observe.estimate.machine_rates import TRAINING

    def products(short, long):
        return 4 * short**2 * long + 2 * short**3

    muon = "trainer.policy.optimizer_config.optimizer=muon"
    adam, with_muon = (term(estimate(*planned(QWEN3_30B_A3B, *keys)), "optimizer") for keys in ([], [muon]))
    attention = 48 * (2 * products(2048, 4096) + 2 * products(512, 2048))
    experts = 48 * 16 * 3 * products(768, 2048)
    work = 5 * (attention / 16 + experts / 2) / (h100().flops * TRAINING[1])
    matrices = 48 * 2048 * (2 * 4096 + 2 * 512) / 16 + 48 * 16 * 3 * 2048 * 768 / 2
    moved = 8 * matrices / (50e9 * 0.65)
    added = with_muon.seconds.likely - adam.seconds.likely
    assert added == pytest.approx(4 * (work + moved), rel=1e-3)
    assert with_muon.note == f"4 steps, {added:.3g} s of them Muon's products"


def test_the_products_of_muon_on_adapters(planned):
    """Factors of rank 64 take a small part of what their weights take."""
    muon = "trainer.policy.optimizer_config.optimizer=muon"
    found = [
        term(estimate(*planned(QWEN3_30B_A3B, *keys, recipe="qwen3-30b-a3b-lora")), "optimizer").seconds.likely
        for keys in ([], [muon], [muon, "trainer.policy.model.lora.rank=32"])
    ]
    assert found[0] < found[1] and found[2] < found[1]


@pytest.mark.parametrize("recipe", ["qwen3-30b-a3b", "qwen3-30b-a3b-2x8", "qwen3-30b-a3b-lora"])
def test_terms_add_up_to_the_step(planned, recipe):
    from skyrl_megatron_observe.estimate.step_time import PHASES

    cfg, models = planned(QWEN3_30B_A3B, recipe=recipe)
    found = estimate(cfg, models)
    names = ["prefill", "decode", "log-probs", "bubbles", "forward", "backward", "recomputation", "optimizer"]
    assert [each.name for each in found.terms] == [*names, "offload", "sync", "data"]
    for bound in ("low", "likely", "high"):
        by_term = sum(getattr(each.seconds, bound) for each in found.terms)
        by_phase = sum(getattr(found.phase(phase), bound) for phase in PHASES)
        assert getattr(found.step, bound) == pytest.approx(by_term) == pytest.approx(by_phase)
    for each in found.terms:
        assert 0 <= each.seconds.low <= each.seconds.likely <= each.seconds.high


def test_rollouts_that_run_ahead_hide_the_shorter_half(planned):
    separate = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=true"]
    cfg, models = planned(QWEN3_30B_A3B, *separate, valid=False)
    together = estimate(cfg, models)
    cfg.trainer.fully_async.enabled, cfg.trainer.fully_async.max_staleness_steps = True, 1
    ahead = estimate(cfg, models)
    generate = together.phase("generate").likely
    trains = together.phase("fwd_logprobs_values_reward").likely + together.phase("train_critic_and_policy").likely
    rest = together.step.likely - generate - trains
    assert ahead.step.likely == pytest.approx(max(generate, trains) + rest)


def test_more_of_what_helps_takes_less(planned):
    """Time by layout: machines, recomputation, stages, tensor parallelism, moments on the host."""

    def step(*changes, **options):
        return estimate(*planned(QWEN3_30B_A3B, *changes, **options))

    times = [step(f"{NODES}={nodes}", f"{E}num_engines={4 * nodes}") for nodes in (2, 4, 8)]
    assert times[0].step.likely > times[1].step.likely > times[2].step.likely
    kwargs = f"{M}transformer_config_kwargs.recompute_"
    none = step("trainer.gradient_checkpointing=false")
    some = step(f"{kwargs}granularity=selective", f"{kwargs}modules=[core_attn]")
    experts = step(f"{kwargs}granularity=selective", f"{kwargs}modules=[core_attn, moe]")
    full = step(f"{kwargs}granularity=full", f"{kwargs}method=uniform", f"{kwargs}num_layers=1")
    again = [term(each, "recomputation").seconds.likely for each in (none, some, experts, full)]
    assert again[0] == 0 < again[1] < again[2] < again[3] < term(full, "forward").seconds.likely
    stages = [step(f"{M}pipeline_model_parallel_size={pp}") for pp in (1, 2)]
    waits = [term(each, "bubbles").seconds.likely for each in stages]
    assert waits[0] == pytest.approx(0) and waits[1] > 0
    wide = [term(step(f"{M}tensor_model_parallel_size={tp}"), "forward").seconds.likely for tp in (1, 2, 4)]
    assert wide[0] < wide[1] < wide[2]
    hosted = [step(f"{O}optimizer_cpu_offload=true", f"{O}optimizer_offload_fraction={part}") for part in (0.5, 1.0)]
    slow = [term(each, "optimizer").seconds.likely for each in (step(), *hosted)]
    assert slow[0] < slow[1] < slow[2]


def test_full_groups_wait_for_the_slowest_stage(planned):
    """DeepSeek-V3 on eight uneven stages: (m + 7) / m of the time of the slowest of them."""
    from skyrl_megatron_observe.estimate.shared_tokens import PassRows
    from skyrl_megatron_observe.estimate.step_time import _Role

    cfg, models = planned(DEEPSEEK_V3, recipe="deepseek-v3")
    rows = PassRows.separate(np.full(512, 8192))
    role = _Role(models["policy"], h100())
    count, fullest = role.micro_batches(rows, training=True)
    stages = role.stages(rows)
    assert (count, fullest) == (128, 1.0) and len(stages) == 8
    assert role.forward(rows, training=True).bubbles == pytest.approx(135 / 128 * stages.max() / stages.mean() - 1)


def test_the_batch_of_an_engine_shrinks(planned):
    """Two slots: the third response begins when the first one has ended, and the last one is alone."""
    from skyrl_megatron_observe.estimate.engine_time import _begun

    responses = np.array([4, 10, 3, 5])
    assert _begun(responses, 2).tolist() == [0, 0, 4, 7]
    assert _begun(responses, 8).tolist() == [0, 0, 0, 0]
    long, even = np.full(2048, 500), np.full(2048, 1000)
    long[::64] = 7168
    cfg, models = planned(QWEN3_30B_A3B)
    from skyrl_megatron_observe.estimate.step_time import sampling_seconds

    prompts = np.full(2048, 100)
    taken = [sampling_seconds(cfg, models["policy"], h100(), prompts, rows, 80 * 10**9) for rows in (long, even)]
    assert long.sum() < even.sum() and taken[0].likely > 2 * taken[1].likely


def test_what_rollouts_sample_ahead_is_shared_by_the_steps(planned):
    """With a lag of eight, the long responses of a batch pass beside those of the next ones."""
    separate = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=true"]
    cfg, models = planned(QWEN3_30B_A3B, *separate, "trainer.train_batch_size=64", valid=False)
    ahead, took = cfg.trainer.fully_async, []
    ahead.enabled, ahead.num_parallel_generation_workers = True, 1000
    for ahead.max_staleness_steps in (1, 8):
        took.append(term(estimate(cfg, models), "decode").seconds.likely)
    assert took[1] < took[0]


@pytest.mark.parametrize("name", ["ERNIE-4.5-21B-A3B", "ERNIE-4.5-300B-A47B", "Hy3-preview", "MiniMax-M2"])
def test_experts_of_a_token_are_those_of_the_router(name):
    """ERNIE's config.json names them otherwise."""
    from bridges.plan import Plan
    from skyrl_megatron_observe.estimate.memory_parameters import ParameterTable

    plan = Plan.of(RELEASED_LATER[name])
    router = plan.family.megatron_config(plan.hf_config).transformer["moe_router_topk"]
    assert ParameterTable(plan).top_k == router > 1


def test_the_report_names_each_term_and_says_what_it_needs(planned):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.step_report import RunEstimate

    cfg, _ = planned(QWEN3_30B_A3B)
    unknown = "\n".join(RunEstimate.of(cfg, parameter_tables(cfg), Hardware(8, 2, elsewhere=True)).terms())
    assert "the type of the GPUs is unknown: add --gpu a100, " in unknown
    h100 = Hardware(8, 2, 80 * 10**9, gpu="H100", elsewhere=True)
    lines = [*RunEstimate.of(cfg, parameter_tables(cfg), h100).terms()]
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named[:2] == ["prefill", "decode"] and named[-3:] == ["sync", "data", "a"]
    assert "half of the limit" in lines[1] and "on H100" in lines[1]
    assert lines[-1].startswith("if every response has 7168 tokens: ")


def test_the_report_says_how_stale_batches_are(planned):
    """Engines that need far less time than training run as far ahead as they may."""
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.step_report import RunEstimate

    separate = ["trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=true"]
    cfg, _ = planned(QWEN3_30B_A3B, *separate, valid=False)
    ahead = cfg.trainer.fully_async
    ahead.enabled, ahead.max_staleness_steps, ahead.num_parallel_generation_workers = True, 3, 10_000
    h100 = Hardware(8, 2, 80 * 10**9, gpu="H100", elsewhere=True)
    lines = RunEstimate.of(cfg, parameter_tables(cfg), h100).terms()
    (line,) = (line for line in lines if line.startswith("  staleness"))
    assert line.split("   ")[-1] == (
        "trainer.fully_async.max_staleness_steps=3, num_parallel_generation_workers=10000"
    )
    assert "3.00 steps on average, at most 3" in line


def test_a_run_compares_its_second_step_alone(planned, tmp_path):
    """The callable that the trainer has, with the metrics of a step."""
    from skyrl_megatron_observe.estimate.step_report import StepComparison

    cfg, _ = planned(QWEN3_30B_A3B)
    said = []
    compare = StepComparison(cfg, said.append)
    metrics = {"timing/generate": 150.0, "timing/step": 300.0, "generate/avg_num_tokens": 3000.0}
    lengths = np.full(2048, 3500)
    assert compare(lengths, metrics, lambda: "H100") == {} and not said
    found = compare(lengths, metrics, lambda: "H100")
    assert compare(lengths, metrics, lambda: "H100") == {} and len(said) == 1
    assert found["estimate/step_low_s"] < found["estimate/step_s"] < found["estimate/step_high_s"]
    phases = [value for name, value in found.items() if not name.startswith("estimate/step")]
    assert sum(phases) == pytest.approx(found["estimate/step_s"])
    assert said[0].startswith("measured (on paper): generate 150 s (") and " · step 300 s (" in said[0]
    assert StepComparison(cfg, said.append)(lengths, metrics, lambda: "") == {}
