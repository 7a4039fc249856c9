"""Runs that train several adapters together, from rows that say whose they are to engines that sample with each."""

import json
import os
import signal

import psutil
import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP, until_line
from tests.support.processes import left_behind

pytestmark = pytest.mark.vllm

LORA = "trainer__policy__model__lora__"
OWN = {"math": {}, "code": {"rank": 2, "alpha": 6, "lr": 0.02, "max_grad_norm": 0.05, "train_mlp": "false"}}
"""What each adapter has of its own."""
SHARED = {
    f"{LORA}rank": 4,
    f"{LORA}alpha": 8,
    f"{LORA}sync_mode": "memory",
    "trainer__algorithm__use_kl_loss": "true",
}
PLACES = {"lr": "trainer__policy__optimizer_config__", "max_grad_norm": "trainer__policy__optimizer_config__"}


def named(names=tuple(OWN)):
    """Settings of a run with some of the adapters."""
    own = (f"{name}: {{{', '.join(f'{key}: {value}' for key, value in OWN[name].items())}}}" for name in names)
    return SHARED | {f"{LORA}adapters": f"{{{', '.join(own)}}}"}


def alone(name):
    """Settings of a run that has one of them, without a name."""
    return SHARED | {f"{PLACES.get(key, LORA)}{key}": value for key, value in OWN[name].items()}


@pytest.fixture
def folder(tmp_path):
    return prepared(tmp_path)


def prepared(folder):
    """As :func:`runs.prepare`; a third of the rows is code's. The second batch of four has none of them."""
    runs.prepare(folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["adapter"] = "code" if number % 3 == 0 else "math"
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


RECORDS = """
import dataclasses, json, hashlib, torch
from pathlib import Path
out = Path(os.environ["OUT"])
def train_critic_and_policy(self, batch):
    torch.save(dataclasses.replace(batch, carried=None), out / f"batch_{self.global_step}.pt")
    RayPPOTrainer.train_critic_and_policy(self, batch)
def finish(self):
    state = self.policy.state_hashes()
    (out / "hashes.json").write_text(json.dumps(state))
    RayPPOTrainer.finish(self)
def postprocess_generator_output(self, output, uids):
    with (out / "versions.jsonl").open("a") as file:
        for uid, spans in zip(uids, output["rollout_versions"]):
            owner = self.train_dataset.adapters_of([uid])
            file.write(json.dumps([self.global_step, owner, spans]) + "\\n")
    return RayPPOTrainer.postprocess_generator_output(self, output, uids)
Trainer.train_critic_and_policy, Trainer.finish = train_critic_and_policy, finish
Trainer.postprocess_generator_output = postprocess_generator_output
"""


def replayed(arguments, folder, name):
    """Body of a rank: what an adapter holds that is trained alone on its rows of the recorded batches."""
    import hashlib
    from pathlib import Path

    import numpy as np
    import torch

    from skyrl_megatron.config import SkyRLTrainConfig, resolve
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.data.splitting import rows_with_trained_tokens, trained_rows
    from skyrl_megatron.runtime.checkpoint.rank_state import blocks_to_save
    from skyrl_megatron.runtime.engine import MegatronEngine
    from tests.lora.several import share

    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    assert resolve.fit_to_hardware(cfg, local_hardware()) == []
    engine = MegatronEngine(cfg)
    for file in sorted(Path(folder).glob("batch_*.pt")):
        batch = torch.load(file, weights_only=False)
        rows = np.flatnonzero(np.asarray(batch.adapters) == name)
        if not len(rows):
            continue
        part = batch.select(rows_with_trained_tokens(rows, trained_rows(batch)))
        part.adapters = []
        engine.forward_backward(share(engine, part, ("",)))
        engine.optim_step()
    hashes = {}
    for block in blocks_to_save(list(engine.chunks), engine.optimizer, engine.groups):
        data = block.data.detach().contiguous().view(-1).view(torch.uint8).numpy()
        hashes.setdefault(block.key, hashlib.sha256()).update(data.tobytes())
    return {key: digest.hexdigest() for key, digest in hashes.items()}


def one_step(folder, body="", **overrides):
    """A run of one step on one rank."""
    single = {
        "trainer__placement__policy_num_gpus_per_node": 1,
        "trainer__policy__megatron_config__expert_model_parallel_size": 1,
        "trainer__max_training_steps": 1,
    }
    return runs.run(folder, body, **(single | overrides))


def test_two_adapters_in_a_run(folder):
    """One step: each has its rows, its loss, its folder, and the engine agrees about both."""
    done = one_step(folder, **named(), trainer__hf_save_interval=1, trainer__ckpt_interval=1).check()
    (line,) = done.lines
    assert line[GAP] <= AGREE and line["trainer/weight_sync_probe_max_abs_diff"] <= AGREE
    for name in OWN:
        assert line[f"adapter/{name}/grad_norm"] > 0 and f"adapter/{name}/final_loss" in line
        assert 0 < line[f"adapter/{name}/avg_raw_reward"] < 1
        written = folder / f"exports/global_step_1/adapters/{name}/adapter_config.json"
        assert json.loads(written.read_text())["r"] == OWN[name].get("rank", 4)
    saved = json.loads((folder / "ckpts/global_step_1/MANIFEST.json").read_bytes())
    assert saved["bases"].keys() == {"policy/math", "policy/code"}


@pytest.mark.full_matrix
def test_each_adapter_is_as_if_trained_alone(ranks, folder, monkeypatch):
    """Three steps on two ranks, the second of which has no rows of ``code``; then each adapter alone, on its rows of
    what each step was trained on: SHA-256 of factors and moments. A row is sampled with the version of its adapter
    that was trained last."""
    monkeypatch.setenv("OUT", str(folder))
    steps = {"trainer__max_training_steps": 3, "trainer__deterministic": "true"}
    done = runs.run(folder, "import os\n" + RECORDS, **named(), **steps).check()
    assert max(line[GAP] for line in done.lines) <= AGREE
    assert [line.get("adapter/code/lr") for line in done.lines] == [0.02, None, 0.02]
    sampled = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    found = {(step, owner, version) for step, (owner,), spans in sampled for version, *_ in spans}
    assert found == {(0, "math", "0"), (0, "code", "0"), (1, "math", "1"), (2, "math", "2"), (2, "code", "1")}
    together = json.loads((folder / "hashes.json").read_text())
    for name in OWN:
        arguments = runs.arguments(folder, **alone(name), **steps)
        for rank, own in enumerate(ranks(2, replayed, arguments, str(folder), name)):
            mine = {key.removeprefix(f"{name}: "): of for key, of in together[rank].items() if key.startswith(name)}
            assert len(own) > 10 and own == {key: of for key, of in mine.items() if key != "rng"}, f"{name}, {rank}"


@pytest.mark.full_matrix
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """kill -9 behind step 3 of 4, with a checkpoint of step 2: the same factors, moments and random states of both."""
    keys = named() | {"trainer__max_training_steps": 4, "trainer__ckpt_interval": 2, "trainer__eval_interval": 4}
    found = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        prepared(folder)
        monkeypatch.setenv("OUT", str(folder))
        if name == "killed":
            process = runs.start(folder, "import os\n" + RECORDS, **keys)
            try:
                list(until_line(process, "step 3/4"))
                children = psutil.Process(process.pid).children(recursive=True)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.communicate(timeout=120)
            assert not left_behind(children)
            assert not (folder / "hashes.json").exists()
        done = runs.run(folder, "import os\n" + RECORDS, **keys).check()
        assert ("(step 2 of 4)" in done.out) == (name == "killed")
        assert {"eval/adapter/math/avg_score", "eval/adapter/code/avg_score"} <= done.lines[-1].keys()
        found.append(json.loads((folder / "hashes.json").read_text()))
    assert found[0] == found[1]
    assert {key.partition(":")[0] for key in found[0][0]} == {"math", "code"}


@pytest.mark.parametrize(
    "adapter, message", [(None, "no adapter is named"), ("poetry", "adapter 'poetry' is unknown")]
)
def test_rows_that_name_no_adapter_of_the_run_are_refused(folder, adapter, message):
    """Before anything starts."""
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.errors import ConfigError

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows[7]["adapter"] = adapter
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=f"row 7: {message}; trainer.policy.model.lora.adapters has math, code"):
        load_config(SkyRLTrainConfig, runs.arguments(folder, **named()), scripted=True)
