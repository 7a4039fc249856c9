"""What workers answer: errors as values.

Where a method raises on several workers, vLLM's executor reads no answer after the first error, and takes those of the
other workers for answers to its next call (v1/executor/multiproc_executor.py, ``get_response``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AnswerExtension:
    """The method of a worker that calls its others; ``compat.WorkerExtension`` mixes it in."""

    def skyrl_answer(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Return (True, what a method returns) or (False, what went wrong)."""
        try:
            return True, getattr(self, method)(*arguments)
        except Exception as error:
            return False, str(error) or repr(error)


def answers_of(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what workers answered ``skyrl_answer`` with. Raises RuntimeError with the first that went wrong."""
    for worker, (done, answer) in enumerate(answers):
        if not done:
            raise RuntimeError(f"worker {worker}: {answer}")
    return [answer for _, answer in answers]
