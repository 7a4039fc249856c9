"""Steps of an engine as no real request takes them: a logits processor that does what ``extra_args`` say, once the
request has so many tokens: ``[tokens, what, seconds]``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Steps(AdapterLogitsProcessor):
    """Which every engine of ``test_lost_engines.py`` has."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return what a request does in a step; None for one that does nothing unusual."""
        if not (asked := (params.extra_args or {}).get("step")):
            return None
        tokens, what, seconds = asked

        def apply(output_ids: list[int], logits: Any) -> Any:
            if len(output_ids) == tokens:
                DONE[what](seconds)
            return logits

        return apply


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


DONE = {
    "end": lambda seconds: os.kill(os.getpid(), signal.SIGKILL),
    "compute": spin,
    "sleep": time.sleep,
}
"""``sleep`` hangs as a process does that waits for a lock."""
