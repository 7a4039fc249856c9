"""What vLLM does in CUDA runs and data-parallel engines, as far as it runs without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.tiny_models import write_tiny_model


@pytest.mark.process
@pytest.mark.vllm
def test_log_probs_of_the_second_model_runner(tmp_path):
    """After the temperature, before top-p, top-k, min-p and penalties; exact for greedy and plain requests as well.

    The runner's own sampler, on CPU: its kernels are interpreted. Without our change it takes them of the raw logits.
    """
    model = write_tiny_model("qwen3_moe", tmp_path / "model", 0)
    command = [sys.executable, "-m", "tests.inference.v2_sampler", str(model)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["by default"] is True, "the default CUDA runner is another one"
    assert found["the runner's"] is True, "the runner constructs another sampler"
    assert max(found["errors"]) < 1e-6, found["errors"]
    raw = [error > 0.1 for error in found["plain"]]
    assert raw == [True, True, False, False, True, True], found["plain"]  # those at another temperature than 1


@pytest.mark.vllm
def test_every_worker_of_a_data_parallel_engine_is_asked():
    """vLLM's client for several engine cores, real but for the way to them: it would return what the first said."""
    import asyncio
    from types import SimpleNamespace

    from vllm.v1.engine.core_client import DPAsyncMPClient

    from skyrl_megatron.inference.vllm import compat

    client = DPAsyncMPClient.__new__(DPAsyncMPClient)
    client.core_engines, client.core_engine = [b"0", b"1"], b"0"

    async def call(method, *args, engine):
        assert (method, args[0], args[2]) == ("collective_rpc", "skyrl_call", ("skyrl_checksums",))
        return [(engine != refuses, f"{engine.decode()}.{worker}") for worker in (0, 1)]

    client._call_utility_async = call
    refuses = None
    answers = asyncio.run(compat.on_every_worker(SimpleNamespace(engine_core=client), "skyrl_checksums"))
    assert answers == ["0.0", "0.1", "1.0", "1.1"]
    refuses = b"1"
    with pytest.raises(RuntimeError, match=r"worker 2: 1\.0"):
        asyncio.run(compat.on_every_worker(SimpleNamespace(engine_core=client), "skyrl_checksums"))


def test_what_depends_on_the_node_is_decided_there(tmp_path, monkeypatch):
    """A driver without GPUs makes the settings of engines with them, and the other way round."""
    from skyrl_megatron import device
    from skyrl_megatron.inference.vllm.settings import EngineSettings

    model = write_tiny_model("qwen3_moe", tmp_path / "model", 0)
    made = EngineSettings(str(model), dtype="float32", max_model_len=64, max_num_seqs=4, sleep_mode=True)
    on_cpu = made.on_this_node()
    # at least four sequences of 64 tokens in four layers, keys and values of two heads of 32, four bytes each
    assert on_cpu.kv_cache_bytes >= 4 * 64 * 4 * 2 * 2 * 32 * 4 and on_cpu.sleep_mode
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert made.on_this_node() == made


@pytest.mark.process
@pytest.mark.vllm
def test_engines_of_exact_rollouts_do_not_depend_on_the_batch(monkeypatch):
    """vLLM reads the variable before its kernels are imported."""
    from skyrl_megatron import device
    from skyrl_megatron.inference.vllm.settings import worker_environment

    assert "VLLM_BATCH_INVARIANT" not in worker_environment(exact=True)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert "VLLM_BATCH_INVARIANT" not in worker_environment()
    variables = os.environ | worker_environment(exact=True)
    reads = "from vllm.lora.ops.triton_ops.utils import is_batch_invariant; print('read:', is_batch_invariant)"
    command = [sys.executable, "-c", reads]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert "read: True" in run.stdout, run.stdout + run.stderr
