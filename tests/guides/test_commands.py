"""No command of a document is left to itself: a test runs it, or it is known what it needs (:mod:`.commands`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guides.commands import COMMANDS
from tests.guides.documents import ALL, ROOT, blocks, shown

SHOWN = {" ".join(words): (document, words) for document in ALL for words in shown(document)}


def row_of(command):
    return next((row for row in COMMANDS if row.matches(command)), None)


# ------------------------------------------------------------------ the table
def test_every_command_has_a_row():
    missing = [f"{file.relative_to(ROOT)}: {command}" for command, (file, _) in SHOWN.items() if not row_of(command)]
    assert not missing, "\n".join(["run them in a test, and add them to tests/guides/commands.py:", *missing])


def test_every_row_is_used_and_names_a_test_or_a_need():
    used = {row_of(command) for command in SHOWN}
    assert [row.pattern for row in COMMANDS if row not in used] == []
    assert all(bool(row.test) != bool(row.needs) for row in COMMANDS)


def test_tests_of_the_table_are_there():
    for row in COMMANDS:
        file, _, name = row.test.partition("::")
        assert not file or f"\ndef {name}(" in (ROOT / file).read_text(), row.test


@pytest.mark.parametrize("command", ["launch/no_such.sh --now", "python -m skyrl_megatron.nothing"])
def test_a_new_command_is_noticed(command):
    assert row_of(command) is None


@pytest.mark.parametrize("document", ALL, ids=lambda path: path.name)
def test_every_fence_says_what_is_in_it(document):
    """Else a command in it is not seen."""
    fences = [line for line in document.read_text().splitlines() if line.startswith("```")]
    assert all(line != "```" for line in fences[::2]), document


# ------------------------------------------------------------------ what runs here
PYTHON = {"python": sys.executable, ".venv/bin/python": sys.executable}
QUICK = {
    "python -m skyrl_megatron": (2, "replay-batch"),
    "skyrl-megatron --help": (0, "replay-batch"),
    "skyrl-megatron evaluate --help": (0, "--check"),
    "skyrl-megatron convert --help": (0, "convert"),
    "skyrl-megatron sft --help": (0, "sft.max_length"),
    "skyrl-megatron dpo --help": (0, "dpo.beta"),
    "skyrl-megatron reward --help": (0, "reward.max_length"),
    "python -m bridges": (2, "inspect"),
    "skyrl-megatron convert list": (0, "qwen3_moe"),
    "skyrl-megatron prepare --help": (0, "--num-digits"),
    "docker/build.sh --help": (0, "docker/build.sh"),
    ".venv/bin/python launch/requirements/check.py": (0, ""),
}
"""Command → exit status, a word that it says."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs(command, tmp_path):
    status, says = QUICK[command]
    words = [PYTHON.get(word, word) for word in command.split()]
    if words[0] == "skyrl-megatron":
        words[:1] = [sys.executable, "-m", "skyrl_megatron.cli"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    told = done.stdout + done.stderr
    assert done.returncode == status and says in told and "Traceback" not in told, told[-4000:]


CHECKS = [command for command in SHOWN if row_of(command) and row_of(command).test.endswith("finds_nothing")]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The models of the guides, of tiny sizes, on a hub of ours; the folder of a user who has data."""
    from tests.bridges.tiny_models import tiny_config
    from tests.support import hub_endpoint
    from tests.support.whole_folder import write_sums, write_whole_folder

    sizes = dict(hidden_size=64, head_dim=32, num_hidden_layers=2, num_experts=8, max_position_embeddings=65536)
    write_whole_folder(tmp_path / "models" / "mine", tiny_config("qwen3_moe", **sizes))
    files = {each.name: each.read_bytes() for each in (tmp_path / "models" / "mine").iterdir() if each.is_file()}
    for split in ("train", "validation"):
        write_sums(tmp_path / "data" / f"{split}.parquet", 2000)
        write_sums(tmp_path / "data" / "gsm8k" / f"{split}.parquet", 2000)
    (tmp_path / "my_reward.py").write_text(blocks(ROOT / "README.md", "python")[0].text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with hub_endpoint.serve() as server:
        hub_endpoint.use(monkeypatch, tmp_path / "hf", HF_ENDPOINT=server.url)
        for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"):
            server.repository(name).push(files)
        card = {"configs": [{"config_name": "main", "data_files": [{"split": "train", "path": "main/*.parquet"}]}]}
        rows = (tmp_path / "data" / "gsm8k" / "train.parquet").read_bytes()
        server.repository("datasets/acme/sums").push(
            {"README.md": f"---\n{json.dumps(card)}\n---\n".encode(), "main/train.parquet": rows}
        )
        yield server


@pytest.mark.process  # a command starts its fork server first
@pytest.mark.parametrize("command", CHECKS)
def test_a_check_of_the_guides_finds_nothing(hub, capsys, command):
    from skyrl_megatron import cli

    _, words = SHOWN[command]
    assert cli.main(words[1:]) == 0, capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_was_fetched_is_enough_without_a_network(hub, shell, tmp_path):
    """The block of the guide in a shell: two downloads, then a run that asks nobody, of which the check is made."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (block,) = (block for block in blocks(ROOT / "docs" / "guides" / "hub.md", "sh") if "hf download" in block.text)
    *fetching, offline = block.text.replace("/shared/", f"{tmp_path}/shared/").strip().splitlines()
    machine = "--check=1x8 --gpu h100 --host-memory 1TB trainer.logger=console"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def type_in(lines, **more):
        options = [shell, "-f"] if shell == "zsh" else [shell]
        text = "set -e\n" + "\n".join(lines)
        done = subprocess.run(
            [*options, "-c", text], env=variables | more, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    type_in(fetching, HF_ENDPOINT=hub.url)
    asked = len(hub.requests)
    assert asked and "it can run on: 8 GPUs per node" in type_in([f"{offline} {machine}"], HF_ENDPOINT=hub.url)
    assert len(hub.requests) == asked
