"""The commands of launch/examples/README.md."""

import os
from pathlib import Path

from tests.guides.documents import ROOT, blocks

README = ROOT / "launch" / "examples" / "README.md"
EXAMPLES = README.parent


def commands() -> dict[str, list[str]]:
    """Words of each command that runs an example, by the example's name."""
    made = {}
    for block in blocks(README, "bash"):
        for words in block.commands():
            files = [Path(word).stem for word in words if word.startswith("launch/examples/")]
            (name,) = [file for file in files if file != "tiny"] or ["tiny"]
            assert name not in made, f"{name} has two commands"
            made[name] = words
    del made["tiny"]
    return made


def environment(folder: Path) -> dict[str, str]:
    """Variables of a command typed in ``folder``, in which the documents' relative names lead somewhere."""
    path = f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
