"""One model by three stages: each begins with the folder that the one before exported."""

import json
import subprocess
import sys

import pytest

from tests.examples.commands import EXAMPLES, environment

STEPS = {"sft": 60, "grpo": 3, "dpo": 4}


@pytest.mark.full_matrix
@pytest.mark.vllm
def test_a_model_passes_through_all_stages(tmp_path):
    script, steps = EXAMPLES / "sft_grpo_dpo/run.py", [str(count) for count in STEPS.values()]
    command = [sys.executable, "-P", str(script), str(tmp_path / "sums"), "--steps", *steps]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines, exports = {}, {}
    for stage, count in STEPS.items():
        (file,) = (tmp_path / "sums" / stage / "log").rglob("metrics.jsonl")
        lines[stage] = [json.loads(line) for line in file.read_text().splitlines()]
        assert lines[stage][-1]["step"] == count
        exports[stage] = tmp_path / "sums" / stage / f"export/global_step_{count}/policy"
        assert (exports[stage] / "model.safetensors").exists()
        assert (tmp_path / "sums" / stage / f"ckpt/global_step_{count}/MANIFEST.json").exists()
    for before, after in (("sft", "grpo"), ("grpo", "dpo")):
        assert f"trainer.policy.model.path={exports[before]}" in done.stdout.partition(f"# {after}\n")[2]
    losses = [line["eval/all/loss"] for line in lines["sft"] if "eval/all/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert max(line.get("reward/avg_raw_reward", 0) for line in lines["grpo"]) > 0
    first, *_, last = (line["dpo/loss"] for line in lines["dpo"] if "dpo/loss" in line)
    assert first == pytest.approx(0.6931, abs=1e-3) and last < first, "the reference is the policy at step 0"
