"""``skyrl-megatron reward`` as users start it."""

import json
import math
import random
import subprocess
import sys

import pytest

from tests.job import runs

pytestmark = pytest.mark.process
KEYS = {
    "reward.max_length": 256,
    "trainer.train_batch_size": 16,
    "trainer.epochs": 2,
    "trainer.eval_interval": 8,
    "trainer.ckpt_interval": 4,
    "trainer.hf_save_interval": 8,
    "trainer.bf16": "false",
    "trainer.logger": "console",
    "trainer.policy.optimizer_config.lr": 1e-3,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 pairs of a right and a wrong sum, and a model."""
    from skyrl_megatron.entrypoints.embedded import write_embedded_model

    folder = tmp_path_factory.mktemp("reward")
    write_embedded_model(folder / "model")
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(64):
            first, second = draw.randint(0, 9), draw.randint(0, 9)
            prompt = [{"role": "user", "content": f"What is {first} + {second}?"}]
            right = [{"role": "assistant", "content": f"the answer is {first + second}"}]
            wrong = [{"role": "assistant", "content": f"no idea, {draw.randint(30, 60)} perhaps"}]
            row = {"prompt": prompt, "chosen": right, "rejected": wrong, "margin": 0.5}
            file.write(json.dumps(row) + "\n")
    return folder


def test_a_reward_model_is_trained(folder, tmp_path):
    """Plain transformers gives the scores of the exported folder."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    own = {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"[{folder / 'pairs.jsonl'}]",
        "data.val_data": f"[{folder / 'pairs.jsonl'}]",
        "trainer.log_path": tmp_path / "logs",
        "trainer.ckpt_path": tmp_path / "ckpt",
        "trainer.export_path": tmp_path / "exports",
    }
    command = [sys.executable, "-m", "skyrl_megatron", "reward"]
    command += [f"{key}={value}" for key, value in (KEYS | own).items()]
    done = subprocess.run(
        command, capture_output=True, text=True, env=runs.environment(folder), timeout=runs.TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    lines = [json.loads(line) for line in (tmp_path / "logs/skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    losses = [line["reward/loss"] for line in lines if "reward/loss" in line]
    assert losses[0] == pytest.approx(math.log(1 + math.exp(0.5)), abs=0.3) and losses[-1] < losses[0]
    held_out = next(line for line in reversed(lines) if "eval/all/loss" in line)
    assert held_out["eval/all/rewards/accuracies"] > 0.9

    exported = tmp_path / "exports/global_step_8/policy"
    model, loading = AutoModelForSequenceClassification.from_pretrained(exported, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    scores = {"chosen": [], "rejected": []}
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        row, texts = json.loads(line), []
        for side in scores:
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            texts.append(text[: text.rindex("<|end|>") + len("<|end|>")])
        both = tokenizer(texts, add_special_tokens=False)["input_ids"]
        width = max(map(len, both))
        padded = torch.tensor([ids + [model.config.pad_token_id] * (width - len(ids)) for ids in both])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in both])
        with torch.no_grad():
            found = model(padded, attention_mask=mask).logits
        assert found.shape == (2, 1)
        for side, score in zip(scores, found[:, 0].tolist(), strict=True):
            scores[side].append(score)
    for side, values in scores.items():
        mean = sum(values) / len(values)
        assert held_out[f"eval/all/rewards/{side}"] == pytest.approx(mean, abs=1e-5), side
