"""The embedded run learns, and learns from its rewards alone: minutes each, on request (``--layouts=all``)."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def scores(home, steps, *keys):
    """Held-out scores by step of an embedded run; the warm-up's are not among them."""
    command = [sys.executable, "-W", "ignore", "-m", "skyrl_megatron_tools.embedded.embedded"]
    fixed = [f"trainer.max_training_steps={steps}", f"trainer.eval_interval={steps}", "trainer.ckpt_interval=0"]
    environment = {**os.environ, "SKYRL_MEGATRON_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *fixed, *keys], capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (metrics,) = home.glob("embedded/*/logs/*/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = {line["step"]: line["eval/all/avg_score"] for line in lines if "eval/all/avg_score" in line}
    warm = [line["warmup/score"] for line in lines if "warmup/score" in line]
    assert max(warm) <= 0.3 and found[0] == warm[-1], "the rest is for the RL steps to learn"
    return found


def test_rewards_teach(tmp_path):
    found = scores(tmp_path, 32)
    assert found[32] >= found[0] + 0.25


def test_a_learning_rate_of_nothing_teaches_nothing(tmp_path):
    found = scores(tmp_path, 10, "trainer.policy.optimizer_config.lr=0")
    assert found[10] == found[0], "the same weights answer the same questions alike"
