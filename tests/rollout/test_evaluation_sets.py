"""Scores of evaluation sets from rows of known rewards.

The engine plays back tokens, because the scores depend on what is sampled. Real engines: tests/job/test_evaluate.py.
"""

import asyncio
from collections import defaultdict

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.errors import ConfigError
from tests.rollout.scripted import ScriptedEngine, generation, generator_of, tokenizer_of


class Prompts:
    """Rows with a level and the answer 15."""

    def __init__(self, *levels):
        self.levels = levels

    def __len__(self):
        return len(self.levels)

    def __getitem__(self, item):
        return item

    def collate_fn(self, items):
        row = {"prompt": [{"role": "user", "content": "7+8"}], "env_class": "gsm8k"}
        extras = {"reward_spec": {"ground_truth": "15"}, "data_source": "sums"}
        return [{**row, "env_extras": extras | {"level": self.levels[item]}, "uid": str(item)} for item in items]


def scores(tmp_path, said, prompts, eval_dataset=None, **one):
    """Scores of a set whose responses are ``said``, in order."""
    from skyrl_megatron.trainer.evaluate import evaluate

    tokenizer = tokenizer_of("chatml")
    made = iter([generation([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in said])
    engine = ScriptedEngine(lambda session: defaultdict(lambda: next(made)))
    generator = generator_of("chatml", engine, tokenizer=tokenizer, max_turns=1, batched=True)
    sets = {"hard": {"data": ["/d"], "temperature": 1.0} | one}
    cfg = SkyRLTrainConfig.from_cli_overrides({"data.eval_sets": sets, "trainer.export_path": str(tmp_path)})
    found = asyncio.run(evaluate(cfg, eval_dataset, generator, tokenizer, 3, {"hard": prompts}))
    return found, engine, cfg


def test_scores_of_a_set_and_of_its_groups(tmp_path):
    """Votes are over the number that the environment reads: two ways to say 15 are one answer."""
    said = ["#### 15", "so #### 15", "#### 9", "nothing", "#### 9", "#### 9", "#### 15", "#### 8"]
    found, engine, _ = scores(
        tmp_path, said, Prompts("easy", "deep/er"), n=4, pass_at=[1, 2, 4], majority_at=[4], group_by="level"
    )
    assert found["eval/hard/avg_score"] == pytest.approx(3 / 8)
    assert found["eval/hard/pass_at_4"] == 1.0 and found["eval/hard/pass_at_1"] == pytest.approx(3 / 8)
    assert found["eval/hard/pass_at_2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found["eval/hard/majority_at_4"] == 0.5
    assert found["eval/hard/easy/majority_at_4"] == 1.0 and found["eval/hard/deep_er/majority_at_4"] == 0.0
    assert found["eval/hard/easy/pass_at_1"] == 0.5 and found["eval/hard/deep_er/pass_at_1"] == 0.25
    assert "eval/all/avg_score" not in found
    assert engine.sampling[0]["temperature"] == 1.0
    lines = (tmp_path / "dumped_evals/global_step_3/hard.jsonl").read_text().splitlines()
    assert len(lines) == 8


def test_one_group_is_not_told_twice(tmp_path):
    found, _, _ = scores(tmp_path, ["#### 15"] * 2, Prompts("easy", "easy"), n=1, group_by="level")
    assert set(found) == {
        f"eval/hard/{name}" for name in ("avg_score", "mean_positive_reward", "pass_at_1", "num_failed")
    }


def test_a_set_beside_the_evaluation_data(tmp_path):
    from skyrl_megatron.trainer.evaluate import require_metrics

    found, _, cfg = scores(tmp_path, ["#### 15", "#### 1", "#### 15"], Prompts("a"), Prompts("b", "c"), n=1)
    assert found["eval/all/avg_score"] == found["eval/sums/pass_at_1"] == 0.5 and found["eval/hard/avg_score"] == 1.0

    class Held(Prompts):
        def values_of(self, column):
            return ["sums"] if column == "data_source" else sorted(set(self.levels))

    cfg.trainer.stop_when, cfg.trainer.best_metric = "eval/sum/pass_at_1 > 0", "eval/all/avg_score"
    require_metrics(cfg, Prompts("a"), {})  # a data set of one's own, which is not looked into
    with pytest.raises(ConfigError, match=r"stop_when=eval/sum/pass_at_1 > 0.*did you mean eval/sums/pass_at_1"):
        require_metrics(cfg, Held("a"), {})
    cfg.trainer.stop_when = "reward/avg_raw_reward > 0"
    require_metrics(cfg, Held("a"), {})


def test_failed_samples_are_counted_and_in_no_score(tmp_path):
    """Of four samples two fail: the scores are those of the two others. pass@4 has no prompt with four samples."""
    from skyrl_megatron.rollout.interface import TrajectoryID
    from skyrl_megatron.trainer.evaluate import evaluate

    class Half:
        async def generate(self, batch, disable_tqdm=False):
            rows = range(len(batch["prompts"]))
            return {
                "prompt_token_ids": [[1]] * len(rows),
                "response_ids": [[2]] * len(rows),
                "rewards": [float(row == 0) for row in rows],
                "loss_masks": [[1]] * len(rows),
                "stop_reasons": ["stop"] * len(rows),
                "rollout_metrics": {},
                "rollout_logprobs": None,
                "errors": ["TimeoutError" if row % 2 else None for row in rows],
                "trajectory_ids": [TrajectoryID("0", row) for row in rows],
            }

    sets = {"hard": {"data": ["/d"], "temperature": 1.0, "n": 4}}
    keys = {"data.eval_sets": sets, "trainer.export_path": str(tmp_path), "generator.eval_n_samples_per_prompt": 4}
    cfg = SkyRLTrainConfig.from_cli_overrides(keys | {"trainer.dump_eval_results": False})
    found = asyncio.run(evaluate(cfg, Prompts("a"), Half(), None, 0, {"hard": Prompts("a")}))
    for name in ("all", "sums", "hard"):
        assert found[f"eval/{name}/avg_score"] == 0.5 and found[f"eval/{name}/num_failed"] == 2.0
    assert found["eval/hard/pass_at_1"] == 0.5 and found["eval/hard/pass_at_2"] == found["eval/all/pass_at_4"] == 1.0
    assert "eval/hard/pass_at_4" not in found


def test_a_set_with_the_name_of_a_data_set(tmp_path):
    from skyrl_megatron.trainer.evaluate import evaluate

    tokenizer = tokenizer_of("chatml")
    engine = ScriptedEngine([generation([*tokenizer.encode("#### 15"), tokenizer.eos_token_id])])
    generator = generator_of("chatml", engine, tokenizer=tokenizer, max_turns=1, batched=True)
    sets = {"sums": {"data": ["/d"]}}
    cfg = SkyRLTrainConfig.from_cli_overrides({"data.eval_sets": sets, "trainer.export_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"data\.eval_sets\.sums=sums.*rename the set"):
        asyncio.run(evaluate(cfg, Prompts("a"), generator, tokenizer, 0, {"sums": Prompts("a")}))
