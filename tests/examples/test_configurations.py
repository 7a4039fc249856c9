"""Every example is in the README with its command, and the command's configuration can run."""

import runpy
import subprocess
import sys

import pytest
import yaml

from tests.examples.commands import EXAMPLES, README, commands


def test_the_readme_lists_every_example():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")} - {"tiny.py", "tiny.yaml"}
    table = {line.split("`")[1] for line in README.read_text().splitlines() if line.startswith("| `")}
    assert {name for name in table if "/" not in name} == files
    assert all((EXAMPLES / name).is_file() for name in table)
    assert set(commands()) == {name.rpartition(".")[0] for name in files}


def test_git_ignores_what_the_examples_write():
    """In the folder of the repository, in which their documented commands are typed."""
    configurations = [yaml.safe_load(path.read_text())["trainer"] for path in EXAMPLES.glob("**/t*.yaml")]
    folders = {each["ckpt_path"].partition("/")[0] for each in configurations if "ckpt_path" in each}
    assert folders == {"tiny", "tiny_repos"}
    command = ["git", "check-ignore", *(f"{folder}/file" for folder in sorted(folders))]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    root = subprocess.run(command, cwd=EXAMPLES.parents[1], capture_output=True, text=True, check=True).stdout
    assert root.splitlines() == ["tiny/file", "tiny_repos/file"]
    assert done.returncode == 1, "the example itself, launch/examples/tiny_repos, is not ignored"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What ``tiny.py`` writes, with a model that was taught nothing: a folder in which commands are typed."""
    folder = tmp_path_factory.mktemp("examples")
    written = runpy.run_path(str(EXAMPLES / "tiny.py"))
    written["main"](folder / "tiny", steps=0)
    return folder


@pytest.fixture
def typed_in(tiny, monkeypatch):
    """The folder, with the repository's ``launch`` in it; names that scripts register are forgotten."""
    from skyrl_megatron.algorithms.advantages import AdvantageEstimatorRegistry
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry
    from skyrl_megatron.envs import base_text_env as registry
    from skyrl_megatron.plugins import GENERATORS

    monkeypatch.chdir(tiny)
    if not (tiny / "launch").exists():
        (tiny / "launch").symlink_to(EXAMPLES.parent)
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(GENERATORS, "_classes", dict(GENERATORS._classes))
    yield tiny
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.repopulate()


@pytest.mark.parametrize("name", commands())
def test_a_configuration_can_run(name, typed_in, monkeypatch, capsys):
    from skyrl_megatron import cli

    program, *words = commands()[name]
    if program == "python":
        script, *words = words
        monkeypatch.setattr(sys, "argv", [script, *words, "--check"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        code = ended.value.code
    else:
        code = cli.main([*words, "--check"])
    printed = capsys.readouterr()
    assert code == 0, printed.out[-2000:] + printed.err
    assert "warning" not in printed.err.lower(), printed.err
