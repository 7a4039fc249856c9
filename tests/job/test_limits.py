"""Which setting ends a run, and what is left to do of one that has taken its last step."""

import json
import shutil

import pytest

from tests.job import runs


def config(folder, **overrides):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.hardware import local_hardware
    from skyrl_megatron.config.validate import find_problems

    cfg = SkyRLTrainConfig.from_cli_overrides(runs.arguments(folder, **overrides))
    assert not find_problems(cfg, local_hardware())
    return cfg


@pytest.mark.parametrize(
    ("epochs", "most", "steps", "setting", "says"),
    [
        (1, None, 9, "trainer.epochs=1", ""),
        (2, 9, 9, "trainer.max_training_steps=9", ""),
        (1, 9, 9, "trainer.max_training_steps=9", ""),
        (1, 30, 9, "trainer.epochs=1", "trainer.epochs=1 ends the run at step 9, before "),
    ],
)
def test_the_setting_that_ends_a_run(epochs, most, steps, setting, says):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.stopping import step_limit

    cfg = SkyRLTrainConfig()
    cfg.trainer.epochs, cfg.trainer.max_training_steps = epochs, most
    limit = step_limit(cfg, 9)
    assert (limit.steps, limit.setting) == (steps, setting)
    assert limit.note.startswith(says) and bool(limit.note) == bool(says)


@pytest.fixture
def finished(tmp_path):
    return leave(runs.prepare(tmp_path))


def leave(folder, identity=None):
    """What a run of two steps leaves: model, data, a checkpoint without weights, and its numbers."""
    from skyrl_megatron.runtime.checkpoint.store import DATA, TRAINER_STATE, CheckpointStore, json_bytes

    store = CheckpointStore(folder / "ckpts", identity=identity)
    store.begin(2, {"policy": 0})
    files = [{"name": "prompts.jsonl", "bytes": (folder / "prompts.jsonl").stat().st_size, "sha256": ""}]
    data = {"epoch": 0, "batch": 2, "rows": 40, "batch_size": 4, "seed": 42, "files": files}
    extras = {DATA: json_bytes(data, DATA), TRAINER_STATE: json_bytes({}, TRAINER_STATE)}
    store.commit(2, {}, extras, timeout_s=60)
    store.close()
    log = folder / "logs/skyrl/run"
    log.mkdir(parents=True)
    (log / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n" + json.dumps({"step": 2}) + "\n")
    return folder


def test_a_finished_run_has_nothing_left_to_do(finished):
    from skyrl_megatron.trainer.stopping import remaining_work

    left = remaining_work(config(finished))
    assert left.nothing and str(left).startswith("nothing left to do: the checkpoint of step 2 of 2 exists")
    assert "trainer.max_training_steps=2" in str(left)


@pytest.mark.parametrize(
    ("overrides", "due"),
    [
        ({"trainer__hf_save_interval": 5}, "left to do: export policy"),
        ({"trainer__eval_interval": 5}, "left to do: evaluate"),
        ({"trainer__run_name": "another"}, "left to do: log its metrics"),
    ],
)
def test_what_is_asked_for_later_is_left_to_do(finished, overrides, due):
    from skyrl_megatron.trainer.stopping import remaining_work

    left = remaining_work(config(finished, **overrides))
    assert not left.nothing and str(left).startswith(due), left


@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer__max_training_steps": 3},
        {"trainer__resume_mode": "none"},
        {"trainer__train_batch_size": 8},
        {"trainer__seed": 7},
        {"data__train_data": "more"},
    ],
)
def test_what_only_the_run_can_tell_is_left_to_it(finished, overrides):
    """Steps that are left, a start anew, and data or batches that are not those of the checkpoint."""
    from skyrl_megatron.trainer.stopping import remaining_work

    if overrides.get("data__train_data"):
        with (finished / "prompts.jsonl").open("a") as file:
            file.write((finished / "prompts.jsonl").read_text().splitlines()[0] + "\n")
        overrides = {}
    assert remaining_work(config(finished, **overrides)) is None


@pytest.mark.parametrize("wrong", ["data", "model"])
def test_what_is_gone_is_no_mistake_but_a_wrong_name_is(tmp_path, wrong):
    """The checkpoint names its model and its data."""
    from skyrl_megatron.identity import as_json, run_identity
    from skyrl_megatron.trainer.stopping import remaining_work

    folder = runs.prepare(tmp_path)
    finished = leave(folder, as_json(run_identity(config(folder))))

    def left(**overrides):
        from skyrl_megatron.config import SkyRLTrainConfig
        from skyrl_megatron.config.hardware import local_hardware
        from skyrl_megatron.config.validate import find_problems

        cfg = SkyRLTrainConfig.from_cli_overrides(runs.arguments(finished, **overrides))
        find_problems(cfg, local_hardware())
        return remaining_work(cfg)

    assert left().nothing
    data = {"data__train_data": f"['{finished}/promts.jsonl']"}
    assert left(**(data if wrong == "data" else {"trainer__policy__model__path": "Qwen/Qwen3-typo"})) is None
    (finished / "prompts.jsonl").unlink()
    for path in (finished / "model").glob("*.safetensors"):
        path.unlink()
    assert left().nothing


@pytest.mark.parametrize("folder", ["/runs/ckpts", "/runs/ckpts/", "s3://bucket/ckpts/"])
def test_the_last_checkpoint_is_a_path_to_paste(folder):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.trainer.stopping import summary_lines

    cfg = SkyRLTrainConfig()
    cfg.trainer.ckpt_path = folder
    assert f"checkpoint: {folder.removesuffix('/')}/global_step_3" in summary_lines(cfg, 3, 3)


@pytest.mark.process
def test_the_command_says_so_before_anything_is_loaded(finished, capsys):
    """Neither model nor data are looked at: they may be gone."""
    from skyrl_megatron.entrypoints import main_base

    for path in (finished / "model").glob("*.safetensors"):
        path.unlink()
    args = runs.arguments(finished, environment__env_class="gsm8k")
    assert main_base.main(args) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("nothing left to do") and out[-1] == f"checkpoint: {finished}/ckpts/global_step_2"
    shutil.rmtree(finished / "ckpts")
    assert main_base.main(args) == 2, "without a checkpoint the missing weights are an error"
