"""Imported folders in a built model, and checkpoints of a training run as HF folders."""

import pytest

from tests.bridges.tiny_models import save_tiny


def load_body(hf, imported, layout):
    """Megatron's own loader fills a model from the imported folder; it must equal the model filled from the HF folder.

    ``raise_all``: the checkpoint has no tensor too few or too many.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model, expected = (build_model(hf, groups, dtype=torch.float32) for _ in range(2))
    load_hf(expected, hf, groups)
    wanted = {}
    for index, chunk in enumerate(model.chunks):
        for parameter in chunk.parameters():
            torch.nn.init.constant_(parameter, 7.0)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        wanted[f"chunk{index}"] = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    loaded = dist_checkpointing.load(wanted, str(imported), strict="raise_all")
    count = 0
    for index, (chunk, other) in enumerate(zip(model.chunks, expected.chunks, strict=True)):
        result = chunk.load_state_dict(loaded[f"chunk{index}"], strict=False)
        assert not result.unexpected_keys and all(key.endswith("_extra_state") for key in result.missing_keys)
        mine, its = ({name: tensor for name, tensor in each.state_dict().items() if tensor is not None}
                     for each in (chunk, other))  # fmt: skip
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine), "a weight differs"
        count += len(mine)
    return count


@pytest.mark.parametrize(
    ("model_type", "overrides", "layout", "world_size"),
    [
        ("qwen3_moe", {}, dict(tp=2, ep=2), 2),
        ("qwen2_moe", {"mlp_only_layers": [0]}, dict(tp=2, ep=2), 2),
        pytest.param("qwen2", {}, dict(pp=2, vpp=2), 2, marks=pytest.mark.full_matrix),
        pytest.param("qwen3_moe", {}, dict(tp=2, etp=2, pp=2), 4, marks=pytest.mark.full_matrix),
        pytest.param("mixtral", {}, dict(tp=2, ep=4), 4, marks=pytest.mark.full_matrix),
        pytest.param(
            "llama", {"attention_bias": True, "mlp_bias": True}, dict(tp=2), 2, marks=pytest.mark.full_matrix
        ),
    ],
    ids=str,
)
def test_import_fills_a_built_model(model_type, overrides, layout, world_size, ranks, tmp_path):
    from bridges.convert import import_hf

    hf = save_tiny(model_type, tmp_path / "hf", num_hidden_layers=4, num_key_value_heads=2, **overrides)
    import_hf(hf, tmp_path / "megatron")
    assert min(ranks(world_size, load_body, hf, tmp_path / "megatron", layout)) >= 15


def train_body(hf, root, layout):
    """A step of training, then a checkpoint, and the same weights written by the runtime's own exporter."""
    import os

    from skyrl_megatron.runtime.hf_weights import save_hf
    from tests.checkpoint import training
    from tests.checkpoint.ranks import RankCheckpointer

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # Megatron sets them for good, and refuses another choice in the same process
    engine = training.engine(hf, layout)
    training.train(engine, [1])
    checkpointer = RankCheckpointer(str(root / "checkpoints"), training.state_of(engine))
    checkpointer.save(1)
    checkpointer.close()
    save_hf(engine.model, engine.groups, root / "runtime")


def test_export_of_a_training_checkpoint(ranks, tmp_path):
    """The optimizer cuts weights into arbitrary runs of rows; the two exporters share no code but the table."""
    from bridges.convert import compare, export_megatron
    from tests.checkpoint import training

    hf = training.save_model(tmp_path / "hf")
    ranks(2, train_body, hf, tmp_path, "tp2·ep2")
    policy = tmp_path / "checkpoints" / "global_step_1" / "policy"
    export_megatron(policy, tmp_path / "bridges", template=hf)
    result = compare(tmp_path / "runtime", tmp_path / "bridges")
    assert result.equal and result.tensors > 50, result.differences[:5]
    moved = compare(hf, tmp_path / "bridges")
    assert len(moved.differences) > result.tensors // 2, "training changed nothing"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The entry points that pyproject.toml declares, whatever was installed when the environment was made."""
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "skyrl_megatron_declared-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-megatron-declared\nVersion: 0\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"]["bridges.logits"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[bridges.logits]", *points]))
    monkeypatch.syspath_prepend(info.parent)


def test_logits_without_a_program_to_compute_them(tmp_path, capsys, monkeypatch):
    from importlib import metadata

    from bridges.__main__ import main

    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert main(["verify", "--logits", str(tmp_path), str(tmp_path)]) == 2
    assert "install skyrl-megatron" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.full_matrix)])
@pytest.mark.process
def test_logits_of_both_folders_are_compared(broken, tmp_path, capsys, installed):
    import json

    from bridges.__main__ import main
    from bridges.convert import import_hf

    hf = save_tiny("qwen3_moe", tmp_path / "hf", num_key_value_heads=2, initializer_range=0.2)
    import_hf(hf, tmp_path / "megatron")
    if broken:
        hf = save_tiny("qwen3_moe", tmp_path / "other", seed=1, num_key_value_heads=2, initializer_range=0.2)
    assert main(["verify", "--logits", str(hf), str(tmp_path / "megatron"), "--layout", "tp=2,ep=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == {"tp": 2, "ep": 2} and found["reference_max"] > 5
    assert (found["max_abs_difference"] > 1) if broken else (found["max_abs_difference"] <= 1e-4)


@pytest.mark.process
def test_logits_with_a_layout_that_does_not_fit_is_an_error(tmp_path, capsys, installed):
    from bridges.__main__ import main

    assert main(["verify", "--logits", str(tmp_path), str(tmp_path), "--layout", "tp=two"]) == 2
    assert "write e.g. tp=2,ep=2" in capsys.readouterr().err
