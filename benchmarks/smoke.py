"""``--smoke``, which every benchmark takes: does it still run, in seconds and with sizes that measure nothing?"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def parse(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """Parse the command line. ``tiny``: what takes the place of defaults with ``--smoke``."""
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, which measure nothing: does it run?")
    if "--smoke" in sys.argv[1:]:
        parser.set_defaults(**tiny)
    return parser.parse_args()
