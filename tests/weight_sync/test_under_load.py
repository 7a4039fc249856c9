"""What ``tests/gpu`` proves with CUDA graphs, on CPU: weights that change under load, and a stale one that shows."""

import pytest

from tests.support.engines import tiny_settings
from tests.support.tiny_models import write_tiny_model
from tests.weight_sync import under_load

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]
KV_BYTES = 128 << 20


def test_weights_change_under_load_and_a_stale_one_shows(tmp_path):
    models = {name: write_tiny_model("qwen3_moe", tmp_path / name, seed) for name, seed in (("A", 0), ("B", 1))}
    with under_load.synced_engine(tiny_settings(models["A"]), models) as (engine, loop, sync):
        expected = under_load.baseline(engine, loop, sync, models, near=1e-5)
        under_load.change_weights_under_load(engine, loop, sync, expected, rounds=2)
        with pytest.raises(AssertionError, match=r"round 0: .* stale or torn"):
            fault = "two experts are swapped"
            under_load.change_weights_under_load(engine, loop, sync, expected, rounds=1, fault=fault)


def test_sleep_and_wake_with_changed_weights(tmp_path):
    """Over shared memory. What an engine's worker gives back to the system is its weights and its cache."""
    import psutil

    models = {
        name: write_tiny_model("qwen3_moe", tmp_path / name, seed, hidden_size=512, num_hidden_layers=4)
        for name, seed in (("A", 0), ("B", 1))
    }
    weights = (models["A"] / "model.safetensors").stat().st_size
    settings = tiny_settings(models["A"], sleep_mode=True, kv_cache_bytes=KV_BYTES)
    with under_load.synced_engine(settings, models, transport="ipc", shared_gpus=True) as (engine, loop, sync):
        expected = under_load.baseline(engine, loop, sync, models, near=1e-5)
        worker = psutil.Process(engine.process_ids()[-1])
        awake = worker.memory_info().rss
        loop(engine.sleep(2))
        asleep = worker.memory_info().rss
        print(f"weights {weights >> 20} MiB, cache {KV_BYTES >> 20} MiB, awake {awake >> 20}, asleep {asleep >> 20}")
        assert awake - asleep >= 0.9 * (weights + KV_BYTES)
        under_load.change_weights_asleep(engine, loop, sync, expected, rounds=3)
