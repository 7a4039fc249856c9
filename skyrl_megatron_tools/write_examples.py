"""``skyrl-megatron examples [FOLDER]``: write ``launch/examples`` below FOLDER, by default this folder.

The guides' commands then run in FOLDER as in a checkout, ``python launch/examples/tiny.py`` first.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parent / "examples"
"""In a checkout a link to ``launch/examples``, in a wheel its files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 2 if the folder exists or cannot be written."""
    parser = argparse.ArgumentParser(
        prog="skyrl-megatron examples", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="FOLDER")
    out = parser.parse_args(argv).folder.expanduser() / "launch" / "examples"
    if out.exists():
        print(f"{out} exists: remove it, or name another folder", file=sys.stderr)
        return 2
    try:
        shutil.copytree(SOURCE, out, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        print(f"{out} cannot be written ({error.strerror or error}): name another folder", file=sys.stderr)
        return 2
    print(f"{out}: start with README.md there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
