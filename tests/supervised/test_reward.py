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
    """Rows, and a model that pads with the token that ends its answers, as DeepSeek's do."""
    folder = row_runs.prepare(tmp_path_factory.mktemp("reward"))
    for name, key, value in (("tokenizer_config", "pad_token", "<|end|>"), ("config", "pad_token_id", 1)):
        path = folder / f"model/{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return folder


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
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    scores = {"chosen": [], "rejected": []}
    for line in (folder / "scored.jsonl").read_text().splitlines():
        row, texts = json.loads(line), []
        for side in scores:
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            texts.append(text[: text.rindex("<|end|>") + len("<|end|>")])
        with torch.no_grad():
            padded, other = (
                tokenizer(texts, padding=True, padding_side=side, return_tensors="pt") for side in ("right", "left")
            )
            logits = model(**padded).logits
            assert logits.shape == (2, 1)
            assert torch.allclose(model(**other).logits, logits, atol=1e-5)
            for number, text in enumerate(texts):
                assert torch.allclose(model(**tokenizer(text, return_tensors="pt")).logits, logits[number], atol=1e-5)
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
        assert torch.equal(again(**padded).logits, logits)
    assert (converted / "tokenizer_config.json").read_bytes() == (export / "tokenizer_config.json").read_bytes()


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
