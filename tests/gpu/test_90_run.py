"""The whole: two steps on one GPU that policy, reference and engine share."""

import pytest

from tests.gpu import installed
from tests.job import runs

pytestmark = pytest.mark.needs("ray")
PROVES = "a colocated run samples, scores, trains, saves and syncs, and trainer and engine agree on every token"
REPORT = "console.log, metrics.jsonl and workers/ of the run's folder"
SHARED = {
    "trainer__placement__policy_num_gpus_per_node": 1,
    "trainer__placement__ref_num_gpus_per_node": 1,
    "trainer__policy__megatron_config__expert_model_parallel_size": 1,
    "trainer__algorithm__use_kl_loss": "true",
    "trainer__ckpt_interval": 1,
    "generator__inference_engine__gpu_memory_utilization": 0.3,
    "generator__inference_engine__weight_sync_probe_interval": 1,
}


@pytest.mark.parametrize("layers", installed.layer_choices())
def test_two_colocated_steps(tmp_path, layers):
    choice = {"trainer__policy__megatron_config__transformer_config_kwargs__transformer_impl": layers}
    here = {name.replace(".", "__"): value for name, value in installed.run_settings().items()}
    done = runs.run(runs.prepare(tmp_path), **SHARED | here | choice).check()
    one, two = [line for line in done.lines if line["step"]]
    for line in (one, two):
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 0.1, "nats, bf16"
        assert line["policy/skipped"] == 0
    assert one["policy/policy_kl"] == pytest.approx(0, abs=1e-3), "the reference is what the policy was"
    assert two["policy/policy_kl"] > 0, "the policy has moved"
    assert (tmp_path / "ckpts/latest_ckpt_global_step.txt").read_text().strip() == "2"
