"""New weights into a live engine: sent by another process, equal to a model that never was anything else."""

from __future__ import annotations

import pytest

from tests.support import forked
from tests.support.engines import LoopThread, largest_gap, reference_logprobs, tiny_settings
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm
TOKENS = [(7 * i + 3 * i * i) % 400 + 5 for i in range(64)]


def send_folder(connection, folder: str, bucket_bytes: int) -> None:
    """Body of a trainer process: connects, then sends the folder's tensors whenever it is told to."""
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron.weight_sync.sender import WeightSender
    from tests.support.state_source import StateSource

    torch.set_num_threads(1)
    sender = WeightSender(StateSource(load_file(f"{folder}/model.safetensors")), bucket_bytes=bucket_bytes)
    address = sender.listen("127.0.0.1")
    connection.send((address, list(sender.metadata())))
    sender.connect(*address, receivers=1, timeout_s=60)
    while connection.recv() == "send":
        connection.send(sender.send())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny_model("qwen3_moe", folder / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(models, loop):
    from skyrl_megatron.inference.vllm.engine import VLLMEngine

    engine = VLLMEngine(tiny_settings(models[0]))
    loop(engine.start(), 590)
    yield engine
    loop(engine.shutdown())


@pytest.fixture
def trainer(models):
    """A process that sends the second model, in buckets smaller than its largest tensor."""
    context = forked.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=send_folder, args=(theirs, str(models[1]), 1 << 17), daemon=True)
    process.start()
    yield ours
    ours.send("stop")
    process.join(10)
    process.kill()


def test_log_probs_are_those_of_transformers(engine, loop, models):
    sample = loop(
        engine.generate("one", TOKENS, {"max_tokens": 32, "temperature": 0.7, "seed": 1, "ignore_eos": True})
    )
    expected = reference_logprobs(models[0], TOKENS + sample.token_ids, temperature=0.7)[len(TOKENS) - 1 :]
    assert largest_gap(sample.logprobs, expected) <= 1e-5
    assert largest_gap(loop(engine.score(TOKENS)), reference_logprobs(models[0], TOKENS)) <= 1e-5
    assert sample.versions == [("initial", 0, 32)]


def test_update_from_another_process(engine, loop, models, trainer):
    assert trainer.poll(120)
    address, metadata = trainer.recv()
    options = {"bucket_bytes": 1 << 17, "timeout_s": 60.0}
    loop(engine.connect_weights([address], rank_offset=1, world_size=2, **options))
    for version in ("1", "2"):
        loop(engine.pause())
        loop(engine.start_update())
        trainer.send("send")
        received = loop(engine.receive_weights([metadata]))
        assert trainer.poll(60)
        assert received == [[trainer.recv()]]
        loop(engine.finish_update(version))
        loop(engine.resume())
        assert loop(engine.version()) == version
        assert largest_gap(loop(engine.score(TOKENS)), reference_logprobs(models[1], TOKENS)) <= 1e-5
