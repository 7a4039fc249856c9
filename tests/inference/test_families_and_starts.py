"""Engines of every family against transformers, engines that cannot start, and what we rely on in vLLM."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import LoopThread, largest_gap, reference_logprobs, tiny_settings
from tests.support.processes import left_behind
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(48)]


@pytest.fixture(scope="module")
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


def failing(loop, settings):
    """The error of an engine that cannot start; it leaves no process behind."""
    import psutil

    from skyrl_megatron.errors import EngineError
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    helpers = (
        "resource_tracker",
        "forkserver",
        "fork_server",
    )  # these stay; what the fork server forks is not our child
    with pytest.raises(EngineError) as caught:
        loop(VLLMEngine(settings).start(), 590)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    left = [p for p in left if p.ppid() != os.getpid() or not any(h in " ".join(p.cmdline()) for h in helpers)]
    assert not left, left
    return str(caught.value)


WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
IGNORED = [
    ("gpt_oss", {"swiglu_limit": 0.5}),
    ("gpt_oss", {"layer_types": WINDOWS, "sliding_window": 16}),
    ("gpt_oss", {"rms_norm_eps": 1e-1}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"rms_norm_eps": 1e-1}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16, "layer_types": WINDOWS, "max_window_layers": 0}),
]


@pytest.mark.full_matrix
@pytest.mark.parametrize(("family", "changes"), IGNORED, ids=str)
def test_values_that_are_refused_are_those_that_vllm_ignores(family, changes, loop, tmp_path):
    """``preflight/engine_models.py``: with such a value vLLM is another model than transformers, or does not start."""
    from bridges.families import get_family
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron_observe.preflight.engine_models import engine_model_faults

    model = write_tiny_model(family, tmp_path, **changes)
    written = json.loads((model / "config.json").read_text())
    assert len(list(engine_model_faults(family, get_family(family).config(written), written))) == 1
    engine = VLLMEngine(tiny_settings(model))
    try:
        loop(engine.start(), 590)
        gap = largest_gap(loop(engine.score(TOKENS)), reference_logprobs(model, TOKENS))
    except EngineError:
        return
    finally:
        loop(engine.shutdown())
    print(f"{family} {changes}: {gap:.3g}")
    assert gap > 1e-3


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "mixtral",
        "olmoe",
        "deepseek_v3",
        "gpt_oss",
        "minimax_m2",
        "ernie4_5_moe",
        "glm4_moe_lite",
        "hy_v3",
        "qwen3_next",
        "qwen3_5_moe_text",
    ],
)
def test_log_probs_are_those_of_transformers(family, loop, tmp_path):
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    model = write_tiny_model(family, tmp_path)
    engine = VLLMEngine(tiny_settings(model))
    loop(engine.start(), 590)
    try:
        assert largest_gap(loop(engine.score(TOKENS)), reference_logprobs(model, TOKENS)) <= 1e-5
        sampling = {"max_tokens": 24, "temperature": 0.7, "seed": 1, "ignore_eos": True}
        sample = loop(engine.generate("one", TOKENS, sampling))
        expected = reference_logprobs(model, TOKENS + sample.token_ids, temperature=0.7)[len(TOKENS) - 1 :]
        assert largest_gap(sample.logprobs, expected) <= 1e-5
    finally:
        loop(engine.shutdown())


@pytest.mark.full_matrix
def test_changes_reach_the_language_model_of_a_model_of_text_and_images(loop, tmp_path):
    import json

    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    model = write_tiny_model("qwen3_5_moe", tmp_path / "model")
    engine = VLLMEngine(tiny_settings(model, rope={"rope_theta": 50.0}, model_changes={"rms_norm_eps": 0.01}))
    loop(engine.start(), 590)
    try:
        found = loop(engine.score(TOKENS))
    finally:
        loop(engine.shutdown())
    plain = reference_logprobs(model, TOKENS)
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rms_norm_eps"] = 0.01
    config["text_config"]["rope_parameters"]["rope_theta"] = 50.0
    path.write_text(json.dumps(config))
    assert largest_gap(found, reference_logprobs(model, TOKENS)) <= 1e-5 < 1e-2 < largest_gap(found, plain)


@pytest.mark.full_matrix
@pytest.mark.parametrize("cached", [True, False])
def test_states_of_gated_delta_nets(cached, loop, tmp_path):
    """Prompts in chunks, behind cached prefixes, and in places that aborted requests have left."""
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine

    model = write_tiny_model("qwen3_next", tmp_path)
    engine = VLLMEngine(tiny_settings(model, enable_prefix_caching=cached, max_num_batched_tokens=128, max_num_seqs=4))
    shared = [(11 * i + 5 * i * i) % 400 + 5 for i in range(290)]
    prompts = [[*shared[: 290 - 7 * i], 20 + i] for i in range(6)]
    # No seed: on CPU vLLM cannot turn back the generator of a request whose prompt is not yet through.
    sampling = {"max_tokens": 12, "temperature": 0.7, "ignore_eos": True}

    async def ask(round_):
        gone = [
            asyncio.create_task(engine.generate(f"{round_} gone {i}", prompts[i], sampling | {"max_tokens": 200}))
            for i in range(3)
        ]
        await asyncio.sleep(0.5)
        for i in range(3):
            await engine.abort(f"{round_} gone {i}")
        aborted = await asyncio.gather(*gone)
        kept = [engine.generate(f"{round_} {i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        return aborted, await asyncio.gather(*kept)

    loop(engine.start(), 590)
    try:
        for round_ in range(2):
            aborted, kept = loop(ask(round_))
            assert any(0 < len(sample.token_ids) < 200 for sample in aborted)
            for prompt, sample in [*zip(prompts, aborted, strict=False), *zip(prompts, kept, strict=True)]:
                if sample.token_ids:
                    expected = reference_logprobs(model, prompt + sample.token_ids, 0.7)[len(prompt) - 1 :]
                    assert largest_gap(sample.logprobs, expected) <= 1e-4
    finally:
        loop(engine.shutdown())


def test_an_engine_that_fails_at_start_says_why(loop, tmp_path):
    model = write_tiny_model("qwen3_moe", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))  # not what the weights are
    error = failing(loop, tiny_settings(model))
    assert str(model) in error and "vLLM did not start" in error
    assert "size" in error or "shape" in error, error  # vLLM's own words


ENGINE = """
import asyncio, sys
from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
from tests.support.engines import tiny_settings

async def work():
    engine = VLLMEngine(tiny_settings(sys.argv[1]))
    await engine.start()
    print(*engine.process_ids(), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(work())
"""


def test_engine_processes_end_with_their_owner_however_it_ends(tmp_path):
    """An engine without Ray, whose process is killed."""
    import psutil

    model = write_tiny_model("qwen3_moe", tmp_path)
    (tmp_path / "owner.py").write_text(ENGINE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "owner.py"), str(model)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert owner.stdout is not None
    said = next((line for line in owner.stdout if line.replace(" ", "").strip().isdigit()), "")
    started = [psutil.Process(int(number)) for number in said.split()]
    everything = psutil.Process(owner.pid).children(recursive=True)
    assert len(started) == 2 and set(started) <= set(everything)
    owner.kill()
    owner.wait(10)
    assert not left_behind(everything)


def test_too_little_memory_is_said_before_anything_starts(loop, tmp_path):
    model = write_tiny_model("qwen3_moe", tmp_path)
    error = failing(loop, tiny_settings(model, kv_cache_bytes=1 << 50))
    assert "GiB" in error and "memory" in error


def test_a_missing_model_folder_is_named(loop, tmp_path):
    assert str(tmp_path / "nowhere") in failing(loop, tiny_settings(tmp_path / "nowhere"))


def test_what_is_relied_on_in_vllm():
    """Names and parameters that the compatibility file uses; a release that changes them fails here first."""
    import torch
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.sample.sampler import Sampler

    from skyrl_megatron.inference.vllm import compat

    packs = compat.UnquantizedFusedMoEMethod._setup_kernel
    original = getattr(packs, "packs_once", packs)
    assert list(inspect.signature(original).parameters)[:2] == ["self", "layer"]
    assert {"w13", "w2"} <= set(inspect.signature(original).parameters)
    assert UnquantizedFusedMoEMethod is compat.UnquantizedFusedMoEMethod
    router = CPURouter(2, 8, scoring_func="sigmoid", e_score_correction_bias=torch.zeros(8))
    assert (router.use_grouped_topk, router.num_expert_group, router.topk_group) == (True, 1, 1)
    assert "busy_loop_s" in inspect.signature(SpinCondition).parameters
    assert {"logits", "sampling_metadata"} <= set(inspect.signature(Sampler.forward).parameters)
    for method in (
        "add_request abort resume_generation collective_rpc update_weights start_weight_update "
        "finish_weight_update init_weight_transfer_engine update_weight_version reset_prefix_cache sleep wake_up "
        "check_health shutdown"
    ).split():
        assert callable(getattr(AsyncLLM, method, None)), method
    assert {"mode", "clear_cache"} <= set(inspect.signature(AsyncMPClient.pause_scheduler_async).parameters)
