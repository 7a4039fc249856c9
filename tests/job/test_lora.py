"""A run that trains adapters: its reference is the policy without them, engines get merged weights, a checkpoint holds
adapters alone, and the export opens in PEFT."""

import json

import psutil
import pytest

from tests.job import runs
from tests.job.runs import AGREE, GAP, until_line
from tests.job.test_run_matrix import HASHES
from tests.support.processes import left_behind

pytestmark = pytest.mark.vllm

LORA = {
    "trainer__policy__model__lora__rank": 4,
    "trainer__policy__model__lora__alpha": 8,
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__hf_save_interval": 2,
}


@pytest.fixture
def folder(tmp_path):
    return runs.prepare(tmp_path)


@pytest.mark.full_matrix
def test_a_run_of_adapters_and_its_continuation(folder):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    done = runs.run(folder, **LORA).check()
    models = next(line for line in done.out.splitlines() if line.startswith("models: "))
    assert "policy on 2" in models and "ref" not in models
    one, two = done.lines
    assert one["policy/policy_kl"] == 0.0 < two["policy/policy_kl"], "the reference stays where the adapters began"
    assert max(line[GAP] for line in done.lines) <= AGREE, "the engine has the adapters in its weights"

    saved, exported = folder / "ckpts/global_step_2", folder / "exports/global_step_2"
    assert json.loads((saved / "MANIFEST.json").read_bytes())["bases"].keys() == {"policy"}
    size = sum(file.stat().st_size for file in (saved / "policy").glob("*.distcp"))
    assert size < 0.5 * sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(exported / "adapter")).merge_and_unload().state_dict()
    policy = AutoModelForCausalLM.from_pretrained(exported / "policy", dtype=torch.float32).state_dict()
    assert max(float((policy[name] - merged[name]).abs().max()) for name in policy) < 1e-6
    assert load_file(exported / "adapter/adapter_model.safetensors")

    again = runs.run(folder, **LORA, trainer__max_training_steps=3).check()
    assert "(step 2 of 3)" in again.out and again.lines[-1][GAP] <= AGREE
    other = runs.run(folder, trainer__max_training_steps=4, trainer__algorithm__use_kl_loss="true")
    assert other.returncode == 2 and "its adapters are of rank 4, alpha 8, this run's are none" in other.err
    assert "Traceback" not in other.err


@pytest.mark.full_matrix
def test_a_run_whose_adapters_travel_alone(folder):
    """The engine keeps the base and gets adapters; a continued run's engine starts anew and gets what was saved."""
    alone = LORA | {"trainer__policy__model__lora__sync_mode": "memory"}
    done = runs.run(folder, **alone).check()
    assert len(done.lines) == 2 and max(line[GAP] for line in done.lines) <= AGREE
    again = runs.run(folder, **alone, trainer__max_training_steps=3).check()
    assert "(step 2 of 3)" in again.out and again.lines[-1][GAP] <= AGREE


@pytest.mark.full_matrix
def test_a_run_of_an_adapter_with_a_name(folder):
    """It goes by its name in metrics, checkpoint and export, with settings of its own, and continues."""
    named = LORA | {"trainer__policy__model__lora__adapters": "{math: {lr: 0.02}}"}
    done = runs.run(folder, **named).check()
    assert [line["adapter/math/lr"] for line in done.lines] == [0.02] * 2
    assert done.lines[1]["adapter/math/final_loss"] == done.lines[1]["policy/final_loss"]
    assert "adapter/math/avg_final_rewards" in done.lines[0] and max(line[GAP] for line in done.lines) <= AGREE
    saved, exported = folder / "ckpts/global_step_2", folder / "exports/global_step_2"
    assert json.loads((saved / "MANIFEST.json").read_bytes())["bases"].keys() == {"policy/math"}
    assert (exported / "adapters/math/adapter_config.json").is_file()
    again = runs.run(folder, **named, trainer__max_training_steps=3).check()
    assert "(step 2 of 3)" in again.out and again.lines[-1][GAP] <= AGREE


@pytest.mark.full_matrix
def test_a_killed_run_of_adapters_goes_on_as_if_it_had_not_been(tmp_path):
    """kill -9 behind step 3 of 4, with a checkpoint of step 2: SHA-256 over factors, moments, random states and all
    ids sampled after the checkpoint."""
    keys = LORA | {"trainer__max_training_steps": 4, "trainer__ckpt_interval": 2, "trainer__hf_save_interval": 0}
    found = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        runs.prepare(folder)
        if name == "killed":
            process = runs.start(folder, HASHES, **keys)
            try:
                list(until_line(process, "step 3/4"))
                children = psutil.Process(process.pid).children(recursive=True)
            finally:
                process.kill()
                process.communicate(timeout=120)
            assert not left_behind(children)
            assert not (folder / "exports/hashes.json").exists()
        out = runs.run(folder, HASHES, **keys).check().out
        assert ("(step 2 of 4)" in out) == (name == "killed")
        found.append(json.loads((folder / "exports/hashes.json").read_text()))
    whole, killed = found
    assert whole == killed
    factors = [name for rank in whole[0] for name in rank if name.endswith((".A", ".B"))]
    assert factors and all("adapters." in name for name in factors)
