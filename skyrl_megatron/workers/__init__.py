"""Ray actors of a run.

Ray reads its authentication mode, and whether it may listen only on loopback, when it is first imported. So both are
set here, before any module of this package imports Ray: a token that only this process and its children know, and
loopback. Nothing is set if Ray is already imported, if the run joins a cluster, or if the user has set the mode.
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
