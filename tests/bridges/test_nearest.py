"""``inspect`` of a model whose family has no table: the nearest one, tensor by tensor, and a table to start from."""

import json

import pytest

from tests.bridges.test_cli import cli
from tests.bridges.tiny_models import save_tiny

GATE = "model.layers.{layer}.self_attn.output_gate.weight"


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """qwen3_moe under another name, with a gate in each layer and without its norm of keys."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_tiny("qwen3_moe", tmp_path_factory.mktemp("unknown"))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {GATE.format(layer=layer): torch.zeros(96, 48) for layer in range(3)}
    tensors = {name: tensor for name, tensor in tensors.items() if "k_norm" not in name}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"model_type": "gated_moe", "architectures": ["GatedMoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def test_the_nearest_family_tensor_by_tensor(unknown, capsys):
    code, out, err = cli(capsys, "inspect", unknown)
    assert code == 2 and err.startswith("error: model_type='gated_moe' is not supported")
    assert out.startswith("nearest family: qwen3_moe, which has 14 of 15 tensors and 1 that are missing here")
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  model.")}
    assert lines[GATE].endswith("[96, 48]          has no row")
    assert (
        "→ decoder.layers.{layer}.self_attention.linear_qkv.weight, Qkv"
        in lines[GATE.replace("output_gate", "v_proj")]
    )
    assert lines["model.layers.{layer}.self_attn.k_norm.weight"].endswith("missing")


def test_the_table_to_start_from_is_a_family(unknown, capsys):
    """It converts what the nearest family has; what it lacks is said where a row belongs."""
    code, out, _ = cli(capsys, "inspect", unknown, "--json")
    found = json.loads(out.splitlines()[0])
    assert code == 2 and list(found["unknown"]) == [GATE] and found["nearest"] == "qwen3_moe"
    table = found["skeleton"]
    assert f"# no row: {GATE} [96, 48]" in table
    made = {}
    exec(compile(table, "gated_moe.py", "exec"), made)
    from bridges.families import get_family
    from bridges.rules import expand

    near, family = get_family("qwen3_moe"), made["FAMILY"]
    config = json.loads((unknown / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    assert family.model_type == "gated_moe" and family.architecture == "GatedMoeForCausalLM"
    rows = {row for part in (near.layer, near.moe, near.embedding, near.head) for row in part}
    kept = {row for part in (family.layer, family.moe, family.embedding, family.head) for row in part}
    assert {row.megatron.rpartition(".self_attention.")[2] for row in rows - kept} == {"k_layernorm.weight"}
    assert kept < rows and not family.dense
    named = lambda entries: {entry.name for entry in entries if "k_layernorm" not in entry.name}  # noqa: E731
    from dataclasses import replace

    assert named(expand(near, config)) == named(expand(replace(family, model_type="qwen3_moe"), config))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_a_known_model_under_another_name_is_its_own_family(tmp_path, model_type):
    from bridges.hf_io import HfFolder
    from bridges.nearest import nearest

    found = nearest(HfFolder(save_tiny(model_type, tmp_path)))
    assert not found.unknown and not found.missing
    same = {"deepseek_v3": "glm4_moe_lite"}
    assert found.family.model_type in (model_type, same.get(model_type))


CONVERTER = """
@MegatronModelBridge.register_bridge(source=GatedMoeForCausalLM, target=GPTModel)
class GatedMoeBridge(MegatronModelBridge):
    def mapping_registry(self):
        names = {"decoder.layers.*.self_attention.gate.weight": "model.layers.*.self_attn.output_gate.weight"}
        return Registry(
            *(AutoMapping(megatron_param=one, hf_param=other) for one, other in names.items()),
            QKVMapping(
                q="model.layers.*.self_attn.q_proj.weight",
                k="model.layers.*.self_attn.k_proj.weight",
                v="model.layers.*.self_attn.v_proj.weight",
                megatron_param="decoder.layers.*.self_attention.linear_qkv.weight",
            ),
        )
"""
"""A converter in the form that Megatron-Bridge 0.3.1 writes its own in."""


def bridge_folder(folder, *, missing=""):
    """A folder as ``pip install --target`` leaves it, with the signatures that the guide's steps call."""
    from bridges.nearest import CALLED

    root = folder / "megatron" / "bridge" / "models"
    for place in "conversion", "gated":
        (root / place).mkdir(parents=True)
    methods = [f"    def {name}({', '.join(each)}): ..." for name, each in CALLED.items() if name != missing]
    (root / "conversion" / "auto_bridge.py").write_text("\n".join(["class AutoBridge:", *methods]))
    (root / "gated" / "gated_bridge.py").write_text(CONVERTER)
    (folder / "megatron_bridge-0.3.1.dist-info").mkdir()
    return folder


def test_what_megatron_bridge_has_of_it(unknown, capsys, tmp_path):
    code, out, _ = cli(capsys, "inspect", unknown, "--megatron-bridge", bridge_folder(tmp_path))
    assert code == 2 and "Megatron-Bridge 0.3.1 converts GatedMoeForCausalLM: GatedMoeBridge in" in out
    assert "names 4 of 15 tensors" in out
    assert f"  {GATE} → decoder.layers.*.self_attention.gate.weight" in out.splitlines()
    assert f"  {GATE.replace('output_gate', 'v_proj')} → decoder.layers.*.self_attention.linear_qkv.weight" in out


def test_another_interface_and_another_folder_are_refused(unknown, capsys, tmp_path):
    code, _, err = cli(capsys, "inspect", unknown, "--megatron-bridge", bridge_folder(tmp_path, missing="export_ckpt"))
    assert code == 2 and "AutoBridge has no export_ckpt" in err and "megatron-bridge==0.3.1" in err
    code, _, err = cli(capsys, "inspect", unknown, "--megatron-bridge", unknown)
    assert code == 2 and "holds no Megatron-Bridge; pip install --no-deps --target" in err


def test_without_it_the_conflict_is_named(unknown, capsys):
    """Or, where it is installed, its interface is the one that was read."""
    from bridges.nearest import find_megatron_bridge

    _, out, _ = cli(capsys, "inspect", unknown)
    if find_megatron_bridge(None) is None:
        assert "asks for megatron-core<0.17 (here: 0." in out and "transformers<5 (here: 5." in out
    else:
        assert "does not convert GatedMoeForCausalLM either" in out
