"""A dumped step of a whole run trained again alone: bit for bit, with another loss, on another layout."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.job import runs

RUN = {
    "trainer__dump_data_batch": "true",
    "trainer__policy_mini_batch_size": 2,
    "trainer__max_training_steps": 4,
    "trainer__ckpt_interval": 2,
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__placement__ref_num_gpus_per_node": 2,
    "trainer__ref__megatron_config__expert_model_parallel_size": 2,
    "trainer__policy__optimizer_config__lr": 1e-3,
}


def replay(folder, *arguments):
    command = [sys.executable, "-m", "skyrl_megatron.cli", "replay-batch", "logs/skyrl/run", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=runs.environment(folder), timeout=runs.TIMEOUT_S
    )


def numbers(folder, step, of="run"):
    lines = [json.loads(line) for line in (folder / f"logs/skyrl/{of}/metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["step"] == step]
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = runs.prepare(tmp_path_factory.mktemp("run"))
    runs.run(folder, **RUN).check()
    return folder


@pytest.mark.vllm
@pytest.mark.full_matrix
def test_a_step_is_trained_again(folder):
    """Steps 3 and 4 from checkpoint 2, with a reference and two updates a step."""
    done = replay(folder, "--step", "3", "--until", "4")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    same, of = map(int, re.search(r"(\d+) of (\d+) numbers are bitwise equal", done.stdout).groups())
    assert same == of > 30
    assert re.search(
        r"weights, moments and random states \(\d{2,}\) are bitwise equal to .*global_step_4", done.stdout
    )
    assert numbers(folder, 4)["policy/grad_norm"] == numbers(folder, 4, "run-step-3")["policy/grad_norm"] > 0
    assert sorted(path.name for path in (folder / "ckpts").glob("global_step_*")) == ["global_step_2", "global_step_4"]

    # a batch that was changed is no repetition, and is told
    path = folder / "exports/dumped_data/global_step_4.safetensors"
    shutil.copy(folder / "exports/dumped_data/global_step_3.safetensors", path)
    other = replay(folder, "--step", "4")
    assert other.returncode == 1 and "tensors differ from" in other.stdout, other.stdout[-3000:]


@pytest.mark.vllm
@pytest.mark.full_matrix
def test_a_step_with_another_loss_and_on_another_layout(folder):
    loss = replay(
        folder,
        "--step",
        "3",
        "trainer.algorithm.policy_loss_type=gspo",
        "trainer.algorithm.loss_reduction=sequence_mean",
    )
    assert loss.returncode == 0, loss.stdout[-3000:] + loss.stderr[-3000:]
    assert re.search(r" 3  policy/policy_loss +\S+ +\S+ +\S+", loss.stdout)
    one, two = numbers(folder, 3), numbers(folder, 3, "run-step-3")
    assert one["policy/policy_loss"] != two["policy/policy_loss"]
    assert one["loss/avg_raw_advantages_abs"] == two["loss/avg_raw_advantages_abs"] > 0

    tp = "trainer.policy.megatron_config.tensor_model_parallel_size=2"
    layout = replay(folder, "--step", "3", tp, "trainer.policy.megatron_config.expert_model_parallel_size=1")
    assert layout.returncode == 0, layout.stdout[-3000:] + layout.stderr[-3000:]
    two = numbers(folder, 3, "run-step-3")
    for name in ("policy/policy_loss", "policy/grad_norm", "policy/policy_kl"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert two["policy/grad_norm"] != one["policy/grad_norm"], "another layout rounds otherwise"


# ---------------------------------------------------------------------------------- what cannot be replayed
@pytest.fixture
def left(tmp_path):
    """What a run left of steps 3 and 5, and of step 4 in part, without checkpoints; and its configuration."""
    import torch

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.types import PaddedBatch
    from skyrl_megatron_observe.dump import dump_batch, dump_path

    cfg = SkyRLTrainConfig.from_cli_overrides(
        {"trainer.export_path": str(tmp_path / "exports"), "trainer.ckpt_path": str(tmp_path / "ckpts")}
    )
    (tmp_path / "ckpts").mkdir()
    ones = torch.ones(2, 3)
    for step in (3, 4, 5):
        batch = PaddedBatch(ones.long(), ones.bool(), ones, ones.clone(), ["a", "b"]).flat()
        dump_batch(batch, dump_path(cfg, step))
    whole = dump_path(cfg, 4).read_bytes()
    dump_path(cfg, 4).write_bytes(whole[: len(whole) // 2])
    return cfg


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (0, 1, r"--step=0: give a training step, from 1"),
        (5, 4, r"--until=4: is before --step 5"),
        (
            9,
            9,
            r"--step=9: the replay starts from the initial model and needs step 1: .* \(steps 3, 4, 5 are there\)",
        ),
        (
            1,
            1,
            r"--step=1: its batch is not in .*run with trainer.dump_data_batch=true and a checkpoint before the step",
        ),
    ],
)
def test_steps_that_cannot_be_replayed(left, first, last, said):
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron_tools.replay_trainer import plan_replay

    with pytest.raises(ConfigError, match=said) as told:
        plan_replay(left, first, last, same=True)
    assert len(told.value.problems) == 1


def test_a_half_written_batch(left, monkeypatch):
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.runtime.checkpoint.store import CheckpointStore
    from skyrl_megatron_tools.replay_trainer import plan_replay

    monkeypatch.setattr(CheckpointStore, "complete_steps", lambda self: [6, 3, 2])
    plan = plan_replay(left, 3, 3, same=True)
    assert (plan.begins, list(plan.steps), plan.expected.rpartition("/")[2]) == (2, [3], "global_step_3")
    with pytest.raises(ConfigError, match=r"--step=4: its batch cannot be read \(.*not a dumped batch"):
        plan_replay(left, 4, 4, same=False)
    with pytest.raises(
        ConfigError, match=r"--step=5: the replay starts from checkpoint 3 and needs step 4: its batch cannot be read"
    ):
        plan_replay(left, 5, 5, same=False)


def test_a_folder_that_is_no_run(tmp_path, capsys):
    from skyrl_megatron.cli import main

    assert main(["replay-batch", str(tmp_path), "--step", "1"]) == 2
    assert f"RUN={tmp_path}: has no config.yaml: give the folder of a run" in capsys.readouterr().err
