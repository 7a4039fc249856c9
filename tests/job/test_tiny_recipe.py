"""The recipe for a tiny model of one's own on two cores, as it is typed."""

import json
import subprocess

import pytest

from tests.job import runs
from tests.support.whole_folder import write_sums

ROOT = runs.Path(__file__).resolve().parents[2]


@pytest.mark.vllm
@pytest.mark.full_matrix
def test_a_tiny_moe_takes_steps_on_its_own_data(tmp_path):
    from skyrl_megatron.tiny_model import write_embedded_model

    model = write_embedded_model(tmp_path / "model", 1)
    rows = write_sums(tmp_path / "rows.parquet", 64)
    words = ["--recipe", "tiny-moe-cpu", f"model={model}", f"data.train_data=['{rows}']", f"data.val_data=['{rows}']"]
    words += ["environment.env_class=gsm8k", "trainer.epochs=2", "trainer.phase_timeout_s=600"]
    words += [f"trainer.{name}_path={tmp_path}/{name}" for name in ("ckpt", "export", "log")]
    done = subprocess.run(
        [ROOT / "launch" / "run_moe.sh", *words],
        env=runs.environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
