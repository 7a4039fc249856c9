"""``skyrl-megatron reward`` as users start it."""

import json
import math

import pytest

from tests.job import row_runs
from tests.job.row_runs import exported, metrics_of, run, steps_of

pytestmark = pytest.mark.process
KEYS = {"trainer.epochs": 2, "trainer.eval_interval": 8, "trainer.ckpt_interval": 4, "trainer.hf_save_interval": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return row_runs.prepare(tmp_path_factory.mktemp("reward"))


def test_a_reward_model_is_trained(folder, tmp_path):
    """Plain transformers gives the scores of the exported folder, and of the checkpoint's conversion."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bridges.convert import compare
    from skyrl_megatron.cli import convert

    run("reward", folder, tmp_path, **KEYS)
    lines = metrics_of(tmp_path)
    losses = [line["reward/loss"] for line in steps_of(tmp_path)]
    assert losses[0] == pytest.approx(math.log(1 + math.exp(0.5)), abs=0.3) and losses[-1] < losses[0]
    held_out = next(line for line in reversed(lines) if "eval/all/loss" in line)
    assert held_out["eval/all/rewards/accuracies"] > 0.9

    export = tmp_path / "exports/global_step_8/policy"
    model, loading = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(export)
    scores = {"chosen": [], "rejected": []}
    for line in (folder / "scored.jsonl").read_text().splitlines():
        row, texts = json.loads(line), []
        for side in scores:
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            texts.append(text[: text.rindex("<|end|>") + len("<|end|>")])
        both = tokenizer(texts, add_special_tokens=False)["input_ids"]
        width = max(map(len, both))
        padded = torch.tensor([ids + [model.config.pad_token_id] * (width - len(ids)) for ids in both])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in both])
        with torch.no_grad():
            logits = model(padded, attention_mask=mask).logits
        assert logits.shape == (2, 1)
        for side, score in zip(scores, logits[:, 0].tolist(), strict=True):
            scores[side].append(score)
    for side, values in scores.items():
        mean = sum(values) / len(values)
        assert held_out[f"eval/all/rewards/{side}"] == pytest.approx(mean, abs=1e-5), side

    converted = tmp_path / "converted"
    assert convert([str(tmp_path / "ckpt/global_step_8"), str(converted)]) == 0
    assert json.loads((converted / "config.json").read_text()) == json.loads((export / "config.json").read_text())
    assert not compare(converted, export).differences
    again, loading = AutoModelForSequenceClassification.from_pretrained(converted, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again(padded, attention_mask=mask).logits, logits)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    run("reward", folder, place)
    return place


@pytest.mark.full_matrix
@pytest.mark.parametrize("moment", [row_runs.EVALUATION, "a checkpoint", "a step"])
def test_a_killed_run_is_resumed_bit_for_bit(folder, tmp_path, whole, moment):
    row_runs.kill_during(moment, row_runs.start("reward", folder, tmp_path), tmp_path)
    assert ("resumed from" in run("reward", folder, tmp_path)) == (moment == "a step")
    assert exported(tmp_path) == exported(whole)
