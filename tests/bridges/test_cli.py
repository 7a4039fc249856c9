"""``python -m bridges`` as its users run it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridges.verified import LAYOUTS
from tests.bridges.tiny_models import save_tiny, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def cli(capsys, *arguments):
    """Runs the command in this process; returns (exit code, standard output, standard error)."""
    from bridges.__main__ import main

    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_from_hf_to_megatron_and_back(tmp_path, capsys):
    import torch
    from safetensors.torch import load_file, save_file

    hf, megatron, back = save_tiny("deepseek_v3", tmp_path / "hf"), tmp_path / "megatron", tmp_path / "back"
    code, out, _ = cli(capsys, "import", "--hf", hf, "--out", megatron, "--json", "--workers", 1)
    assert code == 0 and json.loads(out)["model_type"] == "deepseek_v3"
    code, out, err = cli(capsys, "export", "--megatron", megatron, "--out", back, "--max-shard-size", "300KB")
    assert code == 0 and "GB/s" in out and "left" in err
    assert max(path.stat().st_size for path in back.glob("*.safetensors")) < 320_000
    code, out, _ = cli(capsys, "verify", hf, back)
    assert code == 0 and "every tensor is bit-equal" in out
    assert cli(capsys, "verify", megatron, back, "--json")[0] == 0
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][2, 5] = torch.nan
    del tensors["model.norm.weight"]
    save_file(tensors, hf / "model.safetensors")
    code, out, _ = cli(capsys, "verify", hf, megatron)
    assert code == 1 and "model.norm.weight is only in" in out
    assert "experts.3.up_proj.weight: 1 of 1152 values differ, first at [2, 5]: nan and" in out


def test_inspect_counts_parameters(tmp_path, capsys):
    from tests.bridges.tiny_models import tiny_model

    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "hf")
    cli(capsys, "import", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    for folder in ("hf", "megatron"):
        code, out, _ = cli(capsys, "inspect", tmp_path / folder, "--json")
        facts = json.loads(out)
        assert code == 0 and facts["parameters"] == total
        assert facts["active_parameters"] == total - experts // 2  # 2 of 4 experts
        assert facts["dtypes"] == {"float32": 4 * total} and facts["bytes"] == 4 * total
    assert "layers stacked" in facts["layout"]


def test_list_names_every_family_with_what_is_verified(capsys):
    from bridges.families import SUPPORTED

    code, out, _ = cli(capsys, "list")
    assert code == 0 and all(name in out and ", ".join(LAYOUTS[name]) in out for name in SUPPORTED)
    assert set(LAYOUTS) == set(SUPPORTED)
    families = json.loads(cli(capsys, "list", "--json")[1])["families"]
    assert [family["model_type"] for family in families] == list(SUPPORTED)


def test_errors_are_one_message_and_an_exit_code(tmp_path, capsys):
    code, out, err = cli(capsys, "inspect", tmp_path / "nowhere", "--json")
    assert code == 2 and json.loads(out)["exit_code"] == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    for arguments in (["--max-shard-size", "5 elephants"], ["--workers", "0"]):
        code, _, err = cli(capsys, "export", "--megatron", tmp_path, "--out", tmp_path / "out", *arguments)
        assert code == 2 and arguments[1] in err
    with pytest.raises(SystemExit) as usage:
        cli(capsys, "import")
    assert usage.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full_matrix)])
@pytest.mark.process
def test_interrupt_leaves_nothing_under_the_final_name(number, tmp_path):
    """0.3 GB take long enough to be interrupted in the middle, all the more by a process that yields to this one; on a
    busy machine the signal may come late all the same: again."""
    import torch
    from safetensors.torch import save_file

    from bridges.plan import Plan

    hf, out = tmp_path / "hf", tmp_path / "out"
    hf.mkdir()
    config = tiny_config("qwen3", hidden_size=1024, intermediate_size=2048, num_hidden_layers=12)
    (hf / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in Plan.of(config).hf.items()}, hf / "model.safetensors")
    command = ["nice", "-n", "19", sys.executable, "-m", "bridges", "import", "--hf", str(hf), "--out", str(out)]
    for _ in range(10):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
        deadline = time.monotonic() + 60
        while not out.exists() and not written(tmp_path):
            assert process.poll() is None and time.monotonic() < deadline, "the import never started to write"
            time.sleep(0.002)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        shutil.rmtree(out)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def heed_interrupts():
    """Shells start what runs in the background deaf to SIGINT, and children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def written(folder):
    """Data files of an import that is under way; they may vanish while they are listed."""
    try:
        return [path for path in folder.glob(".out.incomplete-*/*.distcp") if path.exists()]
    except FileNotFoundError:
        return []


def test_the_page_of_families_has_every_row():
    """docs/families.md: a section for each family with all its tensor names, and the layouts that tests check."""
    from bridges.catalog import document, layouts
    from bridges.families import SUPPORTED, get_family

    text = document()
    sections = {part.splitlines()[0]: part for part in text.split("\n## ")[2:]}
    assert list(sections) == list(SUPPORTED)
    for name in SUPPORTED:
        family = get_family(name)
        assert f"| {family.architecture} | {layouts(name)} |" in text
        for row in (*family.embedding, *family.layer, *family.dense, *family.moe, *family.head):
            assert all(f"`{each}`" in sections[name] for each in (row.megatron, *row.hf_names)), row


def test_no_family_file_is_long():
    for path in (ROOT / "bridges" / "families").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path.name


@pytest.mark.parametrize("verb", ["convert", "export"])
def test_a_folder_that_exists_is_reported_before_anything_is_read(tmp_path, capsys, verb):
    """Also of a checkpoint that could not be read; the message names no option that the verb does not have."""
    from bridges.__main__ import main as bridges
    from skyrl_megatron.cli import convert

    for name in ("checkpoint", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    folders = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    code = (
        convert(folders) if verb == "convert" else bridges(["export", "--megatron", folders[0], "--out", folders[1]])
    )
    message = capsys.readouterr().err
    assert code == 2 and f"{tmp_path / 'out'} exists" in message and "--" not in message
    if verb == "convert":
        assert convert((str(tmp_path / "absent"), folders[1])) == 2
        assert "no such folder" in capsys.readouterr().err
