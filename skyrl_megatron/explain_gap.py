"""``python -m skyrl_megatron.explain_gap RUN --step N``: see :mod:`skyrl_megatron.entrypoints.gap.command`."""

import sys

from skyrl_megatron.entrypoints.gap.command import main

if __name__ == "__main__":
    sys.exit(main())
