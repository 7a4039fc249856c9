"""Runs held against each other: exit codes, and what is no number."""

import json

import pytest


def write(folder, rewards, **more):
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "warmup/step": 1, "warmup/loss": None}) + "\n")
        for step, reward in enumerate(rewards, 1):
            file.write(json.dumps({"step": step, "reward/avg_raw_reward": reward, **more}) + "\n")
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return lambda own, other, **more: [write(tmp_path / "run", own, **more), write(tmp_path / "base", other, **more)]


@pytest.mark.parametrize(
    ("own", "code"),
    [([0.5, 0.5], 0), ([0.49, 0.48], 0), ([0.3, 0.5], 1), ([0.9, 0.9], 0), ([None, 0.5], 2)],
    ids=["equal", "within", "below", "better", "not a number"],
)
def test_exit_codes(folders, capsys, own, code):
    from skyrl_megatron_observe.compare_runs import main

    assert main(folders(own, [0.5, 0.5])) == code
    out = capsys.readouterr()
    assert ("✗" in out.out) == (code == 1)
    assert ("reward/avg_raw_reward=not a number" in out.err) == (code == 2)


def test_nan_itself_is_an_error(folders, capsys):
    from skyrl_megatron_observe.compare_runs import main

    assert main(folders([float("nan")], [0.5])) == 2
    assert "not a number" in capsys.readouterr().err


def test_means_of_the_last_steps_are_compared(folders):
    from skyrl_megatron_observe.compare_runs import main

    both = folders([0.0, 0.0, 0.5, 0.5], [0.5])
    assert main([*both, "--last", "2"]) == 0 and main([*both, "--last", "4"]) == 1


def test_a_metric_whose_better_side_is_not_known_may_leave_on_either(tmp_path):
    from skyrl_megatron_observe.compare_runs import MetricComparison as Metric

    for run, leaves in ((1.2, True), (0.8, True), (1.05, False)):
        assert Metric("policy/policy_entropy", run, 1.0, 0.1).out_of_band == leaves
    assert Metric("timing/step", 2.0, 1.0, 0.1).out_of_band and not Metric("timing/step", 0.5, 1.0, 0.1).out_of_band
    assert Metric("policy/x", 1.0, 0.0, 0.1).out_of_band and not Metric("policy/x", 0.0, 0.0, 0.1).out_of_band


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["policy/none=0.1"], "policy/none=None: "),
        (["reward/avg_raw_reward=x"], "reward/avg_raw_reward=x: give the largest allowed relative change"),
        (["reward/avg_raw_reward=nan"], "reward/avg_raw_reward=nan: give the largest allowed relative change"),
        (["--last=0"], "--last=0: give at least 1"),
    ],
)
def test_bad_input_is_one_message(folders, capsys, given, said):
    from skyrl_megatron_observe.compare_runs import main

    assert main([*folders([0.5], [0.5]), *given]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_metrics(tmp_path, capsys):
    from skyrl_megatron_observe.compare_runs import main

    assert main([str(tmp_path), str(tmp_path)]) == 1
    assert "no metrics.jsonl" in capsys.readouterr().err
