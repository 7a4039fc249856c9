"""Evaluation sets, the condition that ends a run, and the metric of the best checkpoint: what is refused, and how."""

import math
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
    assert "no metric eval/hard/pass_at_3: did you mean eval/hard/pass_at_4? It has eval/hard/avg_score" in one
    assert "eval/hard/pass_at_1, eval/hard/pass_at_2, eval/hard/pass_at_4; for a metric of your own call" in one
    (one,) = problems({"trainer.best_metric": "eval/all/avg_score", "trainer.eval_interval": -1})
    assert one.startswith("trainer.best_metric") and "set trainer.eval_interval, not -1" in one
    (one,) = problems(sets | {"data.val_data": [], "trainer.best_metric": "eval/easy/avg_score"})
    assert "no metric eval/easy/avg_score: did you mean eval/hard/avg_score?" in one
    (one,) = problems({"trainer.best_metric": "reward/avg_raw_reward"})
    assert "is no metric of an evaluation" in one


TRAIN = {"data.train_data": ["/d/train.jsonl"], "data.val_data": ["/d/math/test.jsonl", "/d/code/test.jsonl"]}
LORA = {"trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.adapters": {"one": {}, "two": {}}}


@pytest.mark.parametrize(
    ("verb", "keys", "metric", "near"),
    [
        ("train", {}, "reward/avg_raw_rewards", "reward/avg_raw_reward"),
        ("train", {"generator.n_samples_per_prompt": 5}, "reward/avg_pass_at_8", "reward/avg_pass_at_5"),
        ("train", {}, "eval/all/avg_scor", "eval/all/avg_score"),
        ("train", {}, "eval/math/loss", ""),
        ("train", {}, "eval/anything/pass_at_1", None),
        ("train", {}, "eval/open/ai/avg_score", None),
        ("train", {"generator.eval_n_samples_per_prompt": 2}, "eval/all/pass_at_1", "eval/all/pass_at_2"),
        ("train", {}, "reward/loss", ""),
        ("train", {}, "reward/avg_model_score", ""),
        ("train", {"generator.n_samples_per_prompt": 1}, "reward/zero_variance_groups", ""),
        ("train", LORA, "eval/adapter/one/avg_score", None),
        ("train", LORA, "eval/adapter/three/avg_score", "eval/adapter/two/avg_score"),
        ("sft", {}, "reward/avg_raw_reward", ""),
        ("sft", {}, "eval/all/avg_score", ""),
        ("sft", {}, "eval/all/loss", None),
        ("sft", {}, "eval/math/test.jsonl/loss", None),
        ("sft", {}, "eval/test.jsonl/loss", "eval/math/test.jsonl/loss"),
        ("dpo", {}, "eval/all/rewards/accuracies", None),
        ("dpo", {}, "eval/all/rewards/accuracy", "eval/all/rewards/accuracies"),
        ("dpo", {"dpo.loss": "kto"}, "eval/all/rewards/accuracies", ""),
        ("reward", {}, "reward/loss", None),
        ("reward", {}, "eval/all/logps/chosen", ""),
    ],
)
def test_a_metric_that_the_run_will_not_have_is_refused_with_the_nearest(verb, keys, metric, near):
    """``near``: None for a metric that the run has, "" for any."""
    found = problems_of(verb, TRAIN | keys | {"trainer.stop_when": f"{metric} >= 0.5"})
    if near is None:
        assert found == []
    else:
        (one,) = found
        assert one.startswith(f"trainer.stop_when={metric} >= 0.5")
        assert f"no metric {metric}: did you mean {near}" in one and "register_metric" in one


def problems_of(verb, keys):
    from skyrl_megatron.config.schema.preferences import DPOTrainConfig, RewardTrainConfig
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    kinds = {"train": SkyRLTrainConfig, "sft": SFTTrainConfig, "dpo": DPOTrainConfig, "reward": RewardTrainConfig}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [str(problem) for problem in evaluation_problems(kinds[verb].from_cli_overrides(keys))]


@pytest.mark.parametrize(
    ("verb", "metric", "better"),
    [
        ("train", "eval/all/avg_score", "higher"),
        ("train", "eval/all/num_failed", "lower"),
        ("sft", "eval/all/loss", "lower"),
        ("dpo", "eval/all/rewards/margins", "higher"),
        ("reward", "eval/all/loss", "lower"),
        ("dpo", "eval/all/rewards/chosen", ""),
    ],
)
def test_the_best_has_a_direction(verb, metric, better):
    from skyrl_megatron.config.metric_table import describe

    assert describe(metric).better == better
    found = problems_of(verb, TRAIN | {"trainer.best_metric": metric})
    assert len(found) == (not better) and all(
        "higher or lower values of it are better is not known" in x for x in found
    )


@pytest.mark.parametrize(
    ("metric", "values", "kept"),
    [
        ("eval/all/loss", [4.2, 3.8, 3.9, math.nan, 3.1], [1, 2, 5]),
        ("eval/all/avg_score", [0.2, 0.1, math.nan, 0.3], [1, 4]),
    ],
)
def test_the_best_checkpoint_is_kept(metric, values, kept):
    """The trainer's rule alone: steps whose evaluation has these values."""
    from types import SimpleNamespace

    from skyrl_megatron.trainer.training_run import TrainingRun

    marked = []
    run = SimpleNamespace(cfg=SkyRLTrainConfig.from_cli_overrides({"trainer.best_metric": metric}), best=None)
    run.recovery = SimpleNamespace(run=lambda save: save())
    run._save_this_step = lambda: setattr(run.checkpoints, "saved_step", run.global_step)
    run.checkpoints = SimpleNamespace(saved_step=None, mark_best=lambda name, value: marked.append(run.global_step))
    for run.global_step, value in enumerate(values, 1):
        run.metrics = {metric: value}
        TrainingRun.keep_best(run)
    assert marked == kept


def test_a_metric_of_ones_own_is_declared():
    from skyrl_megatron.plugins import METRICS, register_metric

    keys = TRAIN | {"trainer.best_metric": "eval/all/distance", "trainer.stop_when": "environment/distance < 1"}
    assert len(problems_of("train", keys)) == 2
    try:
        register_metric("eval/all/distance")
        register_metric("environment/*", direction="lower")
        (one,) = problems_of("train", keys)
        assert one.startswith("trainer.best_metric=eval/all/distance") and "is not known" in one
        register_metric("eval/all/distance", direction="lower", unit="m", meaning="of the answer")
        assert problems_of("train", keys) == []
        with pytest.raises(ConfigError, match='must be "higher", "lower" or ""'):
            register_metric("eval/all/distance", direction="down")
    finally:
        METRICS.clear()


def test_every_name_of_a_run_is_in_the_table_for_its_verb():
    from skyrl_megatron.config.metric_table import describe
    from skyrl_megatron.config.rules.evaluation_rules import held_out
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    for kind, verb in ((SkyRLTrainConfig, "train"), (SFTTrainConfig, "sft")):
        cfg = kind.from_cli_overrides(TRAIN)
        names = [f"eval/{name}/{score}" for name, scores in held_out(cfg, {}).items() for score in scores]
        assert names and all(verb in describe(name).given_by for name in names)


def test_data_sets_have_names_of_their_own():
    from skyrl_megatron.config.schema.evaluation import data_set_names

    assert data_set_names(["/d/held.jsonl"]) == {"/d/held.jsonl": "held.jsonl"}
    paths = [
        "/d/math/test.jsonl",
        "/d/code/test.jsonl",
        "/d/other.jsonl",
        "/e/code/test.jsonl",
        "/d/all",
        "test.jsonl",
    ]
    names = list(data_set_names(paths).values())
    assert names == ["math/test.jsonl", "d/code/test.jsonl", "other.jsonl", "e/code/test.jsonl", "d/all", "test.jsonl"]
    assert data_set_names(["acme/sums:test", "acme/sums:train"])["acme/sums:test"] == "sums:test"


def test_parts_of_the_data_cannot_have_the_scores_of_others():
    from skyrl_megatron.config.rules.evaluation_rules import metric_problems, name_problems

    cfg = SkyRLTrainConfig.from_cli_overrides(TRAIN | LORA | {"data.eval_sets": {"hard": HARD}})
    groups = {"data.val_data": ["all", "adapter/one", "adapter/x", "hard", "hard/er", "fine"], "hard": ["a/b", "a_b"]}
    found = [str(problem) for problem in name_problems(cfg, groups)]
    assert [text.partition(":")[0] for text in found] == [
        "data.val_data=all",
        "data.val_data=adapter/one",
        "data.eval_sets.hard=hard",
        "data.eval_sets.hard=hard/er",
        "data.eval_sets.hard.group_by=data_source",
    ]
    assert "a/b and a_b would both be eval/hard/a_b/" in found[-1]
    assert list(name_problems(cfg, {"data.val_data": ["math"], "hard": ["a", "b"]})) == []
    cfg.trainer.best_metric, cfg.trainer.stop_when = "eval/maths/avg_score", "eval/hard/c/pass_at_1 > 0.5"
    known = {"data.val_data": ["math"], "hard": ["a", "b"]}
    assert list(metric_problems(cfg, {})) == [], "as long as the data is not read"
    assert [problem.fix.partition("?")[0] for problem in metric_problems(cfg, known)] == [
        "this run will have no metric eval/hard/c/pass_at_1: did you mean eval/hard/b/pass_at_1",
        "this run will have no metric eval/maths/avg_score: did you mean eval/math/avg_score",
    ]


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
