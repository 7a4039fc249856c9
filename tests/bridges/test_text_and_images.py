"""Folders of models of text and images: the language model is trained, exports keep form and other tensors."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.bridges.tiny_models import SIZES, TINY

VISION = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=48)
OTHERS = dict(num_position_embeddings=16)
IDS = dict(image_token_id=1003, video_token_id=1004, vision_start_token_id=1005, vision_end_token_id=1006)


def write_model(folder):
    """Qwen3.5 MoE with its vision tower, as transformers saves it, and the files of its processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(3)
    text = SIZES | TINY["qwen3_5_moe_text"] | dict(initializer_range=0.2)
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION | OTHERS, **IDS)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text("{}")
    return folder


def fuse(folder, out):
    """The folder with fused experts and the layer of multi-token prediction, as Qwen publishes it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    tensors, experts = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if part:
            experts.setdefault(part[1], {})[int(part[2]), part[3]] = tensor
        else:
            tensors[name] = tensor
    for layer, found in experts.items():
        numbers = range(max(number for number, _ in found) + 1)
        gate_up = [torch.cat([found[number, "gate"], found[number, "up"]]) for number in numbers]
        tensors[f"{layer}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.down_proj"] = torch.stack([found[number, "down"] for number in numbers])
    tensors["mtp.fc.weight"] = torch.randn(48, 96)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    saved = write_model(root / "saved")
    return {"saved by transformers": saved, "released": fuse(saved, root / "released")}


FORMS = ("saved by transformers", "released")


def same_folder(one, other):
    """Whether two folders have the same tensors by the same names, config.json and files."""
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) and first[name].dtype == second[name].dtype for name in first)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    assert configs[0] == configs[1]
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}


@pytest.mark.parametrize("form", FORMS)
def test_a_conversion_keeps_the_form(folders, form, tmp_path):
    import torch

    from bridges.convert import export_megatron, import_hf
    from bridges.hf_io import HfFolder
    from bridges.plan import Plan

    folder = HfFolder(folders[form])
    Plan.of(folder.config).check(folder.shapes(), form)
    import_hf(folders[form], tmp_path / "megatron")
    export_megatron(tmp_path / "megatron", tmp_path / "back", template=folders[form])
    same_folder(folders[form], tmp_path / "back")
    if form == "released":  # without the folder, the form of the releases
        export_megatron(tmp_path / "megatron", tmp_path / "alone")
        same_folder(folders[form], tmp_path / "alone")
        export_megatron(tmp_path / "megatron", tmp_path / "less", drop_mtp=True)
        less = HfFolder(tmp_path / "less").tensors
        assert "mtp.fc.weight" not in less and any(name.startswith("model.visual.") for name in less)
    export_megatron(tmp_path / "megatron", tmp_path / "bf16", template=folders[form], dtype=torch.bfloat16)
    written = json.loads((tmp_path / "bf16/config.json").read_text())
    assert written["dtype"] == written["text_config"].get("dtype", "bfloat16") == "bfloat16"


def logits_and_export(folder, expected, out):
    """Body of a one-process test: the largest error of Megatron's logits; exports the model. ``expected``: logits, and
    what is taken off each token's error."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf, save_hf
    from skyrl_megatron.runtime.model.build import build_model
    from tests.runtime.parity import forward_backward

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size()), timeout_s=120)
    model = build_model(folder, groups, dtype=torch.float32)
    load_hf(model, folder, groups)
    error = forward_backward(model, groups, expected[0], False, None, expected[1])
    save_hf(model, groups, out)
    return error


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_model_of_text_and_images(ranks, folders, form, tmp_path):
    """Of transformers' multimodal class on text, which also opens what the ranks export."""
    import torch
    from transformers import AutoModelForImageTextToText

    from tests.runtime.parity import data, logits_of

    def open_model(folder):
        model, report = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        with torch.no_grad():
            return model.state_dict(), logits_of(model.eval(), data())

    state, logits = open_model(folders[form])
    assert logits.abs().max() > 5
    exact = AutoModelForImageTextToText.from_pretrained(
        folders[form], dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():  # as in parity.reference: what a delta net rounds is not counted
        rounding = (logits_of(exact, data()) - logits).abs().amax(-1).float()
    (error,) = ranks(1, logits_and_export, folders[form], (logits, rounding), tmp_path / "out")
    print(f"largest error {error:.1e}")
    assert error <= 1e-4
    same_folder(folders[form], tmp_path / "out")
    again, after = open_model(tmp_path / "out")
    assert logits.equal(after) and all(state[name].equal(again[name]) for name in state)


def test_an_export_needs_the_tensors_of_images(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    from bridges.convert import export_megatron, import_hf
    from bridges.errors import BridgeError

    text = tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(folders["released"]).save_pretrained(text)
    import_hf(text, tmp_path / "megatron")  # as a run's checkpoint: without what is not trained
    inside = tmp_path / "megatron/huggingface/config.json"
    inside.write_text((folders["released"] / "config.json").read_text())
    with pytest.raises(BridgeError, match=r"none of its tensors model\.visual.*--hf-template FOLDER"):
        export_megatron(tmp_path / "megatron", tmp_path / "none")
    export_megatron(tmp_path / "megatron", tmp_path / "whole", template=folders["released"])
    same_folder(folders["released"], tmp_path / "whole")


def test_what_an_import_leaves_out_comes_from_the_folder(folders, tmp_path):
    from bridges.convert import export_megatron, import_hf

    import_hf(folders["released"], tmp_path / "megatron", drop_mtp=True)
    export_megatron(tmp_path / "megatron", tmp_path / "whole", template=folders["released"])
    same_folder(folders["released"], tmp_path / "whole")


def test_a_folder_without_the_tensors_of_images_is_refused_before_training(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    from bridges.errors import BridgeError
    from bridges.hf_io import HfFolder
    from bridges.plan import Plan
    from skyrl_megatron.runtime.model.description import check_tensors

    shutil.copytree(folders["released"], tmp_path / "less")
    tensors = load_file(tmp_path / "less/model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    save_file(left, tmp_path / "less/model.safetensors", metadata={"format": "pt"})
    for folder in (folders["released"], tmp_path / "less"):
        source = HfFolder(folder)
        if folder == tmp_path / "less":
            with pytest.raises(BridgeError, match="cannot be exported again: use the whole folder, or the text model"):
                check_tensors(Plan.of(source.config), source, "lm", "")
        else:
            check_tensors(Plan.of(source.config), source, "lm", "")


def test_experts_are_fused_if_those_of_the_layers_are():
    """Not if the layer of multi-token prediction alone is; in any order of the names."""
    import torch

    from bridges.disk_form import DiskForm

    config = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
    layer = "model.language_model.layers.0.mlp.experts"
    prediction = "mtp.layers.0.mlp.experts.gate_up_proj"
    assert not DiskForm.of(config, [f"{layer}.0.gate_proj.weight", prediction]).fused
    form = DiskForm.of(config, [f"{layer}.gate_up_proj", prediction])
    names = sorted(f"model.layers.0.mlp.experts.{n}.{part}_proj.weight" for n in range(12) for part in ("gate", "up"))
    assert form.stored({name: ((4, 6), torch.float32) for name in names}) == {
        f"{layer}.gate_up_proj": ((12, 8, 6), torch.float32)
    }


def test_a_family_of_the_whole_reads_it_itself(monkeypatch):
    """A plugin's, registered under the name of the model of text and images."""
    from bridges import families
    from bridges.families.qwen3_moe import FAMILY

    own = replace(FAMILY, model_type="qwen3_vl_moe")
    monkeypatch.setitem(families._families, "qwen3_vl_moe", own)
    config = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text"}}
    assert families.family_of(config) is own and own.own_config(config) == config


OTHER_MODELS = {
    "qwen3_vl_moe": ({"model_type": "qwen3_vl_moe_text"}, "around a qwen3_vl_moe_text.*use a text model"),
    "glm4v_moe": ({}, "around a glm4v_moe_text.*use a text model"),
    "kimi_k25": ({"model_type": "deepseek_v3"}, "around a deepseek_v3.*use a folder of deepseek_v3"),
    "internvl": ({"model_type": "qwen3_moe"}, "around a qwen3_moe.*use a folder of qwen3_moe"),
    "mistral3": ({"model_type": "mistral"}, "around a mistral.*read for qwen3_5_moe: use a text model"),
}


@pytest.mark.parametrize("model_type", OTHER_MODELS)
def test_other_models_of_text_and_images_are_refused(model_type, folders, tmp_path, capsys):
    from bridges.__main__ import main

    text, reason = OTHER_MODELS[model_type]
    shutil.copytree(folders["released"], tmp_path / "other")
    config = {"model_type": model_type, "text_config": text, "vision_config": {}}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    assert main(["import", "--hf", str(tmp_path / "other"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        re.search(reason, said) and f"'{model_type}' is a model of text and images" in said and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    "change, error",
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True, its text_config False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "only folders that are not quantised are read"),
        ({"text_config": "qwen"}, "text_config='qwen' must be a JSON object"),
        ({"text_config": {"hidden_size": "48"}}, "text_config: hidden_size='48' must be a whole number"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(folders, tmp_path, change, error):
    from bridges.convert import import_hf
    from bridges.errors import BridgeError

    shutil.copytree(folders["released"], tmp_path / "wrong")
    config = json.loads((tmp_path / "wrong/config.json").read_text())
    inner = change.get("text_config")
    changed = {**change, "text_config": config["text_config"] | inner} if isinstance(inner, dict) else change
    (tmp_path / "wrong/config.json").write_text(json.dumps(config | changed))
    with pytest.raises(BridgeError, match=re.escape(error)):
        import_hf(tmp_path / "wrong", tmp_path / "out")


def test_a_text_model_taken_out_of_a_model_of_text_and_images(folders, tmp_path, capsys):
    """transformers' own text model of a multimodal folder: its logits, after a conversion there and back."""
    import torch
    from transformers import AutoModelForCausalLM

    from bridges.__main__ import main
    from bridges.hf_io import HfFolder

    model = AutoModelForCausalLM.from_pretrained(folders["saved by transformers"], dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "text")
    for verb, kind, source, target in (("import", "hf", "text", "mcore"), ("export", "megatron", "mcore", "back")):
        arguments = [f"--{kind}", f"{tmp_path}/{source}", "--out", f"{tmp_path}/{target}"]
        assert main([verb, *arguments]) == 0, capsys.readouterr().err
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, back(ids).logits)
    assert not [name for name in HfFolder(tmp_path / "text").tensors if "language_model" in name]


def export_adapter(folder, root):
    """Body of a one-process test: exports a run's adapter and the merged model."""
    from skyrl_megatron.runtime.model.description import read_hf_model
    from tests.lora import reference
    from tests.lora.test_peft_drops import export_body

    factors = reference.start_factors(read_hf_model(folder).plan, separate=False)
    export_body(folder, factors, root, dropout=0.1)


def test_an_adapter_has_the_names_of_peft(ranks, folders, tmp_path):
    """Of PEFT on transformers' model of text and images; merged into the folder it is what the run exports."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    from bridges.__main__ import main

    ranks(1, export_adapter, folders["released"], tmp_path)
    own = set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    model = AutoModelForImageTextToText.from_pretrained(folders["released"])
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "in_proj_qkv", "in_proj_z"]
    theirs = set(get_peft_model_state_dict(get_peft_model(model, LoraConfig(target_modules=linear))))
    assert theirs and theirs <= own and all(".language_model.layers." in name for name in own)
    given = ["--hf", folders["released"], "--adapter", tmp_path / "adapter", "--out", tmp_path / "by bridges"]
    assert main(["merge", *map(str, given)]) == 0
    ours, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("by bridges", "merged"))
    assert ours.keys() == merged.keys()
    largest = max(float((ours[name] - merged[name]).abs().max()) for name in ours)
    assert largest <= 1e-6, largest
