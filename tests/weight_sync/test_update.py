"""New weights into a live engine: sent by another process, equal to a model that never was anything else."""

from __future__ import annotations

import pytest

from tests.support import forked
from tests.support.engines import PROBE as TOKENS
from tests.support.engines import largest_gap, reference_logprobs, tiny_settings

pytestmark = [pytest.mark.vllm, pytest.mark.engines("tiny_moe")]


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


@pytest.fixture
def engine(engines, models):
    with engines.pool(tiny_settings(models["A"])) as pool:
        yield pool.slots[0].engine


@pytest.fixture
def trainer(models):
    """A process that sends the second model, in buckets smaller than its largest tensor."""
    context = forked.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=send_folder, args=(theirs, str(models["B"]), 1 << 17), daemon=True)
    process.start()
    yield ours
    ours.send("stop")
    process.join(10)
    process.kill()


def test_log_probs_are_those_of_transformers(engine, loop, models):
    sample = loop(
        engine.generate("one", TOKENS, {"max_tokens": 32, "temperature": 0.7, "seed": 1, "ignore_eos": True})
    )
    expected = reference_logprobs(models["A"], TOKENS + sample.token_ids, temperature=0.7)[len(TOKENS) - 1 :]
    assert largest_gap(sample.logprobs, expected) <= 1e-5
    assert largest_gap(loop(engine.score(TOKENS)), reference_logprobs(models["A"], TOKENS)) <= 1e-5
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
        assert largest_gap(loop(engine.score(TOKENS)), reference_logprobs(models["B"], TOKENS)) <= 1e-5
