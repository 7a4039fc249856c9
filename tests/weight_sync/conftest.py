"""Two models of one shape, a trainer process that sends either, and a sync into the engines of a module's ``pool``."""

from __future__ import annotations

import json

import pytest

from tests.weight_sync.trainer_process import BUCKET_BYTES, TrainerProcess


@pytest.fixture(scope="module")
def models(tiny_moe):
    """Two models of the same shape, A and B."""
    return tiny_moe


@pytest.fixture(scope="module")
def loop(engine_loop):
    return engine_loop


@pytest.fixture(scope="module")
def trainer():
    trainer = TrainerProcess()
    yield trainer
    trainer.close()


@pytest.fixture
def sync(pool, trainer, models, loop):
    """``sync(version, model, fault=…)`` → report; by reshard plan unless ``reshard=False``."""
    from skyrl_megatron.workers.weight_synchronizer import WeightSynchronizer

    def sync(version, model, fault=None, **options):
        trainer.load(models[model], fault)
        config = json.loads((models[model] / "config.json").read_text())
        options = {"phase_s": 60.0, "deadline_s": 400.0, "bucket_sizes": (BUCKET_BYTES,), "reshard": True, **options}
        synchronizer = WeightSynchronizer(pool, [trainer], hf_config=config, dtype="float32", **options)
        report = loop(synchronizer.sync(version), 500)
        assert (synchronizer.plan is not None) == options["reshard"]
        return report

    return sync
