"""Folders that all nodes must see, disk for what a run writes, and Ray's object store against a step's rows."""

import pytest

from skyrl_megatron.checks import NotChecked, PlannedRun
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.resolve import fit_to_hardware
from skyrl_megatron.errors import Problem
from tests.support.released_models import DEEPSEEK_V3, QWEN3_30B_A3B
from tests.support.shared_folder import share
from tests.support.whole_folder import write_whole_folder

T = "trainer."
HERE = Hardware(8, 1, 80 << 30, 10**12)
FOUR = Hardware(8, 4, 80 << 30, 10**12, elsewhere=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_whole_folder(tmp_path_factory.mktemp("model"), QWEN3_30B_A3B)


@pytest.fixture(scope="module")
def largest(tmp_path_factory):
    return write_whole_folder(tmp_path_factory.mktemp("largest"), DEEPSEEK_V3)


def planned(model, hardware, *keys):
    given = [f"{T}policy.model.path={model}", f"{T}placement.policy_num_gpus_per_node=8", f"{T}logger=console"]
    given += [f"{T}policy.megatron_config.expert_model_parallel_size=8", f"{T}train_batch_size=128"]
    keys = dict(one.split("=", 1) for one in [*given, *keys])
    cfg = SkyRLTrainConfig.from_cli_overrides([f"{key}={value}" for key, value in keys.items()])
    fit_to_hardware(cfg, hardware)
    return PlannedRun(cfg, hardware, check_only=True)


SHARED = [f"{T}{name}_path=/shared/runs" for name in ("log", "ckpt", "export")]


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        (SHARED, []),
        (
            [],
            [f"{T}log_path=/tmp/skyrl-logs: 4 nodes must see this folder: name one on a file system that they share"],
        ),
        (
            [*SHARED, f"{T}ckpt_path=/tmp/ckpts", f"{T}export_path=/dev/shm/exports"],
            [f"{T}ckpt_path=/tmp/ckpts: 4 nodes must see this folder, and so must {T}export_path: name one"],
        ),
        ([*SHARED, f"{T}ckpt_path=s3://bucket/run"], []),
        ([f"{T}placement.policy_num_nodes=1"], []),
    ],
)
def test_a_folder_of_each_node_alone_is_refused(model, keys, lines, monkeypatch):
    from skyrl_megatron_observe.preflight.room_checks import shared_folders

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")  # a home below /tmp is a folder of each node too
    run = planned(model, FOUR, f"{T}placement.policy_num_nodes=4", *keys)
    assert [str(problem)[: len(line)] for problem, line in zip(shared_folders(run), lines, strict=True)] == lines
    run = planned(model, Hardware(0, 4, elsewhere=True), f"{T}placement.policy_num_nodes=4", *keys)
    assert list(shared_folders(run)) == []


def test_a_file_system_of_the_network_may_be_mounted_anywhere(model, monkeypatch, tmp_path):
    from skyrl_megatron_observe.preflight import room_checks

    share(tmp_path, monkeypatch)
    monkeypatch.delenv("TMPDIR", raising=False)
    names = [f"{T}{name}_path={tmp_path}/runs" for name in ("log", "ckpt", "export")]
    run = planned(model, FOUR, f"{T}placement.policy_num_nodes=4", *names)
    assert list(room_checks.shared_folders(run)) == []
    run.cfg.trainer.ckpt_path = "/tmp/runs"
    assert [problem.key for problem in room_checks.shared_folders(run)] == [f"{T}ckpt_path"]


KEPT = [f"{T}max_ckpts_to_keep=2", f"{T}ckpt_interval=10", f"{T}hf_save_interval=50", f"{T}max_training_steps=100"]


def test_what_a_run_writes(model, tmp_path):
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.preflight.room_checks import written

    cfg = planned(model, HERE, f"{T}ckpt_path={tmp_path}", *KEPT).cfg
    first, second = written(cfg, parameter_tables(cfg), on_cpu=False)
    assert first.key == f"{T}ckpt_path" and first.text == "a checkpoint takes 427.45 GB, 3 at a time 1.28 TB"
    assert second.key == f"{T}export_path" and second.text == "an export takes 61.06 GB, 2 of them 122.13 GB"
    for step in (10, 20):  # they are replaced
        (tmp_path / f"global_step_{step}").mkdir()
    assert next(written(cfg, parameter_tables(cfg), on_cpu=False)).text.endswith("1 at a time 427.45 GB")


def test_a_disk_that_is_too_small(largest, tmp_path):
    """Ten checkpoints of the largest model, more than a machine has."""
    from skyrl_megatron_observe.preflight.room_checks import room

    keys = [*KEPT, f"{T}ckpt_path={tmp_path}", f"{T}export_path={tmp_path}/exports", f"{T}max_ckpts_to_keep=9"]
    first, *_ = room(planned(largest, HERE, *keys))
    assert isinstance(first, Problem) and first.key == f"{T}ckpt_path"
    assert "10 at a time 93.94 TB, and " in first.fix and "free there: name a folder with more room" in first.fix
    assert {type(one) for one in room(planned(largest, FOUR, *keys))} == {NotChecked}, "disks of other machines"
    without = [f"{T}ckpt_interval=-1", f"{T}hf_save_interval=-1"]
    assert list(room(planned(largest, FOUR, *without))) == []


@pytest.mark.parametrize(("size", "told"), [(10**12, False), (64 * 10**9, True)])
def test_rows_of_a_step_against_the_object_store(model, size, told):
    from skyrl_megatron_observe.preflight.room_checks import room, row_bytes

    keys = ["generator.sampling_params.max_generate_length=31000", "generator.n_samples_per_prompt=16"]
    keys += [f"{T}policy.megatron_config.moe_enable_routing_replay=true", f"{T}train_batch_size=512"]
    run = planned(model, Hardware(8, 1, 80 << 30, size, elsewhere=True), *keys, *SHARED, f"{T}ckpt_interval=-1")
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables

    needed = row_bytes(run.cfg, parameter_tables(run.cfg)["policy"])
    assert needed == 512 * 16 * (31000 + 512) * (30 + 48 * 8)
    assert [str(one).startswith("object store: the rows of a step take up to 106.87 GB") for one in room(run)] == [
        True
    ] * told


@pytest.mark.process
def test_a_driver_that_does_not_answer(model, tmp_path, monkeypatch):
    """Its files are there, so GPUs are counted; nothing can use them."""
    from skyrl_megatron_observe.preflight.machine_checks import machine

    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    first, *_ = machine(planned(model, Hardware(8, 1)))
    assert str(first).startswith("GPUs=8: nvidia-smi does not answer, so no GPU can be used")
    assert all(isinstance(one, NotChecked) for one in machine(planned(model, FOUR)))
