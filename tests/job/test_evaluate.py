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
    rows = folder / "exports/dumped_evals/global_step_0"
    assert len((rows / "sums.jsonl").read_text().splitlines()) == 40 and f"rows: {rows}" in lines


SETS = "{short: {data: [PROMPTS], n: 4, temperature: 0.8, pass_at: [1, 2, 4], majority_at: [4], group_by: parity}}"


def command(folder, verb, **keys):
    """A command with the environment of the tests, by a plugin; its ends, without what a busy machine adds."""
    given = runs.arguments(folder, trainer__plugins="[plugin]", **keys)
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_megatron", verb, *given],
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
        env=runs.environment(folder),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def scores(folder, step):
    """The last logged scores of a step."""
    lines = [json.loads(line) for line in (folder / "logs/skyrl/run/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["step"] == step][-1]
    return {name: value for name, value in logged.items() if name.startswith("eval/")}


@pytest.mark.full_matrix
def test_a_metric_ends_a_run_and_its_models_have_the_same_scores(tmp_path):
    """The run ends at the first evaluation that fits, with checkpoint and export; the same command has nothing left to
    do; export and checkpoint are evaluated with the numbers of the run, whose lines stay."""
    folder = runs.prepare(tmp_path)
    (folder / "plugin.py").write_text(
        "from skyrl_megatron.envs import register\nregister('digits', 'digits:Digits')\n"
    )
    rows = [json.loads(line) | {"parity": str(n % 2)} for n, line in enumerate(open(folder / "prompts.jsonl"))]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    keys = {
        "data__eval_sets": SETS.replace("PROMPTS", str(folder / "held_out.jsonl")),
        "trainer__stop_when": "eval/short/pass_at_4 >= 0",
        "trainer__best_metric": "eval/short/avg_score",
        "trainer__max_training_steps": 5,
        "trainer__eval_interval": 2,
        "trainer__hf_save_interval": 4,
        "trainer__max_ckpts_to_keep": 1,
    }
    told = command(folder, "train", **keys)
    assert "ended after step 2 of 5: trainer.stop_when='eval/short/pass_at_4 >= 0' (eval/short/pass_at_4 is " in told
    found = scores(folder, 2)
    of_set = [
        "avg_score",
        "majority_at_4",
        "mean_positive_reward",
        "pass_at_1",
        "pass_at_2",
        "pass_at_4",
        "num_failed",
    ]
    names = {f"eval/short{group}/{name}" for group in ("", "/0", "/1") for name in of_set}
    assert names <= set(found) and "eval/sums/avg_score" in found
    assert found["eval/short/pass_at_1"] <= found["eval/short/pass_at_2"] <= found["eval/short/pass_at_4"]
    assert found["eval/short/pass_at_4"] == (found["eval/short/0/pass_at_4"] + found["eval/short/1/pass_at_4"]) / 2
    best = json.loads((folder / "ckpts/best_ckpt.json").read_text())
    assert (best["step"], best["value"]) == (2, found["eval/short/avg_score"])
    again = command(folder, "train", **keys)
    assert "nothing left to do: the checkpoint of step 2 of 5 exists" in again and "engines: " not in again
    assert "ends the run: change or remove it to continue" in again
    for model in ("exports/global_step_2/policy", "ckpts/global_step_2"):
        command(folder, "evaluate", **keys | {"trainer__policy__model__path": folder / model})
        assert scores(folder, 2) == found, model
    lines = (folder / "logs/skyrl/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 2]
    assert not list((folder / "exports").glob(".global_step*"))


@pytest.mark.full_matrix
def test_an_initial_policy_that_is_good_enough_ends_the_run(tmp_path):
    """Before the first step, with checkpoint and export; the same command has nothing left to do."""
    folder = runs.prepare(tmp_path)
    keys = {
        "trainer__stop_when": "eval/all/avg_score >= 0",
        "trainer__eval_before_train": "true",
        "trainer__eval_interval": 1,
        "trainer__hf_save_interval": 4,
    }
    done = runs.run(folder, **keys).check()
    assert "ended after step 0 of 2: trainer.stop_when='eval/all/avg_score >= 0' (eval/all/avg_score is " in done.out
    assert [line["step"] for line in done.lines] == [0] and done.lines[0]["eval/all/num_failed"] == 0.0
    assert (folder / "ckpts/global_step_0").is_dir() and (folder / "exports/global_step_0/policy").is_dir()
    assert "exported model: " in done.out
    again = runs.run(folder, **keys).check()
    assert "nothing left to do: the checkpoint of step 0 of 2 exists" in again.out and "engines: " not in again.out
    assert runs.run(folder, **keys | {"trainer__stop_when": "null"}).check().lines[-1]["step"] == 2
