"""``skyrl-megatron convert CHECKPOINT OUT``: convert a checkpoint to a Hugging Face folder.

CHECKPOINT is the folder that a run prints at its end (``checkpoint: …/global_step_N``), or any Megatron checkpoint
folder. OUT must not exist. ``python -m bridges export --help`` lists further arguments. If the first argument is a
command of ``python -m bridges`` (list, inspect, import, export, merge, verify), that command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bridges import __main__ as bridges

COMMANDS = ("list", "inspect", "import", "export", "merge", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code of ``python -m bridges``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if args else 2
    if args[0] in COMMANDS or args[0].startswith("-"):
        return bridges.main(args)
    if len(args) < 2 or args[1].startswith("-"):
        print(f"convert {args[0]}: add the folder to write as the second argument", file=sys.stderr)
        return 2
    return bridges.main(["export", "--megatron", args[0], "--out", *args[1:]])


if __name__ == "__main__":
    sys.exit(main())
