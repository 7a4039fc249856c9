"""``skyrl-megatron evaluate`` as a command: engines and environments, and nothing else of a run."""

import json
import subprocess
import sys

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(2 * runs.TIMEOUT_S)]


def test_a_model_is_evaluated_without_places_for_ranks(tmp_path):
    """By ``python -m skyrl_megatron``; scores are printed and logged, answers are kept."""
    folder = runs.prepare(tmp_path)
    keys = {"environment__env_class": "gsm8k", "data__train_data": "[]"}
    command = [sys.executable, "-m", "skyrl_megatron", "evaluate", *runs.arguments(folder, **keys)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=runs.TIMEOUT_S, env=runs.environment(folder), check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = done.stdout.splitlines()
    assert any(line.startswith("placement: engines 1  ") for line in lines), lines
    assert not any(line.startswith("models: ") for line in lines)
    assert any(line.startswith("eval/all/avg_score 0.0") for line in lines), lines
    logged = [json.loads(line) for line in (folder / "logs/skyrl/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [0] and "eval/sums/avg_score" in logged[0]
    answers = (folder / "exports/dumped_evals/global_step_0/sums.jsonl").read_text().splitlines()
    assert len(answers) == 40
