"""Whole folders: HF → Megatron → HF bit for bit, and Megatron's own loader opening what the import wrote."""

import json

import pytest

from tests.bridges.tiny_models import TINY, save_tiny


def tensors_of(folder):
    from bridges.source import open_source

    source = open_source(folder)
    return {name: source.read(name) for name in source.shapes()}


def write_hf(folder, config, tensors):
    """A HF folder made by the safetensors library, not by ours."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def convert(hf, tmp_path, **options):
    """HF → Megatron → HF; returns the two new folders."""
    from bridges.convert import export_megatron, import_hf

    megatron, back = tmp_path / "megatron", tmp_path / "back"
    import_hf(hf, megatron, dtype=options.pop("dtype", None), workers=2)
    export_megatron(megatron, back, max_shard_size=200_000, workers=2, **options)
    return megatron, back


@pytest.mark.parametrize("model_type", TINY)
def test_folders_round_trip_bitwise(model_type, tmp_path):
    from bridges.convert import compare

    hf = save_tiny(model_type, tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    megatron, back = convert(hf, tmp_path)
    for other in (megatron, back):
        result = compare(hf, other)
        assert result.equal and result.tensors > 20, result.differences
    assert len(list(back.glob("*.safetensors"))) > 1 and (back / "model.safetensors.index.json").exists()
    assert json.loads((back / "config.json").read_text()) == json.loads((hf / "config.json").read_text())
    assert (back / "tokenizer.json").exists() and (back / "generation_config.json").exists()
    assert not list(megatron.rglob("*.safetensors")), "a Megatron folder holds no copy of the HF tensors"
    stored = sum(path.stat().st_size for path in megatron.glob("*.distcp"))
    assert stored < 1.3 * result.bytes


def test_exported_folder_opens_in_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    hf = save_tiny("qwen3_moe", tmp_path / "hf")
    _, back = convert(hf, tmp_path)
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (hf, back))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_dtype_is_cast_and_written_to_the_config(model_type, tmp_path):
    import torch

    hf = save_tiny(model_type, tmp_path / "hf")
    megatron, back = convert(hf, tmp_path, dtype=torch.bfloat16)
    original, cast = tensors_of(hf), tensors_of(back)
    for name, tensor in cast.items():
        kept = name.endswith("e_score_correction_bias")  # routing needs it in fp32
        assert torch.equal(tensor, original[name] if kept else original[name].bfloat16()), name
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


def test_prediction_layers_are_carried_byte_for_byte_or_dropped(tmp_path):
    import torch

    from bridges.convert import compare, export_megatron

    hf = save_tiny("glm4_moe", tmp_path / "plain")
    tensors = tensors_of(hf)
    torch.manual_seed(1)
    tensors |= {"model.layers.3.eh_proj.weight": torch.randn(48, 96), "model.layers.3.enorm.weight": torch.randn(48),
                "model.layers.3.embed_tokens.weight": torch.randn(1003, 48).bfloat16()}  # fmt: skip
    config = json.loads((hf / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    hf = write_hf(tmp_path / "hf", config, tensors)
    megatron, back = convert(hf, tmp_path)
    assert compare(hf, back).equal and compare(hf, megatron).equal
    export_megatron(megatron, tmp_path / "dropped", drop_mtp=True)
    dropped = tensors_of(tmp_path / "dropped")
    assert set(tensors) - set(dropped) == {name for name in tensors if name.startswith("model.layers.3.")}
    assert json.loads((tmp_path / "dropped" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_prediction_layers_come_from_the_template_if_training_lost_them(tmp_path):
    import torch

    from bridges.convert import compare, export_megatron, import_hf

    plain = save_tiny("glm4_moe", tmp_path / "plain")
    tensors = tensors_of(plain) | {"model.layers.3.enorm.weight": torch.arange(48.0)}
    hf = write_hf(tmp_path / "hf", json.loads((plain / "config.json").read_text()), tensors)
    import_hf(plain, tmp_path / "megatron")
    export_megatron(tmp_path / "megatron", tmp_path / "back", template=hf)
    assert compare(hf, tmp_path / "back").equal


def test_fp8_blocks_are_dequantised_while_streaming(tmp_path):
    """Against the definition written out per element, with blocks that do not divide the matrix."""
    import torch

    from bridges.convert import export_megatron, import_hf

    hf = save_tiny("deepseek_v3", tmp_path / "plain")
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for name, tensor in tensors_of(hf).items():
        tensors[name] = expected[name] = tensor
        if tensor.dim() == 2 and "layers" in name and "mlp.gate.weight" not in name:
            quantized = tensor.to(torch.float8_e4m3fn)
            grid = [-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 32)]
            scale = torch.rand(grid, generator=generator) * 3
            row, column = torch.arange(tensor.shape[0]) // 16, torch.arange(tensor.shape[1]) // 32
            tensors[name], tensors[name + "_scale_inv"] = quantized, scale
            expected[name] = (quantized.float() * scale[row][:, column]).bfloat16()
    assert any(tensor.shape[0] % 16 for name, tensor in tensors.items() if name + "_scale_inv" in tensors)
    import_hf(write_hf(tmp_path / "fp8", config, tensors), tmp_path / "megatron")
    got = tensors_of(tmp_path / "megatron")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) and got[name].dtype == expected[name].dtype for name in got)
    # The quantised folder as template: its config describes what is in it, not what is written.
    export_megatron(tmp_path / "megatron", tmp_path / "back", template=tmp_path / "fp8", dtype=torch.bfloat16)
    for written in (tmp_path / "megatron" / "huggingface", tmp_path / "back"):
        assert "quantization_config" not in json.loads((written / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mxfp4_is_dequantised_as_transformers_does(tmp_path):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from bridges.convert import import_hf

    sizes = dict(hidden_size=64, intermediate_size=32)
    hf = save_tiny("gpt_oss", tmp_path / "plain", **sizes)
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for name, tensor in tensors_of(hf).items():
        tensors[name] = expected[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            del tensors[name]
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(1, 254, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
            expected[name] = convert_moe_packed_tensors(blocks, scales)
    import_hf(write_hf(tmp_path / "mxfp4", config, tensors), tmp_path / "megatron")
    got = tensors_of(tmp_path / "megatron")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_files_larger_than_memory_are_mapped(tmp_path):
    """A sparse file of 4 TB: private maps of that size are refused by the kernel unless they reserve nothing."""
    from bridges.hf_io import HfFolder

    size = 4 * 10**12
    header = {"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
              "small": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]}}  # fmt: skip
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size + 8)
    (tmp_path / "config.json").write_text("{}")
    folder = HfFolder(tmp_path)
    assert folder.read("small").tolist() == [0.0, 0.0] and folder.read("big")[-1] == 0


def test_large_tensors_are_cast_in_blocks(monkeypatch):
    import torch

    from bridges import staging

    monkeypatch.setattr(staging, "BLOCK", 1000)
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (7,), (40, 30), (5, 40, 30), (0, 4)):
        tensor = torch.randn(shape, generator=generator)
        for source in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
            blocks = list(staging.byte_blocks(source, torch.bfloat16))
            assert b"".join(blocks) == bytes(source.bfloat16().contiguous().reshape(-1).view(torch.uint8).numpy())
            assert len(blocks) > 1 or source.numel() < 500


def sharded_state(folder, tp, tp_rank, keep, make):
    """``{entry/part: make(…)}`` of one rank, cut the way Megatron's modules do it: layers and experts are offsets on
    leading axes, gate and up are two shards, the vocabulary is padded (here to 1024), experts are not split over etp.
    """
    from bridges.hf_io import HfFolder
    from bridges.plan import Plan
    from bridges.rules import checkpoint_location, shard

    hf = HfFolder(folder / "hf")
    plan = Plan.of(hf.config)
    state = {}
    for entry in plan.entries:
        if not keep(plan, entry):
            continue
        place = checkpoint_location(entry, plan.shape)
        whole = entry.to_megatron([hf.read(piece.name, piece.index) for piece in entry.hf])
        split = entry.split.dim is not None and not entry.is_expert
        size, rank = (tp, tp_rank) if split else (1, 0)
        mine = shard(whole, entry, size, rank, padded_vocab=1024).contiguous()
        lead = [(axis, place.index[axis], place.axes[axis]) for axis in range(len(place.axes))]
        dim = entry.split.dim or 0
        for number, piece in enumerate(mine.chunk(entry.parts)):
            position, count = (number * size + rank, size * entry.parts) if dim == 0 else (rank, size)
            offsets = [*lead, (len(lead) + dim, position, count)]
            state[f"{entry.name}/{number}"] = make(place.key, piece, offsets, len(lead), not split, entry.split.vocab)
    return state


def load_body(folder, tp, ep, pp):
    """Each rank of tp·pp asks Megatron's own loader for its share and compares it with the split of the HF tensors."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = dist.get_rank()
    expected = {}

    def keep(plan, entry):
        layers, experts = len(plan.shape.moe) // pp, plan.shape.dims.get("E", 0) // ep
        mine = entry.layer is None or entry.layer // layers == rank // tp % pp
        return mine and (entry.expert is None or entry.expert // experts == rank % ep)

    def request(key, piece, offsets, lead, replicated, vocab):
        wanted = ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(piece), *offsets, prepend_axis_num=lead, allow_shape_mismatch=vocab
        )
        expected[id(wanted)] = piece
        return wanted

    wanted = sharded_state(folder, tp, rank % tp, keep, request)
    pieces = {name: expected[id(tensor)] for name, tensor in wanted.items()}
    loaded = dist_checkpointing.load(wanted, str(folder / "megatron"), validate_access_integrity=False)
    assert loaded["checkpoint_version"] == 3.0
    wrong = [name for name, piece in pieces.items() if not torch.equal(loaded[name], piece)]
    assert not wrong, wrong
    return len(pieces)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("qwen3_moe", dict(tp=2, ep=2, pp=1)),
        ("deepseek_v3", dict(tp=2, ep=2, pp=1)),
        pytest.param("gpt_oss", dict(tp=2, ep=4, pp=2), marks=pytest.mark.full_matrix),
        pytest.param("qwen2", dict(tp=2, ep=1, pp=2), marks=pytest.mark.full_matrix),
        pytest.param("mixtral", dict(tp=1, ep=2, pp=2), marks=pytest.mark.full_matrix),
        pytest.param("olmoe", dict(tp=1, ep=1, pp=1), marks=pytest.mark.full_matrix),
    ],
)
def test_megatron_loads_the_import_at_any_layout(model_type, layout, ranks, tmp_path):
    from bridges.convert import import_hf

    groups = {} if model_type == "deepseek_v3" else {"num_key_value_heads": 2}
    save_tiny(model_type, tmp_path / "hf", num_hidden_layers=4, **groups)
    import_hf(tmp_path / "hf", tmp_path / "megatron")
    counts = ranks(layout["tp"] * layout["pp"], load_body, tmp_path, **layout)
    assert min(counts) > 10


def save_body(folder, tp):
    """Saves with Megatron's own writer at tp, as a training run does, with what else such a run stores."""
    import queue

    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from skyrl_megatron.runtime import cpu_patches as megatron_patches

    rank = dist.get_rank()
    state = {"iteration": 7, "extra": ShardedObject("decoder.layers.mlp._extra_state", b"", (1,), (0,), rank)}
    for prefix in ("", "optimizer.state.exp_avg."):

        def share(key, piece, offsets, lead, replicated, vocab, prefix=prefix):
            replica = (0, rank if replicated else 0, 0)
            return ShardedTensor.from_rank_offsets(
                prefix + key, piece.clone(), *offsets, prepend_axis_num=lead, replica_id=replica
            )

        shares = sharded_state(folder, tp, rank, lambda plan, entry: True, share)
        state |= {prefix + name: tensor for name, tensor in shares.items()}
    (folder / "megatron").mkdir(exist_ok=True)
    dist.barrier()
    # The stock queue is served by a process of its own, which pool ranks may not start; a save that waits needs none.
    filesystem_async._results_queue = queue.Queue()
    try:
        with megatron_patches.installed():
            dist_checkpointing.save(state, str(folder / "megatron"))
    finally:
        filesystem_async._results_queue = None


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.full_matrix)])
def test_export_of_a_checkpoint_that_megatron_wrote(model_type, ranks, tmp_path):
    """Shards of tp=2, a padded vocabulary, optimizer state and extra state: only the weights come out, bit for bit."""
    from bridges.convert import compare, export_megatron

    hf = save_tiny(model_type, tmp_path / "hf", num_key_value_heads=2)
    ranks(2, save_body, tmp_path, 2)
    report = export_megatron(tmp_path / "megatron", tmp_path / "back", template=hf)
    result = compare(hf, tmp_path / "back")
    assert result.equal and report.tensors == result.tensors
