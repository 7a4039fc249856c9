"""``python -m skyrl_megatron VERB [ARGUMENTS]``: the command ``skyrl-megatron``."""

import sys

from skyrl_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
