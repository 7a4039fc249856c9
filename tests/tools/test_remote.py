"""An engine started elsewhere: a real vLLM server, sampled from, updated, and refused when a flag is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.engines import LoopThread, largest_gap, reference_logprobs
from tests.support.rank_pool import free_port
from tests.support.tiny_models import write_tiny_model
from tests.weight_sync.trainer_process import BUCKET_BYTES, TrainerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
ROOT = Path(__file__).resolve().parents[2]
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(40)]
NEEDED = [
    "--enable-scale-out",
    "--logprobs-mode=processed_logprobs",
    "--worker-extension-cls=skyrl_megatron.inference.vllm.compat.WorkerExtension",
    '--weight-transfer-config={"backend":"skyrl_megatron"}',
    "--generation-config=vllm",
]
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}
"""As in the ``generation_config.json`` of released folders."""


@contextlib.contextmanager
def server(model: Path, log: Path, flags: list[str], **environment: str):
    """URL of a vLLM server on a port of its own."""
    from skyrl_megatron.inference.vllm.settings import worker_environment

    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--host=127.0.0.1", "--dtype=float32", "--max-model-len=256", "--max-num-seqs=16", "--enforce-eager"]
    command += [f"--kv-cache-memory-bytes={64 << 20}", "--distributed-executor-backend=mp", *flags]
    env = {**os.environ, **worker_environment(), "PYTHONPATH": str(ROOT), **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def set_defaults(model: Path) -> None:
    """Give the folder sampling defaults, which a server without ``--generation-config vllm`` takes on."""
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | DEFAULTS))


def server_processes(url: str):
    import psutil

    port = url.rpartition(":")[2]
    [main] = [p for p in psutil.Process().children() if f"--port={port}" in p.cmdline()]
    return main.children(recursive=True)


@pytest.fixture(scope="module")
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


def test_a_server_is_sampled_from_and_updated(loop, tmp_path):
    from skyrl_megatron.inference.client import InferenceClient
    from skyrl_megatron.inference.engine_pool import EnginePool
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer
    from skyrl_megatron_tools.remote.remote_engine import RemoteEngine

    models = [write_tiny_model("qwen3_moe", tmp_path / str(seed), seed) for seed in (0, 1)]
    set_defaults(models[0])
    trainer = TrainerProcess()
    sampling = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "ignore_eos": True}

    async def made():
        return EnginePool([lambda: RemoteEngine(url)])

    with server(models[0], tmp_path / "server.log", NEEDED, VLLM_SERVER_DEV_MODE="1") as url:
        pool = loop(made())
        loop(pool.start())
        client = InferenceClient(pool)
        trainer.load(models[1])
        config = json.loads((models[1] / "config.json").read_text())
        options = dict(hf_config=config, dtype="float32", bucket_sizes=(BUCKET_BYTES,), phase_s=60.0)
        for model, version in ((models[0], None), (models[1], "7")):
            if version is not None:
                report = loop(WeightSynchronizer(pool, [trainer], **options).sync(version))
                assert not report.failures and report.logprob_diffs["engine 0"].largest <= 1e-4
            sample = loop(client.sample(TOKENS, sampling))
            expected = reference_logprobs(model, TOKENS + sample.token_ids, temperature=0.8)[len(TOKENS) - 1 :]
            assert largest_gap(sample.logprobs, expected) <= 1e-5
            assert largest_gap(loop(client.score(TOKENS)), reference_logprobs(model, TOKENS)) <= 1e-5
        assert loop(pool.slots[0].engine.version()) == "7"
        assert sample.versions and {version for version, _, _ in sample.versions} == {"7"}
        loop(lose_a_worker(pool, client, url))
        loop(pool.shutdown())
    trainer.close()


async def lose_a_worker(pool, client, url):
    """A server whose engine died answers with server errors and ends: the engine is lost, not the run."""
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron.inference.client import HealthMonitor

    [slot] = pool.slots
    monitor = HealthMonitor(pool, timeout_s=30)
    await monitor.check()
    assert slot.state.value == "serving"
    work = asyncio.create_task(client.sample(TOKENS, {"max_tokens": 200, "ignore_eos": True}))
    await asyncio.sleep(0.1)
    [worker] = [p for p in server_processes(url) if "Worker" in p.name() or "Worker" in " ".join(p.cmdline())]
    worker.kill()
    pool.wait_s = 1.0
    with pytest.raises(EngineError, match=r"no engine served within 1 s: engine 0 paused .*lost a request"):
        await work
    await monitor.check()
    assert slot.state.value == "dead" and f"no vLLM server at {url}" in slot.why


@pytest.mark.parametrize(
    "flags, environment, missing",
    [
        (NEEDED, {}, "VLLM_SERVER_DEV_MODE=1"),
        (NEEDED[1:], {"VLLM_SERVER_DEV_MODE": "1"}, "--enable-scale-out"),
        ([NEEDED[0], *NEEDED[2:]], {"VLLM_SERVER_DEV_MODE": "1"}, "--logprobs-mode processed_logprobs"),
        (NEEDED[:-1], {"VLLM_SERVER_DEV_MODE": "1"}, "--generation-config vllm"),
    ],
    ids=["dev mode", "scale out", "log-probs", "sampling defaults"],
)
def test_a_server_without_a_flag_is_refused(loop, tmp_path, flags, environment, missing):
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron_tools.remote.remote_engine import RemoteEngine

    async def start(url):
        await RemoteEngine(url).start()

    model = write_tiny_model("qwen3_moe", tmp_path / "model")
    set_defaults(model)
    with server(model, tmp_path / "server.log", flags, **environment) as url:
        with pytest.raises(EngineError) as caught:
            loop(start(url))
        assert missing in str(caught.value) and url in str(caught.value)
        if "generation-config" in missing:
            assert "has sampling defaults temperature=0.7, top_p=0.95, top_k=20: start it" in str(caught.value)


def test_no_server_is_one_clear_error(loop):
    from skyrl_megatron.errors import EngineError
    from skyrl_megatron_tools.remote.remote_engine import RemoteEngine

    async def start():
        await RemoteEngine(f"127.0.0.1:{free_port()}").start()

    with pytest.raises(EngineError, match=r"no vLLM server at http://127\.0\.0\.1"):
        loop(start())


def test_a_server_teaches(tmp_path):
    """Log-probs of prompts, and of the likeliest tokens, from a plain vLLM server, against transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from skyrl_megatron_tools.remote.remote_teacher import RemoteTeacher

    model, k = write_tiny_model("qwen3_moe", tmp_path / "model", 0), 4
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    every = logits.log_softmax(-1)[:-1]
    with server(model, tmp_path / "server.log", [f"--max-logprobs={k}"]) as url:
        scores, tail = asyncio.run(RemoteTeacher(url).score([TOKENS, TOKENS], [1, 30], k))
    assert scores.shape == (len(TOKENS) - 1, 1 + 2 * k) and abs(scores[29:] - tail).max() <= 1e-5
    best = every.topk(k, -1)
    assert largest_gap(scores[:, 0], every.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()) <= 1e-5
    assert abs(scores[:, 1 : 1 + k] - best.values.numpy()).max() <= 1e-5
    assert (scores[:, 1 + k :] == best.indices.numpy()).all()
