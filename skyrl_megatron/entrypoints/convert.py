"""Convert: ``skyrl-megatron convert CHECKPOINT OUT`` writes a Hugging Face folder.

CHECKPOINT is what a run prints at its end (``checkpoint: …/global_step_N``), or any Megatron checkpoint folder; OUT
must not exist. Further arguments are those of ``python -m bridges export --help``. With one of its commands (list,
inspect, import, export, merge, verify) in the place of CHECKPOINT it is ``python -m bridges``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bridges import __main__ as bridges

COMMANDS = ("list", "inspect", "import", "export", "merge", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code, that of ``python -m bridges``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if args else 2
    if args[0] in COMMANDS or args[0].startswith("-"):
        return bridges.main(args)
    if len(args) < 2 or args[1].startswith("-"):
        print(f"convert {args[0]}: name the folder to write after the checkpoint", file=sys.stderr)
        return 2
    return bridges.main(["export", "--megatron", args[0], "--out", *args[1:]])


if __name__ == "__main__":
    sys.exit(main())
