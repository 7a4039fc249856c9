"""``python -m skyrl_megatron.diagnose RUN``: see :mod:`skyrl_megatron.entrypoints.diagnose`."""

import sys

from skyrl_megatron.entrypoints.diagnose import main

if __name__ == "__main__":
    sys.exit(main())
