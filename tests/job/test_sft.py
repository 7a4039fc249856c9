"""``skyrl-megatron sft`` as users start it."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.job import runs

pytestmark = pytest.mark.process
KEYS = {
    "sft.max_length": 256,
    "trainer.train_batch_size": 16,
    "trainer.epochs": 1,
    "trainer.eval_interval": 4,
    "trainer.ckpt_interval": 1,
    "trainer.hf_save_interval": 4,
    "trainer.bf16": "false",
    "trainer.logger": "console",
    "trainer.policy.optimizer_config.lr": 1e-3,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 conversations about sums, of one and two turns, and a model."""
    from skyrl_megatron.entrypoints.embedded import write_embedded_model

    folder = tmp_path_factory.mktemp("sft")
    write_embedded_model(folder / "model")
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(64):
            messages = []
            for _ in range(draw.choice((1, 2))):
                first, second = draw.randint(0, 9), draw.randint(0, 9)
                messages.append({"role": "user", "content": f"What is {first} + {second}?"})
                messages.append({"role": "assistant", "content": f"the answer is {first + second}"})
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


def start(folder, place, **keys):
    """Start the command; what it writes is in ``place``."""
    own = {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"[{folder / 'rows.jsonl'}]",
        "data.val_data": f"[{folder / 'rows.jsonl'}]",
        "trainer.log_path": place / "logs",
        "trainer.ckpt_path": place / "ckpt",
        "trainer.export_path": place / "exports",
    }
    command = [sys.executable, "-m", "skyrl_megatron", "sft"]
    command += [f"{key}={value}" for key, value in (KEYS | own | keys).items()]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runs.environment(folder)
    )


def finish(process):
    out, err = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 0, (out[-4000:], err[-4000:])
    return out


def exported(place):
    return {path.name: path.read_bytes() for path in sorted((place / "exports/global_step_4/policy").iterdir())}


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(folder, output) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    return place, finish(start(folder, place))


def test_rows_are_learned(whole):
    place, out = whole
    lines = [json.loads(line) for line in (place / "logs/skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    losses = [line["eval/all/loss"] for line in lines if "eval/all/loss" in line]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0], losses
    assert "ended after step 4 of 4" in out and "model.safetensors" in "".join(exported(place))


@pytest.mark.full_matrix
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_is_resumed_bit_for_bit(folder, tmp_path, whole, step):
    process = start(folder, tmp_path)
    deadline = time.monotonic() + runs.TIMEOUT_S
    while not (tmp_path / f"ckpt/global_step_{step}").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(folder, tmp_path))
    assert exported(tmp_path) == exported(Path(whole[0]))
