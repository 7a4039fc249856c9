"""What ``tests/gpu`` proves with CUDA graphs, on CPU: weights that change under load, and a stale one that shows."""

import pytest

from tests.support.engines import tiny_settings
from tests.support.tiny_models import write_tiny_model
from tests.weight_sync import under_load

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def test_weights_change_under_load_and_a_stale_one_shows(tmp_path):
    models = {name: write_tiny_model("qwen3_moe", tmp_path / name, seed) for name, seed in (("A", 0), ("B", 1))}
    with under_load.synced_engine(tiny_settings(models["A"]), models) as (engine, loop, sync):
        expected = under_load.baseline(engine, loop, sync, models, near=1e-5)
        under_load.change_weights_under_load(engine, loop, sync, expected, rounds=2)
        with pytest.raises(AssertionError, match=r"round 0: .* stale or torn"):
            fault = "two experts are swapped"
            under_load.change_weights_under_load(engine, loop, sync, expected, rounds=1, fault=fault)
