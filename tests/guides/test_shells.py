"""Commands of the documents as somebody types them: bash and zsh make the same words of them, and a command for GPUs
or hosts passes ``--check`` on those that its block names (``check=NODESxGPUS``, which no page shows)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.guides.documents import ALL, FENCE, INLINE, ROOT, SHELLS, blocks

RECORD = """#!{python}
import json, sys
print(json.dumps(sys.argv[1:]))
"""
STARTS = re.compile(r"\$\(|\|\s|;|&&|[<>]\(")
"""What runs another program: only the syntax of such a line is looked at."""


def shell_blocks():
    pages = [path for path in ALL if path.name != "CONFIG.md"]
    return [block for page in pages for kind in SHELLS for block in blocks(page, kind)]


def typed(block):
    """The lines of a block as they are typed, continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip()]


def all_lines():
    inline = [line for page in ALL for line in INLINE.findall(FENCE.sub("", page.read_text()))]
    return [*(line for block in shell_blocks() for line in typed(block)), *inline]


FOR_CONTRIBUTORS = "CONTRIBUTING.md"
"""Its commands have comments, which bash leaves out."""


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_makes_the_words_that_were_meant(shell, tmp_path):
    """In a folder with a file that a pattern could meet."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    record = tmp_path / "record"
    record.write_text(RECORD.format(python=sys.executable))
    record.chmod(0o755)
    lines = list(dict.fromkeys(all_lines()))
    simple = [line for line in lines if not STARTS.search(line) and "…" not in line]
    assert len(simple) > 60
    (tmp_path / "script").write_text("\n".join(f"./record {line}" for line in simple))
    (tmp_path / "syntax").write_text("\n".join(lines))
    options = ["-f"] if shell == "zsh" else []
    variables = {**os.environ, "HOME": "$HOME"}  # what stands for it stays as it is written
    done = subprocess.run(
        [shell, *options, "script"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert not done.stderr, done.stderr
    given = [json.loads(line) for line in done.stdout.splitlines()]
    meant = [[re.sub("^~", "$HOME", word) for word in shlex.split(line, comments=True)] for line in simple]
    assert [pair for pair in zip(given, meant, strict=True) if pair[0] != pair[1]] == []
    done = subprocess.run([shell, "-n", "syntax"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert not done.stderr and done.returncode == 0


def test_no_comment_follows_a_command():
    """Where somebody types, zsh takes ``#`` and what follows as words."""
    lines = [line for block in shell_blocks() if block.document.name != FOR_CONTRIBUTORS for line in typed(block)]
    assert [line for line in lines if any(word.startswith("#") for word in shlex.split(line))] == []


# ------------------------------------------------------------------ commands for GPUs and hosts
FOR_GPUS = {
    " ".join(words): (block, words)
    for block in shell_blocks()
    if "check" in block.options
    for words in block.commands()
}
MACHINE = ("--gpu", "h100", "--host-memory", "2TB")


def test_every_command_that_names_a_recipe_for_gpus_is_checked():
    """In a block; a line within a sentence names no data."""
    missing = [
        line
        for block in shell_blocks()
        for line in typed(block)
        if re.search(r"--(recipe|config)[ =](launch/recipes/)?(qwen|olmoe|glm|deepseek|kimi|gpt)", line)
        and "check" not in block.options
        and "--check" not in line
        and "HF_HUB_OFFLINE" not in line  # test_commands.py checks it
    ]
    assert missing == [] and len(FOR_GPUS) >= 8


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The shared folder of the guides with a model, prompts, conversations and pairs; GSM8K and OLMoE on a hub."""
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry
    from tests.support import hub_endpoint
    from tests.support.released_models import OLMOE_1B_7B, QWEN3_30B_A3B
    from tests.support.shared_folder import share
    from tests.support.whole_folder import write_sums, write_whole_folder

    shared = tmp_path / "shared"
    write_whole_folder(shared / "m", QWEN3_30B_A3B)
    for name in ("train", "test"):
        write_sums(shared / f"{name}.parquet", 512)
    for name in ("train", "validation"):
        write_sums(tmp_path / "data" / "gsm8k" / f"{name}.parquet", 2048)
    question, right, wrong = (
        {"role": role, "content": text} for role, text in (("user", "1+1=?"), ("assistant", "2"), ("assistant", "3"))
    )
    rows = {
        "talk": {"messages": [question, right]},
        "pairs": {"prompt": [question], "chosen": [right], "rejected": [wrong]},
    }
    for name, row in {**rows, "held-out": rows["talk"], "held-out-pairs": rows["pairs"]}.items():
        (shared / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 512))
    share(tmp_path, monkeypatch)
    page = blocks(ROOT / "docs" / "guides" / "algorithms.md", "python")
    code = [block.text for block in page if re.search('"(best_of_group|soft_reinforce)"\\)\ndef ', block.text)]
    (tmp_path / "my_algorithms.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    with hub_endpoint.serve() as server:
        hub_endpoint.use(monkeypatch, tmp_path / "hf", HF_ENDPOINT=server.url)
        olmoe = write_whole_folder(tmp_path / "olmoe", OLMOE_1B_7B)
        for name, folder in (("allenai/OLMoE-1B-7B-0125-Instruct", olmoe), ("Qwen/Qwen3-30B-A3B", shared / "m")):
            small = [file for file in folder.iterdir() if file.suffix != ".safetensors"]  # a check fetches no weights
            server.repository(name).push({file.name: file.read_bytes() for file in small if file.is_file()})
        yield tmp_path
    AdvantageEstimatorRegistry.repopulate()
    PolicyLossRegistry.repopulate()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", FOR_GPUS, ids=lambda command: FOR_GPUS[command][0].document.stem)
def test_a_command_for_gpus_is_green_on_the_machines_that_its_page_names(cluster, capsys, command):
    block, words = FOR_GPUS[command]
    words = [re.sub(r"(?<![\w:])/shared/", f"{cluster}/shared/", word) for word in words]
    asked = block.options.removeprefix("check=")
    added = [] if asked == "check" else [f"--check={asked}", *MACHINE]
    assert run([*words, *added, "trainer.logger=console"], cluster) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    nodes, gpus = map(int, re.search(r"(\d+)x(\d+)", " ".join([*words, *added])).groups())
    assert f"it can run on: {gpus} GPUs per node, {nodes} node(s)" in out
    assert "stay idle" not in out, "all GPUs that the page names are used"
    if block.document.name == "one-gpu.md":
        assert_said(block.document.read_text(), out)


def assert_said(page, out):
    """The figures of the page are those of the check, to a tenth."""
    said = re.search(r"takes (\d+) s a step on paper \((\d+) to (\d+)\)", page).groups()
    printed = re.search(r"a step +(\S+) s +\((\S+) … (\S+)\)", out).groups()
    assert list(map(float, said)) == pytest.approx(list(map(float, printed)), rel=0.1)
    said = re.search(r"training, (\d+) of (\d+) GB", page).groups()
    printed = re.search(r"policy training, rank 0: (\S+) GB of (\S+) GB", out).groups()
    assert list(map(float, said)) == pytest.approx(list(map(float, printed)), rel=0.1)


def run(words, folder):
    """Run a command in this process, as its program would. Returns its exit code."""
    from skyrl_megatron import cli
    from skyrl_megatron.entrypoints import main_base
    from skyrl_megatron_tools.embedded import run_moe

    if words[0] == "sbatch":
        words = words[next(n for n, word in enumerate(words) if word.endswith("run_moe.sbatch")) :]
    program, *words = words
    if program == "docker":
        return run_moe.main(words[words.index("--recipe") :])
    if program.startswith("launch/"):
        if "--hosts" in words:
            del words[words.index("--hosts") : words.index("--hosts") + 2]
        return run_moe.main(words)
    if program == "skyrl-megatron":
        return cli.main(words)
    assert program == "python"
    if words[0] == "-m":
        return main_base.main([os.path.expandvars(word) for word in words[2:]])
    return run_script(words, folder)


def run_script(words, folder):
    """``launch/examples/gsm8k.py`` on published rows of ours."""
    import runpy

    published = folder / "published"
    published.mkdir()
    for split in ("train", "test"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"question": ["1+1?"] * 512, "answer": ["It is 2.\n#### 2"] * 512})
        parquet.write_table(table, published / f"{split}.parquet")
    return runpy.run_path(words[0])["main"](["--published", str(published), *words[1:]])


# ------------------------------------------------------------------ results that are loaded
LOADED = [block for page in ALL for block in blocks(page, "python") if block.options.startswith("load=")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", LOADED, ids=lambda block: block.document.name)
def test_the_result_is_loaded(block, tmp_path, monkeypatch, capsys):
    from skyrl_megatron.tiny_model import write_embedded_model

    monkeypatch.setenv("HOME", str(tmp_path))
    write_embedded_model(tmp_path / block.options.removeprefix("load=~/"), 1)
    block.run({"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_guides_of_supervised_training_end_with_the_loaded_result():
    assert {block.document.name for block in LOADED} == {"sft.md", "preferences.md"}
    for name in ("sft.md", "preferences.md"):
        lines = (ROOT / "docs" / "guides" / name).read_text().splitlines()
        assert lines[2].startswith("```sh check=") and "## Load the result" in lines[-20:]
