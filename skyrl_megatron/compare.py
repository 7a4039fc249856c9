"""``python -m skyrl_megatron.compare RUN BASELINE``: see :mod:`skyrl_megatron.entrypoints.compare`."""

import sys

from skyrl_megatron.entrypoints.compare import main

if __name__ == "__main__":
    sys.exit(main())
