"""The command that says why trainer and engine disagree, on a run whose record is wrong in another way each step."""

import json
import subprocess
import sys

import pytest

from tests.job import mismatch_run, runs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = runs.prepare(tmp_path_factory.mktemp("run"))
    (folder / "faulty.py").write_text(mismatch_run.FAULTY)
    runs.run(folder, mismatch_run.FAULTS, **mismatch_run.RUN).check()
    return folder


def explain(folder, run, *steps, program=("-m", "skyrl_megatron")):
    """What the command says of each step: printed, and for programs."""
    command = [sys.executable, *program, "explain-mismatch", str(run), "--step", *map(str, steps)]
    command += ["--json", str(run / "found.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=runs.environment(folder), timeout=runs.TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.partition("step ")[2].split("\nstep "), json.loads((run / "found.json").read_text())


def test_what_is_wrong_with_the_record(folder):
    """Experts of others, a support that was lost, samples of another version; and nothing."""
    told, (routes, support, version, nothing) = explain(folder, folder / "logs/skyrl/run", 1, 2, 3, 4)
    assert [each["cause"] for each in (routes, support, version, nothing)] == [
        "routes",
        "sampling support",
        "stale version",
        "none",
    ]
    assert routes["place"]["where"] == "layer 0, mlp" and routes["place"]["token"] == 0
    assert routes["recorded_routes"]["share"] == 1.0 and routes["natural_routes"]["share"] < 0.01
    assert support["place"]["where"] == "the softmax" and support["recorded_routes"]["share"] < 0.01
    assert version["place"] is None and min(version["versions"], key=lambda v: version["versions"][v]["mean"]) == "1"
    assert version["sampled_by"] == ["1"] and version["wanted"] == version["loaded"] == 2
    for text, found in zip(told, (routes, support, version, nothing), strict=True):
        assert f"cause: {found['cause']}" in text and len(text.splitlines()) < 30


def test_an_engine_of_another_precision(folder):
    """The record is of an engine in fp32, the one that is configured now computes in bf16."""
    run = mismatch_run.other_config(folder, "bf16", "model_dtype: float32", "model_dtype: bfloat16")
    (text,), (found,) = explain(folder, run, 4)
    assert found["cause"] == "precision" and found["dtypes"] == ["bfloat16", "float32"], text
    assert found["place"]["where"] == "the first layer's input", "where the weights are rounded"


def test_an_engine_with_a_wrong_weight(folder):
    """Its loader makes another tensor of one that arrived whole: layer, part and tensor are named."""
    planted, run = mismatch_run.planted(folder, "Altered")
    (text,), (found,) = explain(folder, run, 4, program=planted)
    assert found["cause"] == "wrong weight" and found["place"]["where"] == "layer 1, attention", text
    assert [line.split()[0] for line in found["tensors"]] == [mismatch_run.ALTERED]
    assert found["probe"] is not None and "differ from the trainer's" in found["probe"]
