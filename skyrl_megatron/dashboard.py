"""``python -m skyrl_megatron.dashboard RUN``: see :mod:`skyrl_megatron.entrypoints.dashboard`."""

import sys

from skyrl_megatron.entrypoints.dashboard import main

if __name__ == "__main__":
    sys.exit(main())
