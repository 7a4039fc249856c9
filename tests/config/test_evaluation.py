"""Evaluation sets, the condition that ends a run, and the metric of the best checkpoint: what is refused, and how."""

import warnings

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.rules.evaluation_rules import evaluation_problems
from skyrl_megatron.config.schema.evaluation import EvalSetConfig, StopCondition, eval_sets
from skyrl_megatron.errors import ConfigError

HARD = {"data": ["/d/hard.parquet"], "n": 4, "temperature": 0.7}


def problems(keys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [str(problem) for problem in evaluation_problems(SkyRLTrainConfig.from_cli_overrides(keys))]


@pytest.mark.parametrize(
    ("text", "metric", "comparison", "number"),
    [
        ("eval/hard/pass_at_4 >= 0.69", "eval/hard/pass_at_4", ">=", 0.69),
        ("eval/all/avg_score>1e-1", "eval/all/avg_score", ">", 0.1),
        ("  reward/avg_raw_reward <= -2 ", "reward/avg_raw_reward", "<=", -2.0),
        ("reward/zero_variance_groups<.5", "reward/zero_variance_groups", "<", 0.5),
    ],
)
def test_a_condition_is_read(text, metric, comparison, number):
    found = StopCondition.parse(text)
    assert (found.metric, found.comparison, found.number) == (metric, comparison, number)


def test_a_condition_holds_at_its_bound_and_never_for_nan():
    above, over = StopCondition.parse("eval/a/b >= 0.5"), StopCondition.parse("eval/a/b > 0.5")
    assert above.holds(0.5) and not over.holds(0.5) and over.holds(0.6)
    assert not above.holds(float("nan"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eval/all/avg_score", "write METRIC >= NUMBER"),
        ("eval/all/avg_score = 0.5", "write METRIC >= NUMBER"),
        ("eval/all/avg_score >= 0.5 and eval/b/c > 1", "write METRIC >= NUMBER"),
        ("eval/all/avg_score >= high", "'high' is not a number"),
        ("eval/all/avg_score >= nan", "nothing compares with nan"),
        ("policy/grad_norm > 5", "policy/grad_norm is no metric of evaluation or rewards"),
        ("", "write METRIC >= NUMBER"),
    ],
)
def test_a_condition_that_cannot_be_read_is_one_problem(text, says):
    found = problems({"trainer.stop_when": text})
    assert len(found) == 1 and found[0].startswith(f"trainer.stop_when={text}") and says in found[0], found


def test_the_metric_must_be_measured():
    sets = {"data.eval_sets": {"hard": HARD}}
    assert problems(sets | {"trainer.stop_when": "eval/hard/pass_at_4 >= 0.69"}) == []
    (one,) = problems(sets | {"trainer.stop_when": "eval/hard/pass_at_3 >= 0.69"})
    assert "eval/hard has avg_score, mean_positive_reward, pass_at_1, pass_at_2, pass_at_4: use one of them" in one
    (one,) = problems({"trainer.best_metric": "eval/all/avg_score", "trainer.eval_interval": -1})
    assert one.startswith("trainer.best_metric") and "set trainer.eval_interval, not -1" in one
    (one,) = problems(sets | {"data.val_data": [], "trainer.best_metric": "eval/easy/avg_score"})
    assert "no evaluation set has the name easy: data.eval_sets has hard" in one
    (one,) = problems({"trainer.best_metric": "reward/avg_raw_reward"})
    assert "is no metric of an evaluation" in one


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        ({"hard": {"n": 4, "temperature": 1}}, "data.eval_sets.hard.data", "set at least one data set"),
        ({"hard": HARD | {"pass_at": [1, 8]}}, "data.eval_sets.hard.pass_at", "k=8 must be between 1 and n=4"),
        ({"hard": HARD | {"majority_at": [0]}}, "data.eval_sets.hard.majority_at", "k=0 must be between 1 and n=4"),
        ({"hard": HARD | {"temperature": 0}}, "data.eval_sets.hard.temperature", "the n=4 greedy responses"),
        ({"hard": {"data": ["/d"], "n": 2}}, "data.eval_sets.hard.temperature", "the n=2 greedy responses"),
        ({"hard": HARD | {"n": 0}}, "data.eval_sets.hard.n", "at least 1"),
        ({"hard": HARD | {"samples": 3}}, "data.eval_sets.hard.samples", ""),
        ({"hard": 3}, "data.eval_sets.hard", "must be a mapping"),
        ({"all": HARD}, "data.eval_sets", "names the metrics eval/NAME/"),
        ({"a/b": HARD}, "data.eval_sets", "names the metrics eval/NAME/"),
    ],
)
def test_a_set_that_cannot_be_is_one_problem(given, key, says):
    found = problems({"data.eval_sets": given})
    assert len(found) == 1 and found[0].startswith(f"{key}=") and says in found[0], found


def test_paths_and_defaults_of_a_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = SkyRLTrainConfig.from_cli_overrides(["data.eval_sets={hard: {data: [hard.parquet], n: 6, temperature: 1}}"])
    one = eval_sets(cfg.data.eval_sets)["hard"]
    assert one.data == [f"{tmp_path}/hard.parquet"] and one.ks == [1, 2, 4, 6] and one.group_by == "data_source"
    assert EvalSetConfig(data=["d"], n=4, pass_at=[4, 2, 4]).ks == [2, 4]
    with pytest.raises(ConfigError, match="set at least one data set"):
        eval_sets({"hard": {}})
