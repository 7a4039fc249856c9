"""The embedded run learns, and learns from its rewards alone: minutes each, on request (``--layouts=all``)."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix]


def lines_of(home, steps, *keys, recipe="embedded", runs="logs"):
    """Lines of metrics of a run of one of the embedded recipes, whose files lie in ``runs``."""
    command = [sys.executable, "-W", "ignore", "-m", "skyrl_megatron.entrypoints.run_moe", "--recipe", recipe]
    fixed = [f"trainer.max_training_steps={steps}", f"trainer.eval_interval={steps}", "trainer.ckpt_interval=0"]
    environment = {**os.environ, "SKYRL_MEGATRON_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *fixed, *keys], capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (metrics,) = home.glob(f"embedded/*/{runs}/*/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def before_and_after(home, steps, *keys, recipe, runs):
    """Held-out scores before the first step and after the last of a run that begins with the warmed-up model."""
    lines = lines_of(home, steps, *keys, recipe=recipe, runs=runs)
    found = {line["step"]: line["eval/all/avg_score"] for line in lines if "eval/all/avg_score" in line}
    assert found[0] <= 0.3
    return found[0], found[steps]


def scores(home, steps, *keys):
    """Held-out scores by step of an embedded run; the warm-up's are not among them."""
    lines = lines_of(home, steps, *keys)
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


def test_a_critic_helps_to_learn(tmp_path):
    before, after = before_and_after(tmp_path, 32, recipe="embedded-ppo", runs="critic/logs")
    assert after >= before + 0.15


def test_a_teacher_teaches_what_it_knows(tmp_path):
    """The embedded run's model after some steps passes on what it has learned; one of random weights does not."""
    taught = scores(tmp_path, 32, "trainer.hf_save_interval=32")
    teacher = tmp_path / "embedded/seed_42/exports/global_step_32/policy"
    keys = (f"trainer.teacher.model.path={teacher}",)
    before, after = before_and_after(tmp_path, 24, *keys, recipe="embedded-distill", runs="teacher/logs")
    assert after >= before + 0.5 * (taught[32] - before)
    shutil.rmtree(tmp_path / "embedded/seed_42/teacher")
    keys = (f"trainer.teacher.model.path={tmp_path}/embedded/seed_42/model",)
    before, after = before_and_after(tmp_path, 8, *keys, recipe="embedded-distill", runs="teacher/logs")
    assert after <= before
