"""Environments of other packages, by ``PACKAGE:NAME``. A package is imported when a row names one of its environments,
and is installed by the extra of the same name."""

from __future__ import annotations

import importlib
from typing import Any

from skyrl_megatron.errors import DataError, install_command

MOST_BYTES = 1 << 24
"""Size of an answer of another server, above which it is not read."""


def import_package(module: str, package: str) -> Any:
    """Import a module of a package. Raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise DataError(f"environments of {package} need the package: {install_command(package)}") from error
