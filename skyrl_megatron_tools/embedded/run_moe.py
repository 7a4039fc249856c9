"""The program of ``launch/run_moe.sh``: ``skyrl-megatron VERB``, where the recipe says which verb.

A recipe of supervised training or preferences is a run of its verb; everything else is ``skyrl-megatron train``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_megatron import cli
from skyrl_megatron.config.parse import TRAIN, split_recipe, verb_of_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    args = list(sys.argv[1:] if argv is None else argv)
    names, _ = split_recipe(args)
    return cli.main([(verb_of_recipe(names[0]) if names else None) or TRAIN, *args])


if __name__ == "__main__":
    sys.exit(main())
