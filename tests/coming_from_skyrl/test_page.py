"""``docs/coming-from-skyrl.md``: the modules and names of its table are there."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-skyrl.md").read_text()
ROWS = re.findall(r"^\| `(skyrl[\w.]*)` \| `(skyrl_megatron[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)


def test_the_table_is_read():
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("there", "here", "names"), ROWS, ids=[row[0] for row in ROWS])
def test_names_of_the_table_are_there(there, here, names):
    module = importlib.import_module(here)
    missing = [name for name in re.findall(r"`(\w+)`", names) if not hasattr(module, name)]
    assert not missing, f"{there}: {here} lacks {missing}"
    root = there.removeprefix("skyrl.backends.").removeprefix("skyrl.train").removeprefix("skyrl_train")
    assert there.startswith("skyrl_gym") or here == f"skyrl_megatron{root}", "only the root differs"
