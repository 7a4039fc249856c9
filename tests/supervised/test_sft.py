"""``skyrl-megatron sft`` as users start it."""

import shutil

import pytest

from tests.job import row_runs
from tests.job.row_runs import exported, metrics_of, run, steps_of
from tests.support import hub_endpoint

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return row_runs.prepare(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """(folder, output) of a run that nothing interrupts."""
    place = tmp_path_factory.mktemp("whole")
    return place, run("sft", folder, place)


def test_rows_are_learned(whole):
    place, out = whole
    losses = [line["eval/all/loss"] for line in metrics_of(place) if "eval/all/loss" in line]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0], losses
    assert "ended after step 4 of 4" in out and "model.safetensors" in "".join(exported(place))


def test_the_page_shows_what_is_trained_of_some_rows(whole):
    """Samples of the first step: rows of the data, the mask of their answers, and no rewards."""
    import base64
    import json
    import struct

    place, _ = whole
    record = json.loads(next(place.glob("**/samples/step_1.json")).read_text())
    assert record["of_rows"] and record["samples"]
    for sample in record["samples"]:
        mask = base64.b64decode(sample["mask"])
        tokens = struct.unpack(f"<{len(mask)}i", base64.b64decode(sample["tokens"]))
        trained = "".join(record["pieces"][str(token)] for token, one in zip(tokens, mask, strict=True) if one)
        assert "<|end|>" in trained and "<|user|>" not in trained
        assert sample["reward"] is None and sample["advantages"] is None


def other_weights(folder, place):
    shutil.copytree(folder / "model", place / "other")
    path = place / "other/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return {"trainer.policy.model.path": place / "other"}


def configured(given):
    from skyrl_megatron.config.hardware import Hardware
    from skyrl_megatron.config.resolve import fit_to_hardware
    from skyrl_megatron.config.schema.sft import SFTTrainConfig

    cfg = SFTTrainConfig.from_cli_overrides([f"{key}={value}" for key, value in given.items()])
    assert fit_to_hardware(cfg, Hardware(0)) == []
    return cfg


def moved(folder, place):
    shutil.copytree(folder / "model", place / "moved")
    return {"trainer.policy.model.path": place / "moved"}


LR = {"trainer.policy.optimizer_config.lr": 5e-4, "trainer.policy_mini_batch_size": 8}
ANOTHER = {
    "model": other_weights,
    "data": lambda folder, place: {"data.train_data": f"[{folder / 'scored.jsonl'}]"},
    "optimizer": lambda folder, place: {"trainer.policy.optimizer_config.optimizer": "muon"},
    "adapters": lambda folder, place: {"trainer.policy.model.lora.rank": 4},
    "a copy of the model": moved,
    "learning rate and layout": lambda folder, place: LR | LAYOUTS["tp2"],
    "allowed": lambda folder, place: other_weights(folder, place) | {"trainer.resume_other": "[model,data]"},
}


@pytest.mark.parametrize("name", ANOTHER)
def test_a_run_resumes_its_own_checkpoints_only(folder, whole, tmp_path, name):
    """The check before a run, and the checkpointer when it loads, name both sides and the key that allows it."""
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.identity import run_identity
    from skyrl_megatron.trainer.checkpoints import resume_lines, resume_problems, run_checkpointer

    place = whole[0]
    given = {
        "trainer.policy.model.path": folder / "model",
        "data.train_data": f"[{folder / 'talks.jsonl'}]",
        "trainer.ckpt_path": place / "ckpt",
    }
    cfg = configured(row_runs.KEYS | row_runs.OF_VERB["sft"] | given | ANOTHER[name](folder, tmp_path))
    sides = {
        "model": (f"is {folder / 'model'} (", f"is {tmp_path / 'other'} ("),
        "data": ("is talks.jsonl (", "is scored.jsonl ("),
        "optimizer": ("is adam", "is muon"),
        "adapters": ("are none", "are of rank 4, alpha 16"),
    }
    problems = list(resume_problems(cfg))
    if name in sides:
        (problem,) = problems
        saved, here = sides[name]
        assert f"its {name} {saved}" in problem.fix and f"this run's {here}" in problem.fix
        assert f"trainer.resume_other=[{name}]" in problem.fix
        assert (problem.key, problem.value) == ("trainer.ckpt_path", str(place / "ckpt/global_step_4"))
        with pytest.raises(ConfigError, match="it is of another run"):
            run_checkpointer(cfg, {}, identity=run_identity(cfg)).load("latest", None)
    else:
        assert problems == []
        assert run_checkpointer(cfg, {}, identity=run_identity(cfg)).load("latest", None).step == 4
    first, *others = resume_lines(cfg)
    assert first.startswith(f"resumes from {place / 'ckpt/global_step_4'} (step 4, of {folder / 'model'} (")
    changed = "trainer.policy.optimizer_config.lr=0.0005 (was 0.001), trainer.policy_mini_batch_size=8 (was 16)"
    expected = [f"continues with other settings: {changed}"] if name == "learning rate and layout" else []
    assert others == expected or name in ("optimizer", "adapters")


def test_a_checkpoint_of_an_older_version_warns(folder, whole, tmp_path):
    from skyrl_megatron.errors import SkyRLMegatronWarning
    from skyrl_megatron.identity import run_identity
    from skyrl_megatron.runtime.checkpoint.manifest import MANIFEST, Manifest
    from skyrl_megatron.trainer.checkpoints import resume_problems, run_checkpointer

    shutil.copytree(whole[0] / "ckpt", tmp_path / "ckpt")
    path = tmp_path / "ckpt/global_step_4" / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    manifest.identity = {}
    path.write_bytes(manifest.to_bytes())
    cfg = configured({"trainer.policy.model.path": folder / "model", "trainer.ckpt_path": tmp_path / "ckpt"})
    assert list(resume_problems(cfg)) == []
    with pytest.warns(SkyRLMegatronWarning, match="does not say of which model and data it is"):
        assert run_checkpointer(cfg, {}, identity=run_identity(cfg)).load("latest", None).step == 4


@pytest.mark.full_matrix
@pytest.mark.parametrize("moment", [row_runs.EVALUATION, "a checkpoint", "a step"])
def test_a_killed_run_is_resumed_bit_for_bit(folder, tmp_path, whole, moment):
    row_runs.kill_during(moment, row_runs.start("sft", folder, tmp_path), tmp_path)
    assert ("resumed from" in run("sft", folder, tmp_path)) == (moment == "a step")
    assert exported(tmp_path) == exported(whole[0])


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

    rows = (folder / "talks.jsonl").read_bytes()
    short = {"trainer.max_training_steps": 2, "trainer.hf_save_interval": 2, "trainer.eval_interval": 0}
    short |= {"trainer.eval_before_train": "false", f"{M}optimizer_config_kwargs.adam_eps": 1e-3}
    mixed = {"data.train_data": f"[{folder / 'talks.jsonl'},acme/talks]", "data.sampler": "mixture"}
    mixed |= {"data.sampler_options.weights": "[3,1]"}
    losses, weights = {}, {}
    with hub_endpoint.serve() as hub:
        hub.repository("datasets/acme/talks").push({"train.jsonl": rows.replace(b"the answer is", b"it is")})
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
        for name, layout in LAYOUTS.items():
            place = tmp_path / name
            started = row_runs.start("sft", folder, place, variables, **(short | mixed | layout | KINDS[kind]))
            out = row_runs.finish(started)
            assert "hub: datasets/acme/talks@main is commit" in out
            losses[name] = [line["sft/loss"] for line in steps_of(place)]
            kl = [line["policy/policy_kl"] for line in metrics_of(place) if "policy/policy_kl" in line]
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
