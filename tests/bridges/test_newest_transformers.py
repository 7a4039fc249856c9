"""Folders between the newest transformers and the locked one, of every family, in both directions.

The newest is in ``.venv-templates`` (``launch/requirements/templates.sh``). What it writes is read here, with the same
tensors and settings as a folder of the locked one; what is exported here it opens, with the same logits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bridges.newest_transformers import logits, open_folder
from tests.bridges.tiny_models import TINY, save_tiny

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ROOT / ".venv-templates/transformers"
pytestmark = [
    pytest.mark.full_matrix,
    pytest.mark.slow,
    pytest.mark.skipif(
        not NEWEST.is_dir(), reason="no .venv-templates/transformers: launch/requirements/templates.sh"
    ),
]
FAMILIES = [*TINY, "qwen3_5_moe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders ``own`` (of the locked transformers), ``exported`` and ``written`` (of the newest), and its report."""
    from bridges.convert import export_megatron, import_hf
    from tests.bridges.test_text_and_images import write_model

    root = tmp_path_factory.mktemp("newest")
    for family in FAMILIES:
        own = root / "own" / family
        save_tiny(family, own) if family in TINY else write_model(own)
        import_hf(own, root / "megatron" / family)
        export_megatron(root / "megatron" / family, root / "exported" / family, template=own)
    environment = os.environ | {"PYTHONPATH": f"{NEWEST}{os.pathsep}{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "tests.bridges.newest_transformers",
        str(root / "written"),
        str(root / "exported"),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads((root / "written/report.json").read_text())


def test_it_is_newer(folders):
    import transformers

    ours, newest = (tuple(map(int, each.split("."))) for each in (transformers.__version__, folders[1]["version"]))
    assert newest > ours


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_writes_is_read(folders, family, tmp_path):
    import torch

    from bridges.hf_io import HfFolder
    from bridges.plan import Plan

    root, report = folders
    assert report[f"written/{family}"] == {}
    model, problems = open_folder(root / "written" / family)
    assert problems == {}
    largest = float((torch.load(root / f"written/{family}.pt") - logits(model)).abs().max())
    print(f"{family}: {largest:.1e}")
    assert largest <= 1e-5
    model.save_pretrained(tmp_path)
    newest, locked = HfFolder(root / "written" / family), HfFolder(tmp_path)
    plan = Plan.of(newest.config)
    plan.check(newest.shapes(), family)
    assert newest.tensors.keys() == locked.tensors.keys()
    assert all(torch.equal(newest.read(name), locked.read(name)) for name in newest.tensors)
    assert plan.shape == Plan.of(locked.config).shape
    assert plan.family.megatron_config(newest.config) == plan.family.megatron_config(locked.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_it_opens(folders, family):
    import torch

    root, report = folders
    assert report[f"exported/{family}"] == {}
    model, _ = open_folder(root / "own" / family)
    largest = float((torch.load(root / f"exported/{family}.pt") - logits(model)).abs().max())
    print(f"{family}: {largest:.1e}")
    assert largest <= 1e-5


def test_mimo_has_the_window_of_its_engine(folders):
    """Of a folder with the key of the released one, in which the newest transformers counts one token more."""
    from bridges.families import get_family

    config = json.loads((folders[0] / "written/mimo/config.json").read_text())
    assert (config["sliding_window"], config["sliding_window_size"]) == (18, 17)
    assert get_family("mimo_v2_flash").megatron_config(config).transformer["window_size"] == (16, 0)


def test_keys_that_engines_read(folders):
    """Both versions write the same of the keys that vLLM reads; ``--check`` names those of MiMo that neither does."""
    from bridges.files import read_hf_config, text_config
    from bridges.plan import Plan
    from skyrl_megatron_observe.preflight.engine_models import engine_model_faults

    def faults(folder):
        config = text_config(read_hf_config(folder))
        family = Plan.of(config).family
        return [str(fault) for fault in engine_model_faults(family.model_type, family.config(config), config)]

    root, _ = folders
    assert any("hybrid_layer_pattern" in fault for fault in faults(root / "written/mimo_v2_flash"))
    assert {name: faults(root / "written" / name) for name in FAMILIES} == {
        name: faults(root / "own" / name) for name in FAMILIES
    }
