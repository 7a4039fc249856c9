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
from tests.support import hub_endpoint

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


def start(folder, place, variables=None, **keys):
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
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=runs.environment(folder) | (variables or {}),
    )


def finish(process):
    out, err = process.communicate(timeout=runs.TIMEOUT_S)
    assert process.returncode == 0, (out[-4000:], err[-4000:])
    return out


def exported(place):
    return {path.name: path.read_bytes() for path in sorted((place / "exports/global_step_4/policy").iterdir())}


def metrics(place):
    text = (place / "logs/skyrl/test_run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(folder, output) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    return place, finish(start(folder, place))


def test_rows_are_learned(whole):
    place, out = whole
    losses = [line["eval/all/loss"] for line in metrics(place) if "eval/all/loss" in line]
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


M = "trainer.policy.megatron_config."
LAYOUTS = {"dp2·ep2": {}, "tp2": {f"{M}expert_model_parallel_size": 1, f"{M}tensor_model_parallel_size": 2}}
KINDS = {
    "adapters": {"trainer.policy.model.lora.rank": 8, "trainer.policy.model.lora.alpha": 16},
    "router frozen, near the initial model": {
        f"{M}freeze_moe_router": "true",
        "trainer.algorithm.use_kl_loss": "true",
        "trainer.algorithm.kl_loss_coef": 0.5,
    },
}


@pytest.mark.full_matrix
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_learn_the_same(folder, tmp_path, kind):
    """Two data sets by weight, one of them of a hub; the exported folder has whole weights, also of adapters."""
    import torch
    from safetensors.torch import load_file

    rows = (folder / "rows.jsonl").read_bytes()
    short = {"trainer.max_training_steps": 2, "trainer.hf_save_interval": 2, "trainer.eval_interval": 0}
    short |= {"trainer.eval_before_train": "false", f"{M}optimizer_config_kwargs.adam_eps": 1e-3}
    mixed = {"data.train_data": f"[{folder / 'rows.jsonl'},acme/talks]", "data.sampler": "mixture"}
    mixed |= {"data.sampler_options.weights": "[3,1]"}
    losses, weights = {}, {}
    with hub_endpoint.serve() as hub:
        hub.repository("datasets/acme/talks").push({"train.jsonl": rows.replace(b"the answer is", b"it is")})
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
        for name, layout in LAYOUTS.items():
            place = tmp_path / name
            out = finish(start(folder, place, variables, **(short | mixed | layout | KINDS[kind])))
            assert "hub: datasets/acme/talks@main is commit" in out
            losses[name] = [line["sft/loss"] for line in metrics(place) if "sft/loss" in line]
            kl = [line["policy/policy_kl"] for line in metrics(place) if "policy/policy_kl" in line]
            assert kl == [] if kind == "adapters" else kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6
            weights[name] = load_file(place / "exports/global_step_2/policy/model.safetensors")
            adapter = place / "exports/global_step_2/adapter/adapter_config.json"
            assert adapter.exists() == (kind == "adapters")
    first, second = weights.values()
    assert losses["tp2"] == pytest.approx(losses["dp2·ep2"], rel=1e-5) and len(losses["tp2"]) == 2
    start_weights = load_file(folder / "model/model.safetensors")
    assert first.keys() == second.keys() == start_weights.keys()
    moved = {tensor for tensor in first if not torch.equal(first[tensor], start_weights[tensor])}
    gates = {tensor for tensor in first if tensor.endswith("mlp.gate.weight")}
    assert moved and gates and not moved & gates, "neither adapters of linear layers nor a frozen router change it"
    assert max(float((first[tensor] - second[tensor]).abs().max()) for tensor in first) <= 2e-5
