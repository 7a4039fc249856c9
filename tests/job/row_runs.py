"""Runs on rows of data (``sft``, ``dpo``, ``reward``) as users start them, and how ``kill -9`` ends them."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

from tests.job import runs

KEYS = {
    "trainer.train_batch_size": 16,
    "trainer.epochs": 1,
    "trainer.eval_interval": 4,
    "trainer.ckpt_interval": 2,
    "trainer.hf_save_interval": 4,
    "trainer.bf16": "false",
    "trainer.logger": "console",
    "trainer.policy.optimizer_config.lr": 1e-3,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.policy.megatron_config.expert_model_parallel_size": 2,
}
"""Four steps of sixteen rows, experts over two ranks."""
OF_VERB = {
    "sft": {"sft.max_length": 256},
    "dpo": {"dpo.max_length": 256, "dpo.beta": 0.5, "trainer.placement.ref_num_gpus_per_node": 2},
    "reward": {"reward.max_length": 256},
}
DATA = {"sft": "talks", "dpo": "pairs", "reward": "scored"}


def prepare(folder):
    """A model, and 64 rows of each kind about sums: conversations of one and two turns, pairs of a right and a wrong
    answer without and with a margin, and labelled answers."""
    from skyrl_megatron.tiny_model import write_embedded_model

    write_embedded_model(folder / "model")
    rows, draw = {name: [] for name in ("talks", "pairs", "scored", "labelled")}, random.Random(0)

    def question():
        first, second = draw.randint(0, 9), draw.randint(0, 9)
        asked = {"role": "user", "content": f"What is {first} + {second}?"}
        return asked, {"role": "assistant", "content": f"the answer is {first + second}"}

    for number in range(64):
        turns = [question() for _ in range(draw.choice((1, 2)))]
        rows["talks"].append({"messages": [message for turn in turns for message in turn]})
        asked, right = question()
        wrong = {"role": "assistant", "content": f"no idea, {draw.randint(30, 60)} perhaps"}
        pair = {"prompt": [asked], "chosen": [right], "rejected": [wrong]}
        rows["pairs"].append(pair if number % 2 else {"chosen": [asked, right], "rejected": [asked, wrong]})
        rows["scored"].append(pair | {"margin": 0.5})
        label = bool(number % 2)
        rows["labelled"].append({"prompt": [asked], "completion": [right if label else wrong], "label": label})
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return folder


def start(verb, folder, place, variables=None, *, data=None, **keys):
    """The process of a run; what it writes is in ``place``."""
    rows = folder / f"{data or DATA[verb]}.jsonl"
    own = {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"[{rows}]",
        "data.val_data": f"[{rows}]",
        "trainer.log_path": place / "logs",
        "trainer.ckpt_path": place / "ckpt",
        "trainer.export_path": place / "exports",
    }
    command = [sys.executable, "-m", "skyrl_megatron", verb]
    command += [f"{key}={value}" for key, value in (KEYS | OF_VERB[verb] | own | keys).items()]
    environment = runs.environment(folder) | (variables or {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process):
    """What a run printed, which ended well."""
    out, err = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 0, (out[-4000:], err[-4000:])
    return out


def run(verb, folder, place, **keys):
    """What a run printed, from start to end."""
    return finish(start(verb, folder, place, **keys))


def exported(place, step=4):
    """Name → content of the files of an export."""
    folder = place / f"exports/global_step_{step}/policy"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def metrics_of(place):
    """The complete lines of metrics.jsonl."""
    path = place / "logs/skyrl/test_run/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps_of(place):
    """The lines of training steps."""
    return [line for line in metrics_of(place) if "timing/step" in line]


EVALUATION = "the first evaluation"
MOMENTS = {
    EVALUATION: (lambda place: True, lambda place: metrics_of(place)),
    "a checkpoint": (lambda place: (place / "ckpt/global_step_2.tmp").exists(), lambda place: _saved(place, 2)),
    "a step": (lambda place: len(steps_of(place)) == 3, lambda place: _saved(place, 4)),
    "the reference": (
        lambda place: (place / "cache/train.safetensors").exists(),
        lambda place: (place / "cache/eval.safetensors").exists(),
    ),
}
"""What is computed or written: (whether it has begun, whether it has ended)."""


def _saved(place, step):
    return (place / f"ckpt/global_step_{step}").exists()


def kill_during(moment, process, place):
    """End a run by ``kill -9`` while it computes or writes ``moment``."""
    begun, ended = MOMENTS[moment]
    if moment == EVALUATION:
        list(runs.until_line(process, "models: "))
    deadline = time.monotonic() + runs.TIMEOUT_S
    while not begun(place):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, moment
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not ended(place), f"it was too late for {moment}"
