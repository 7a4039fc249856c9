"""A time limit for code of a reward that runs in a thread, where ``signal.alarm`` cannot be used."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any


class _Expired(BaseException):
    """Ends a function whose time is over; ``except Exception`` inside it does not catch it."""


def within[**P, T](seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args, **kwargs)``. Raises what it raises, and TimeoutError after ``seconds``.

    May be called from any thread. The function runs in a thread of its own, and Python code in it ends soon after the
    limit. A call into C that does not return (a regular expression, a solver) cannot be ended: its thread stays until
    it returns, and where it holds the interpreter's lock nothing else runs meanwhile. Run such code in a process:
    ``subprocess.run(…, timeout=seconds)``.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function(*args, **kwargs)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Expired))
        raise TimeoutError(f"{getattr(function, '__name__', function)} took longer than {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    result: T = outcome["result"]
    return result
