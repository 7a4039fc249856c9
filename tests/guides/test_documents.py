"""What the guides show works: every block of Python runs, every command's keys exist, every link leads somewhere.

The script of the trainer guide runs in ``tests/plugins``.
"""

import functools
import importlib.util
import os
import re
import runpy
import subprocess
import sys

import pytest

from skyrl_megatron import cli
from tests.guides.documents import DOCUMENTS, GENERATED, ROOT, blocks, name_of, shown
from tests.job import runs

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)")
OWN, DOTS = ("python", ".venv/bin/python", "launch/run_moe.sh", "skyrl-megatron"), {"…", "key=value"}
KEY_VALUE_VERBS = ("train", "train-async", "sft", "dpo", "reward", "evaluate", "check")
OLDER_KEYS = pytest.mark.filterwarnings("ignore:deprecated configuration keys:DeprecationWarning")  # shown on a page
OWN_KEYS = {
    "train_letters.py": {"trainer.price_of_a_token"},
    "run_moe.sh": {"model"},
    **{verb: {"model"} for verb in KEY_VALUE_VERBS},
}
"""Keys that a script or a verb adds to those of the configuration."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own to work in; what the guides register is forgotten."""
    from skyrl_megatron import plugins
    from skyrl_megatron.envs import base_text_env as registry
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])  # scripts read keys from their command line
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    for classes in vars(plugins).values():
        if isinstance(classes, plugins.ClassRegistry):
            monkeypatch.setattr(classes, "_classes", dict(classes._classes))
    yield tmp_path
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.repopulate()


def code(document):
    """Its blocks of Python but those that load what a run has made."""
    return [block for block in blocks(document, "python") if not block.options.startswith("load=")]


def with_python(process):
    """Documents whose blocks start processes, or those that start none."""
    return [
        document
        for document in DOCUMENTS
        if (found := code(document)) and any(block.options == "process" for block in found) == process
    ]


def run_blocks(document, folder):
    names = {"__name__": "__main__"}
    for block in code(document):
        if block.file:
            (folder / block.file).write_text(block.text)
            names |= {"__name__": "__main__"}
            runpy.run_path(str(folder / block.file), run_name="guide")
        else:
            block.run(names)


@OLDER_KEYS
@pytest.mark.parametrize("document", with_python(process=False), ids=name_of)
def test_code_runs(document, folder):
    run_blocks(document, folder)


@pytest.mark.process
@pytest.mark.parametrize("document", with_python(process=True), ids=name_of)
def test_code_that_starts_processes_runs(document, folder, session_ray, monkeypatch):
    """``ray.init()`` joins the session's Ray; the rest is as a user starts it."""
    import ray

    monkeypatch.setattr(ray, "init", functools.partial(ray.init, session_ray.address))
    try:
        run_blocks(document, folder)
    finally:
        ray.shutdown()


def commands():
    """Those of this project's own in shell blocks, without variables before them or dots for what a user adds."""
    found = [(document, words) for document in DOCUMENTS for words in shown(document)]
    return [(document, words) for document, words in found if words[0] in OWN and not DOTS & set(words)]


@OLDER_KEYS
@pytest.mark.parametrize(
    ("document", "words"), commands(), ids=lambda value: value[-1] if isinstance(value, list) else ""
)
def test_commands_are_there_and_know_their_keys(document, words):
    from skyrl_megatron.config import SkyRLTrainConfig

    if words[0].endswith("python"):
        words = words[1:]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), f"{name_of(document)}: no module {words[1]}"
        words = words[1:]
    elif words[0] == "skyrl-megatron":
        words = words[1:]
        assert words[0] in [*cli.VERBS, "--help"], f"{name_of(document)}: no verb {words[0]}"
        if words[0] not in KEY_VALUE_VERBS:  # its arguments are no keys
            return
    elif "/" in words[0]:
        assert (ROOT / words[0]).is_file(), f"{name_of(document)}: no file {words[0]}"
    own = OWN_KEYS.get(words[0].rpartition("/")[2], set())  # of a script, or a module
    keys = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    cfg = SkyRLTrainConfig.from_cli_overrides([word for word in keys if word.partition("=")[0] not in own])
    assert isinstance(cfg, SkyRLTrainConfig)


def local_commands():
    """Commands of the documents that are to be run as they stand."""
    found = [block for document in DOCUMENTS for block in blocks(document, "bash") if block.options == "run"]
    return [pytest.param(words, id=" ".join(words)) for block in found for words in block.commands()]


@pytest.mark.full_matrix
@pytest.mark.process
@pytest.mark.parametrize("words", local_commands())
def test_local_commands_run(words, tmp_path):
    variables = {**os.environ, "SKYRL_MEGATRON_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=runs.TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launch/examples/README.md"], ids=str
)
def test_links_lead_somewhere(document):
    broken = [
        target
        for target in LINK.findall(document.read_text())
        if "://" not in target
        and (path := (document.parent / target).resolve()) not in GENERATED
        and not path.exists()
    ]
    assert not broken, broken


def test_an_experiment_that_makes_its_prompts_needs_no_file(capsys, tmp_path, monkeypatch):
    """The default ``data.train_data`` is missed only where somebody reads it; one that was named, always."""
    from skyrl_megatron.entrypoints.main_base import BasePPOExp, main

    class WithPrompts(BasePPOExp):
        def get_train_dataset(self):
            return super().get_train_dataset()

    class WithTrainer(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return super().get_trainer(*args, **kwargs)

    monkeypatch.setenv("HOME", str(tmp_path))
    wanting = []
    for experiment, keys in ((WithPrompts, []), (WithPrompts, ["data.train_data=[no.jsonl]"]), (WithTrainer, [])):
        given = ["--check", "data.val_data=[]", "trainer.logger=tensorboard", "trainer.seed=none", *keys]
        assert main(given, experiment=experiment) == 2
        wanting.append("data.train_data" in capsys.readouterr().err)
    assert wanting == [False, True, True]
