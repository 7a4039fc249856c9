"""Errors of this package. A message names the file, tensor or config key, and the fix."""

from __future__ import annotations


class BridgeError(Exception):
    """A folder, a tensor or an option that cannot be converted exactly. ``str(error)`` is the whole message."""

    exit_code = 2


class UnknownFamilyError(BridgeError):
    """No family supports the ``model_type``."""


class OutputError(BridgeError):
    """The output cannot be written: disk full, no permission."""

    exit_code = 3
