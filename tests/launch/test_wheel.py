"""The package as it is installed from its wheel, outside any checkout: what a user has who has no checkout.

The environment is a new one with the wheel alone. What it depends on is in the environment of the tests, by a line
of a ``.pth`` file, which adds that folder and not the finder of a checkout that is installed there.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from skyrl_megatron import __version__
from tests.structure.source import PACKAGES, ROOT
from tests.support.released_models import QWEN3_30B_A3B
from tests.support.whole_folder import write_sums, write_whole_folder

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("wheel")]

BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "launch/examples", *PACKAGES)
PLUGIN = """\
import os

import bridges
import skyrl_megatron
from skyrl_megatron.api import register_policy_loss
from skyrl_megatron.utils.ppo_utils import PolicyLossRegistry

with open(os.environ["SKYRL_SEEN"], "a") as file:
    process = os.getpid() if "RAY_JOB_ID" in os.environ else "driver"
    print(process, skyrl_megatron.__file__, bridges.__file__, file=file)


@register_policy_loss("of_an_entry_point")
def loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_log_probs=None):
    regular = PolicyLossRegistry.get("regular")
    return regular(log_probs, old_log_probs, advantages, config, loss_mask, rollout_log_probs)
"""
SMALL = """
    trainer.max_training_steps=2 trainer.train_batch_size=32 trainer.policy_mini_batch_size=32 trainer.logger=console
    trainer.update_epochs_per_batch=1 trainer.ckpt_interval=2 trainer.hf_save_interval=2 trainer.eval_interval=0
    trainer.eval_before_train=false trainer.placement.policy_num_gpus_per_node=1
    trainer.policy.megatron_config.expert_model_parallel_size=1 generator.inference_engine.num_engines=1
""".split()
"""Two steps of the embedded run with one rank and one engine."""


def tracked(*paths):
    """Names of the files in git."""
    command = ["git", "ls-files", "-z", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with sdist and wheel, which CONTRIBUTING.md's command builds from what is in git."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *BUILT_FROM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    # without isolation, which takes setuptools from a package index
    command = [uv(), "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", out]
    subprocess.run(command, cwd=tree, check=True, timeout=120)
    return out


def uv():
    """The installer of launch/setup.sh."""
    own = Path(sys.prefix) / "tools" / "bin" / "uv"
    return own if own.exists() else shutil.which("uv")


@pytest.fixture(scope="module")
def home(built, tmp_path_factory):
    """The user's folder, with the environment ``env`` in it, and a plugin that is installed there."""
    folder = tmp_path_factory.mktemp("user")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=120)
    python = folder / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [uv(), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel], check=True
    )
    packages = next((folder / "env" / "lib").glob("python*/site-packages"))
    (packages / "zz_dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (packages / "a_plugin.py").write_text(PLUGIN)
    metadata = packages / "a_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[skyrl_megatron.plugins]\nmine = a_plugin\n")
    return folder


def environment(home):
    """The variables of a user: no PYTHONPATH, and nothing of the tests but the threads."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    here = {"HOME": str(home), "SKYRL_MEGATRON_HOME": str(home / "made"), "SKYRL_SEEN": str(home / "seen.txt")}
    return passed | here | {"HF_HUB_OFFLINE": "1"}


def ran(home, *words, code=0):
    """Output of ``skyrl-megatron WORDS`` in the user's folder."""
    command = [home / "env" / "bin" / "skyrl-megatron", *map(str, words)]
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=400)
    assert done.returncode == code, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout + done.stderr


def test_the_archives_have_what_is_in_git(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    here = {name for name in tracked(*PACKAGES) if not (ROOT / name).is_symlink()}
    here |= {name.replace("launch/", "skyrl_megatron_tools/", 1) for name in tracked("launch/examples")}
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = message_from_bytes(file.read(f"skyrl_megatron-{__version__}.dist-info/METADATA"))
    assert inside == here
    with tarfile.open(archive) as file:
        assert here <= {name.partition("/")[2] for name in file.getnames()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__ == metadata["Version"]
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(project["requires-python"])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# ") and {"cpu", "gpu"} <= set(metadata.get_all("Provides-Extra"))


def test_no_checkout_answers(home):
    code = f"for name in {[*PACKAGES]}: print(__import__(name).__file__)"
    python = home / "env" / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd="/", env=environment(home), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(home / "env")) for path in done.stdout.split()), done.stdout
    assert ran(home, "--version") == f"skyrl-megatron {__version__}\n"


def test_a_recipe_of_large_gpus_is_checked(home, tmp_path):
    model = write_whole_folder(tmp_path / "model", QWEN3_30B_A3B)
    rows = write_sums(tmp_path / "rows.parquet", 256)
    words = ["--recipe", "qwen3-30b-a3b-2x8", f"model={model}", f"data.train_data=['{rows}']", "data.val_data=[]"]
    shared = [f"trainer.{name}_path=/shared/{name}" for name in ("log", "ckpt", "export")]
    out = ran(home, "train", *words, "--check=2x8", "--gpu", "h100", "--host-memory", "1TB", *shared)
    assert "it can run on" in out and "# memory" in out
    assert "Use one of qwen3-30b-a3b-sft, " in ran(home, "sft", "--recipe", code=2)


def test_the_examples_are_written(home):
    ran(home, "examples")
    assert (home / "launch" / "examples" / "tiny_repos" / "make.py").is_file()
    assert "remove it, or name another folder" in ran(home, "examples", code=2)


@pytest.fixture(scope="module")
def trained(home):
    """What the embedded run said, whose loss is that of the plugin."""
    return ran(home, "train", *SMALL, "trainer.algorithm.policy_loss_type=of_an_entry_point")


@pytest.mark.vllm
def test_the_embedded_run_and_what_is_done_with_it(home, trained):
    """Two steps after the warm-up; every process has the code of the wheel; then the verbs that take its files."""
    assert "ended after step 2 of 2" in trained
    seen = [line.split(" ") for line in (home / "seen.txt").read_text().splitlines()]
    assert all(path.startswith(str(home / "env")) for _, *paths in seen for path in paths), seen
    assert len({process for process, *_ in seen} - {"driver"}) >= 2, "a rank, an engine"
    folder = home / "made" / "embedded" / "seed_42"
    ran(home, "convert", folder / "ckpts" / "global_step_2", home / "converted")
    exported = folder / "exports" / "global_step_2" / "policy"
    assert (home / "converted" / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    report = folder / "logs" / "embedded" / "addition" / "report.html"
    report.unlink()
    assert str(report) in ran(home, "report", report.parent)
    assert (ROOT / "skyrl_megatron_observe" / "static" / "charts.js").read_text().strip() in report.read_text()


@pytest.mark.vllm
def test_supervised_training_of_its_model(home, trained):
    talk = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    (home / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(8)))
    model = home / "made" / "embedded" / "seed_42" / "exports" / "global_step_2" / "policy"
    words = [
        f"model={model}",
        f"data.train_data=['{home}/talks.jsonl']",
        "trainer.train_batch_size=8",
        "sft.max_length=64",
    ]
    words += ["trainer.placement.policy_num_gpus_per_node=1", "trainer.logger=console", "trainer.project_name=sft"]
    words += [f"trainer.{name}_path={home}/sft/{name}" for name in ("ckpt", "export", "log")]
    assert "step 1/1" in ran(home, "sft", *words)
