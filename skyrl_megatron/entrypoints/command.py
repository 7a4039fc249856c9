"""What every command does around its work: readable warnings, one message for a user's mistake, exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from skyrl_megatron.errors import SkyRLMegatronError, SkyRLMegatronWarning

INTERRUPTED = 130


def run_command(work: Callable[[], int]) -> int:
    """Exit code of ``work``. An error that a user can act on is printed without a traceback."""
    with readable_warnings():
        try:
            return work()
        except SkyRLMegatronError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print our warnings, deprecations included, as one line each on stderr instead of with file and source line."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, SkyRLMegatronWarning | DeprecationWarning):
            print(f"warning: {message}", file=file or sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=SkyRLMegatronWarning)
        warnings.filterwarnings("default", category=DeprecationWarning, module=r"skyrl_megatron\.")
        warnings.filterwarnings("ignore", module=r"megatron\.")  # what Megatron would run faster with
        warnings.showwarning = show
        yield
