"""Ray actors and what they stand on.

Ray reads its authentication mode, and whether it may listen on loopback alone, when it is first imported, so both are
chosen here, before any module of this package imports it: a token that only this process and its children know, and
loopback. Where Ray was imported before, or a cluster is to be joined, or the user chose otherwise, nothing is set: Ray
then starts with its own token, or takes the cluster's.
"""

import os as _os
import secrets as _secrets
import sys as _sys

if not {"RAY_AUTH_MODE", "RAY_ADDRESS"} & set(_os.environ) and "ray" not in _sys.modules:
    _os.environ["RAY_AUTH_MODE"] = "token"
if _os.environ.get("RAY_AUTH_MODE") == "token" and not {"RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"} & set(_os.environ):
    _os.environ.setdefault("RAY_AUTH_TOKEN", _secrets.token_hex(32))
if "RAY_ADDRESS" not in _os.environ and "ray" not in _sys.modules:
    _os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the name says less than it does
