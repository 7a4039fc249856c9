"""``skyrl-megatron dpo`` as users start it."""

import json
import math
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
    "dpo.max_length": 256,
    "dpo.beta": 0.5,
    "trainer.train_batch_size": 16,
    "trainer.epochs": 1,
    "trainer.eval_interval": 4,
    "trainer.ckpt_interval": 1,
    "trainer.hf_save_interval": 4,
    "trainer.bf16": "false",
    "trainer.logger": "console",
    "trainer.policy.optimizer_config.lr": 1e-3,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.placement.ref_num_gpus_per_node": 2,
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 pairs of a right and a wrong sum, as labelled answers too, and a model."""
    from skyrl_megatron.entrypoints.embedded import write_embedded_model

    folder = tmp_path_factory.mktemp("dpo")
    write_embedded_model(folder / "model")
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as pairs, (folder / "labelled.jsonl").open("w") as labelled:
        for number in range(64):
            first, second = draw.randint(0, 9), draw.randint(0, 9)
            prompt = [{"role": "user", "content": f"What is {first} + {second}?"}]
            right = [{"role": "assistant", "content": f"the answer is {first + second}"}]
            wrong = [{"role": "assistant", "content": f"no idea, {draw.randint(30, 60)} perhaps"}]
            pair = {"chosen": prompt + right, "rejected": prompt + wrong}
            pairs.write(
                json.dumps(pair if number % 2 else {"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n"
            )
            answer = {"prompt": prompt, "completion": right if number % 2 else wrong, "label": bool(number % 2)}
            labelled.write(json.dumps(answer) + "\n")
    return folder


def start(folder, place, data="pairs", **keys):
    """Start the command; what it writes is in ``place``."""
    own = {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"[{folder / f'{data}.jsonl'}]",
        "data.val_data": f"[{folder / f'{data}.jsonl'}]",
        "trainer.log_path": place / "logs",
        "trainer.ckpt_path": place / "ckpt",
        "trainer.export_path": place / "exports",
    }
    command = [sys.executable, "-m", "skyrl_megatron", "dpo"]
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


def metrics_of(place):
    return [json.loads(line) for line in (place / "logs/skyrl/test_run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(folder, output) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    return place, finish(start(folder, place))


def test_the_better_answers_are_preferred(whole):
    """The reference is the policy at first, so the loss begins at log 2."""
    place, out = whole
    lines = metrics_of(place)
    steps = [line for line in lines if "dpo/loss" in line]
    assert steps[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5) and len(steps) == 4
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    held_out = [line for line in lines if "eval/all/loss" in line]
    assert held_out[0]["eval/all/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert held_out[-1]["eval/all/loss"] < 0.6 and held_out[-1]["eval/all/rewards/accuracies"] > 0.8
    assert held_out[-1]["eval/pairs.jsonl/rewards/margins"] > 0.2
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


ADAPTERS = {"trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.alpha": 16}


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "loss, data, keys",
    [("sigmoid", "pairs", ADAPTERS), ("ipo", "pairs", {}), ("kto", "labelled", {})],
    ids=["lora", "ipo", "kto"],
)
def test_other_losses_and_a_reference_without_adapters(folder, tmp_path, loss, data, keys):
    """With adapters there is one model; its loss begins at log 2 too. ``ipo`` begins at 1/(2β)², ``kto`` at 1/2."""
    out = finish(start(folder, tmp_path, data, **{"dpo.loss": loss, "trainer.hf_save_interval": -1}, **keys))
    losses = [line["dpo/loss"] for line in metrics_of(tmp_path) if "dpo/loss" in line]
    assert losses[0] == pytest.approx({"sigmoid": math.log(2), "ipo": 1.0, "kto": 0.5}[loss], abs=1e-4)
    held_out = [line["eval/all/loss"] for line in metrics_of(tmp_path) if "eval/all/loss" in line]
    assert held_out[-1] < held_out[0]
    assert ("ref on" in out) == (not keys)


@pytest.mark.full_matrix
def test_log_probs_of_the_reference_are_kept(folder, tmp_path, whole):
    """The second run starts no reference and takes the same steps. A cache of other data is not used."""
    cache = {"dpo.reference_cache": tmp_path / "cache"}
    first = finish(start(folder, tmp_path / "first", **cache))
    assert "ref on 2" in first and "log-probs of 64 rows are in" in first
    second = finish(start(folder, tmp_path / "second", **cache))
    assert "ref on" not in second and "its log-probs are in" in second
    assert exported(tmp_path / "first") == exported(tmp_path / "second")
    losses = [
        [line["dpo/loss"] for line in metrics_of(place) if "dpo/loss" in line]
        for place in (tmp_path / "second", whole[0])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    keys = {
        "data.train_data": f"[{folder / 'fewer.jsonl'}]",
        "trainer.max_training_steps": 1,
        "trainer.hf_save_interval": -1,
    }
    (folder / "fewer.jsonl").write_text("".join((folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:32]))
    third = finish(start(folder, tmp_path / "third", **cache, **keys))
    assert "train.safetensors is of another data: the log-probs of the reference are computed again" in third
    assert "ref on 2" in third and "log-probs of 32 rows are in" in third
