"""All benchmarks by name.

    python benchmarks/run.py [NAME [ARGUMENTS]]      without a name: their list; NAME --help, NAME --smoke

Each is a file of this folder, run as it is: its processes import their functions from it.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("dense_batch", "load_only", "plane_sides", "run", "smoke")
"""Modules of this folder that are no benchmarks."""


def names() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in PARTS)


def main() -> int:
    """Run a benchmark in the place of this process, or print the list. Returns the exit code."""
    name, *arguments = sys.argv[1:] or [""]
    if name in names():
        os.execv(sys.executable, [sys.executable, str(HERE / f"{name}.py"), *arguments])
    for known in names():
        described = ast.get_docstring(ast.parse((HERE / f"{known}.py").read_text())) or ""
        print(f"{known:<18}{described.splitlines()[0]}")
    if name in ("", "-h", "--help"):
        return 0
    print(f"NAME={name}: no such benchmark; choose one of the list", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
