"""The ladder of ``tests/gpu`` where there is no GPU: bodies of its rungs with planted faults, and how it stops."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import training
from tests.support.resolve import misfits
from tests.training import bodies

LADDER = Path(__file__).parents[1] / "gpu"


@pytest.mark.process
@pytest.mark.parametrize("fault", [None, "swapped q/k norm"])
def test_layers(ranks, folder, batch, fault):
    """Rung 10: ours against ours; a mistake in one layer shows."""
    exact = ranks(1, bodies.one_backward, folder, batch, "local", {})[0]
    found = ranks(1, bodies.one_backward, folder, batch, "local", {}, fault)[0]
    if fault is None:
        bodies.check_as_near(found, exact, exact)
    else:
        with pytest.raises(AssertionError, match="are off"):
            bodies.check_as_near(found, exact, exact)


@pytest.mark.process
@pytest.mark.parametrize("fault", [None, "gate and up swapped"])
def test_adapters(ranks, folder, batch, fault):
    """Rung 25."""
    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.lora import bodies as adapters
    from tests.lora import reference

    factors = reference.start_factors(read_hf_model(folder).plan, separate=False)
    exact = ranks(1, adapters.one_backward, folder, batch, factors, "local", {})[0]
    found = ranks(1, adapters.one_backward, folder, batch, factors, "local", {}, fault)[0]
    if fault is None:
        bodies.check_as_near(found, exact, exact)
    else:
        with pytest.raises(AssertionError, match="are off"):
            bodies.check_as_near(found, exact, exact)


@pytest.mark.process
def test_offload(ranks, folder, batch):
    """Rung 30."""
    ranks(1, bodies.leaves_and_comes_back, folder, batch, {})
    with pytest.raises(AssertionError, match="weights of before"):
        ranks(1, bodies.leaves_and_comes_back, folder, batch, {}, "replaced weights")
    with pytest.raises(AssertionError, match="not what left"):
        ranks(1, bodies.leaves_and_comes_back, folder, batch, {}, "lost moments")


@pytest.mark.process
def test_checkpoint(ranks, tmp_path):
    """Rung 40."""
    folder, root = training.save_model(tmp_path / "model"), str(tmp_path / "run")
    saved = ranks(1, training.saved, folder, root, {})[0]
    assert len(saved) > 40
    for stepped in (False, True):
        assert ranks(1, training.loaded, folder, root, {}, stepped=stepped)[0] == saved
    assert ranks(1, training.loaded, folder, root, {}, "moments go elsewhere")[0] != saved


@pytest.mark.process
def test_engines(tmp_path):
    """Rung 60, with the engine of machines without vLLM: changed under load, asleep, and a mistake in what is sent."""
    from tests.gpu.generate_engine import GenerateEngine
    from tests.support.engines import largest_gap, reference_logprobs, tiny_settings
    from tests.support.tiny_models import write_tiny_model
    from tests.weight_sync import under_load

    models = {name: write_tiny_model("qwen3_moe", tmp_path / name, seed) for name, seed in (("A", 0), ("B", 1))}
    settings = tiny_settings(models["A"], sleep_mode=True)
    options = dict(transport="ipc", kind=GenerateEngine)
    with under_load.synced_engine(settings, models, **options) as (engine, loop, sync):
        expected = under_load.baseline(engine, loop, sync, models, near=1e-4)
        sample = loop(engine.generate("sampled", under_load.TOKENS[:20], under_load.SAMPLING | {"temperature": 0.7}))
        tokens = under_load.TOKENS[:20] + sample.token_ids
        assert largest_gap(sample.logprobs, reference_logprobs(models["A"], tokens, 0.7)[19:]) < 1e-4
        under_load.change_weights_under_load(engine, loop, sync, expected, rounds=2, requests=4)
        with pytest.raises(AssertionError, match="stale or torn"):
            under_load.change_weights_under_load(
                engine, loop, sync, expected, rounds=1, requests=2, fault="two experts are swapped"
            )
    with under_load.synced_engine(settings, models, shared_gpus=True, **options) as (engine, loop, sync):
        under_load.baseline(engine, loop, sync, models, near=1e-4)
        under_load.change_weights_asleep(engine, loop, sync, expected, rounds=2)
        loop(engine.sleep(2))
        assert not any(parameter.untyped_storage().nbytes() for parameter in engine._model.parameters())


def test_every_rung_says_what_it_proves_and_what_to_report():
    rungs = sorted(LADDER.glob("test_*.py"))
    assert [int(rung.stem.split("_")[1]) for rung in rungs] == sorted({int(r.stem.split("_")[1]) for r in rungs})
    for rung in rungs:
        names = {
            t.id for node in ast.parse(rung.read_text()).body if isinstance(node, ast.Assign) for t in node.targets
        }
        assert {"PROVES", "REPORT"} <= names, rung.name


@pytest.mark.parametrize("rung", sorted(LADDER.glob("*.py")), ids=lambda path: path.stem)
def test_rungs_name_what_there_is(rung):
    """Imports, attributes and arguments; those of Transformer Engine are looked at by ``tests/te``."""
    assert misfits(rung.read_text(), without=("transformer_engine", "vllm")) == []


def test_settings_of_rungs_are_valid_on_one_gpu(tmp_path):
    """Those of the optimizers (rungs 30 and 40), of the engine (60) and of the run (90)."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.validate import find_problems
    from tests.gpu import test_30_offload, test_60_engines, test_90_run
    from tests.job import runs

    one_gpu = Hardware(1, 1)
    optimizers = [{"trainer.bf16": True} | options for options in test_30_offload.OPTIONS.values()]
    keys = [SkyRLTrainConfig.from_cli_overrides({"trainer.logger": "console"} | options) for options in optimizers]
    run = runs.arguments(runs.prepare(tmp_path), **test_90_run.SHARED, trainer__placement__colocate_all="true")
    keys.append(SkyRLTrainConfig.from_cli_overrides(run))
    assert [find_problems(cfg, one_gpu) for cfg in keys] == [[]] * len(keys)
    engine = test_60_engines.settings({"A": tmp_path}, sleep_mode=True)
    assert engine.sleep_mode and not engine.enforce_eager


def test_a_name_or_an_argument_that_there_is_not_shows():
    text = "from tests.training import bodies\nfrom tests.training import no_such\n"
    text += "bodies.three_step\nbodies.check([])\nranks(1, bodies.one_backward, 1, 2, 3)\n"
    text += "ranks(1, bodies.one_backward, 1, 2, 3, {}, faults=1, timeout_s=3)\nbodies.config(1, *two, pp=3)\n"
    found = misfits(text)
    words = ("no_such", "three_step does not exist", "'expected'", "'overrides'", "'faults'")
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True)), found


@pytest.mark.process
def test_the_first_failure_ends_the_climb(tmp_path):
    shutil.copy(LADDER / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "gpus.py").write_text("from skyrl_megatron import device\ndevice.driver_gpu_count = lambda: 1\n")
    for number, body in ((30, "assert True"), (0, "assert True"), (10, "assert False"), (20, "assert True")):
        rung = f"PROVES = 'what {number} proves'\nREPORT = 'what {number} says'\ndef test_{number}():\n    {body}\n"
        (tmp_path / f"test_{number:02}_rung.py").write_text(rung)
    command = [sys.executable, "-m", "pytest", "-p", "gpus", "-p", "no:cacheprovider", "-q", "-rs", str(tmp_path)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert "1 failed, 1 passed, 2 skipped" in run.stdout, run.stdout + run.stderr
    assert "the climb ended at test_10_rung" in run.stdout and "It proves: what 10 proves" in run.stdout
    assert "what 10 says" in run.stdout and "test_10_rung failed" in run.stdout


def test_processes_are_forked_without_vllm(monkeypatch):
    """Rung 90 without vLLM: the fork server of a run imports what ranks need alone."""
    from skyrl_megatron.inference.vllm import processes

    monkeypatch.setattr(processes, "IMPORTED", ["vllm.no_such_module"])
    monkeypatch.setattr(processes, "find_spec", lambda name: name)  # installed
    with pytest.raises(ModuleNotFoundError):
        processes.import_all()
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    processes.import_all()
