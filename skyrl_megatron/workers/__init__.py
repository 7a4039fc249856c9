"""Ray actors and what they stand on.

Ray reads its authentication mode when it is first imported, so it is chosen here, before any module of this package
imports it: a token that only this process and its children know, unless the user set a mode or token of their own.
"""

import os as _os
import secrets as _secrets

_os.environ.setdefault("RAY_AUTH_MODE", "token")
if _os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in _os.environ:
    _os.environ.setdefault("RAY_AUTH_TOKEN", _secrets.token_hex(32))
