"""What a whole run comes to, and from which lengths of responses a step is estimated."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.bridges.tiny_models import tiny_config
from tests.support.whole_folder import write_sums


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The configuration of a run of a tiny model on one GPU, and what is estimated of it."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.load import parse
    from skyrl_megatron.config.validate import find_problems
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.step_report import RunEstimate

    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3", max_position_embeddings=4096)))
    data = write_sums(folder / "train.parquet", rows=1000)
    machine = Hardware(2, 1, 80 * 10**9, gpu="H100", elsewhere=True)

    def make(*changes):
        argv = [f"trainer.policy.model.path={folder}", f"data.train_data=['{data}']", "data.val_data=[]"]
        argv += [f"trainer.{name}_path={folder}/{name}" for name in ("log", "ckpt", "export")]
        argv += ["trainer.logger=console", "trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64"]
        argv += ["generator.n_samples_per_prompt=4", "generator.sampling_params.max_generate_length=1000", *changes]
        cfg, problems = parse(SkyRLTrainConfig, argv)
        assert not problems and not find_problems(cfg, machine)
        return cfg, RunEstimate.of(cfg, parameter_tables(cfg), machine)

    return make


def lines_of(estimate):
    return {line.partition(":")[0]: line for line in estimate.totals()}


@pytest.mark.parametrize(("mean", "limit"), [(100, 4096), (700, 1426), (3200, 3986)])
def test_log_normal_lengths_have_their_mean_and_limit(mean, limit):
    from skyrl_megatron_observe.estimate.lengths import log_normal

    drawn = log_normal(mean, limit, 2048)
    assert drawn.mean() == pytest.approx(mean, rel=0.01) and 1 <= drawn.min() and drawn.max() <= limit
    assert np.array_equal(drawn, log_normal(mean, limit, 2048)) and not np.array_equal(drawn, np.sort(drawn))
    if mean > limit / 2:
        assert drawn.max() == limit


def test_steps_hours_tokens_and_bytes_by_hand(planned):
    cfg, estimate = planned("trainer.epochs=2", "trainer.hf_save_interval=5", "trainer.max_ckpts_to_keep=3")
    lines, step = lines_of(estimate), estimate.step.step
    assert lines["steps"].startswith("steps: 30 (trainer.epochs=2): ")  # 1000 // 64 batches, twice
    hours = [
        float(word) for word in lines["steps"].replace("most ", "most\n").split() if word.replace(".", "").isdigit()
    ]
    assert hours[-1] == pytest.approx(30 * step.high / 3600, rel=0.05)
    assert lines["sampled"] == "sampled: 128 k tokens a step, at most 256 k; 3.84 M in all, at most 7.68 M"
    total = estimate.models["policy"].table.total()
    weights, states = 2 * total, 12 * total
    from skyrl_megatron_observe.estimate.memory_budget import gigabytes

    assert f"a checkpoint {gigabytes(weights + states)} (3 kept)" in lines["disk"]
    assert f"an export {gigabytes(weights)}" in lines["disk"] and "kept samples" in lines["disk"]


OFFLOADED = "{optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}"
MEGATRON = "trainer.policy.megatron_config"


@pytest.mark.parametrize(
    "changes",
    [
        [f"{MEGATRON}.optimizer_config_kwargs={OFFLOADED}"],
        ["trainer.bf16=false"],
        ["trainer.policy.model.lora.rank=8"],
    ],
    ids=["offload", "fp32", "adapters"],
)
def test_a_checkpoint_has_the_same_bytes_in_the_totals_and_in_the_check_of_the_disk(planned, changes):
    """Wherever the optimizer's state is kept between steps: a file has masters and moments once, in fp32."""
    from skyrl_megatron_observe.estimate.memory_budget import gigabytes, parameter_tables
    from skyrl_megatron_observe.estimate.run_totals import checkpoint_bytes
    from skyrl_megatron_observe.preflight.room_checks import written

    cfg, estimate = planned(*changes)
    model = estimate.models["policy"]
    trained = model.table.total() if model.adapters is None else model.factors(0).parameters
    size = trained * ((2 if cfg.trainer.bf16 else 4) + 12)
    assert checkpoint_bytes(model) == size
    assert f"a checkpoint {gigabytes(size)} (" in lines_of(estimate)["disk"]
    (checkpoint, *_) = written(cfg, parameter_tables(cfg), on_cpu=False)
    assert checkpoint.text.startswith(f"a checkpoint takes {gigabytes(size)}, ")


def test_sampled_groups_of_an_asynchronous_run(planned):
    ahead = ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]
    ahead += [
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.placement.colocate_policy_ref=true",
    ]
    _, estimate = planned(*ahead)
    assert "sampled groups " in lines_of(estimate)["disk"]


def test_lengths_by_the_setting(planned, tmp_path):
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron_observe.estimate.lengths import step_lengths

    cfg, _ = planned("trainer.expected_lengths=200")
    assert step_lengths(cfg).responses.mean() == pytest.approx(200, rel=0.02)
    (tmp_path / "lengths.txt").write_text("10\n20\n5000\n")
    cfg.trainer.expected_lengths = str(tmp_path / "lengths.txt")
    assert set(step_lengths(cfg).responses.tolist()) == {10, 20, 1000}  # the limit cuts them off
    step = {"step": 3, "generate/avg_num_tokens": 300.0, "generate/std_num_tokens": 100.0, "timing/step": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    cfg.trainer.expected_lengths = str(tmp_path / "metrics.jsonl")
    drawn = step_lengths(cfg).responses
    assert drawn.mean() == pytest.approx(300, rel=0.02) and drawn.std() == pytest.approx(100, rel=0.1)
    for wrong in ("many", "0", "1001", "/nowhere/metrics.jsonl"):
        cfg.trainer.expected_lengths = wrong
        with pytest.raises(ConfigError, match="give a number of tokens up to 1000"):
            step_lengths(cfg)


def test_a_resumed_run_counts_with_its_own_steps(planned, monkeypatch):
    """Its checkpoint says how many steps are done, its metrics how long they took and what was sampled."""
    from skyrl_megatron_observe.estimate import run_totals

    cfg, estimate = planned("trainer.epochs=2")
    steps = [
        {
            "step": step,
            "timing/step": 100.0 + step,
            "generate/avg_num_tokens": 100.0,
            "trainer/tokens_per_second": 512.0,
        }
        for step in range(1, 12)
    ]
    from skyrl_megatron.config.resolve import run_folder

    folder = run_folder(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    try:
        assert run_totals.StepsSoFar.of(cfg).seconds is None  # no checkpoint: the run begins anew
        monkeypatch.setattr(run_totals, "resumed_checkpoint", lambda cfg: SimpleNamespace(step=10))
        _, estimate = planned("trainer.epochs=2")
        lines = lines_of(estimate)
        assert lines["a step"] == "a step: 1m46s, 1m42s to 1m49s, measured in the last 10 steps"
        assert lines["steps"].startswith("steps: 30 (trainer.epochs=2), 20 of them left: 35m10s, at most 36m22s; ")
        assert "as this run sampled, 100 tokens on average" in estimate.lengths.source
        assert estimate.lengths.prompts[0] == round(512 * 105.5 / 256 - 100)
    finally:
        (folder / "metrics.jsonl").unlink()


def test_the_step_line_counts_what_is_left_from_the_last_steps(tmp_path, monkeypatch, capsys):
    """Not from the first step, which compiles; with what passes between steps."""
    from skyrl_megatron.trainer import console

    now = [1000.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0], strftime=lambda form: "then"))
    sink = console.ConsoleSink(tmp_path / "console.log")
    sink.start(100, 0)
    for step, seconds in [(1, 500.0), *((step, 10.0) for step in range(2, 30)), (30, 90.0)]:
        now[0] += seconds + 2.0
        sink.log({"timing/step": seconds}, step)
    etas = [line.rpartition("ETA ")[2] for line in capsys.readouterr().out.splitlines()]
    assert etas[0] == console.duration(500 * 99) and etas[1] == console.duration(12 * 98)
    assert etas[-1] == console.duration((19 * 12 + 92) / 20 * 70)
