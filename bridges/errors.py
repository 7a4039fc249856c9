"""The one error of this package. It names the file, the tensor or the config key, and what to do about it."""

from __future__ import annotations


class BridgeError(Exception):
    """A folder, a tensor or an option that cannot be converted exactly. ``str(error)`` is the whole message."""

    exit_code = 2


class UnknownFamilyError(BridgeError):
    """No table is known for a ``model_type``."""


class OutputError(BridgeError):
    """The output cannot be written: disk full, no permission."""

    exit_code = 3
