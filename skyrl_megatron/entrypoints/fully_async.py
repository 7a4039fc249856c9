"""Train with fully asynchronous rollouts: ``skyrl-megatron train-async [key=value …]``

The command of :mod:`.main_base` with ``trainer.fully_async.enabled=true``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_megatron.config.resolve import FULLY_ASYNC
from skyrl_megatron.entrypoints import main_base


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    return main_base.main([*(sys.argv[1:] if argv is None else argv), f"{FULLY_ASYNC}.enabled=true"])


if __name__ == "__main__":
    sys.exit(main())
