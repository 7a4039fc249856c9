"""End tags of what a policy writes, such as ``</search>``: they are stop strings, so a turn ends with its first."""

from __future__ import annotations


def check_end_tags(action: str, tags: tuple[str, ...]) -> None:
    """Raise ValueError when anything follows the first of ``tags`` in the turn: they are not set as stop strings."""
    for tag in tags:
        before, found, after = action.partition(tag)
        if found and after:
            raise ValueError(
                f"the turn goes on after {tag}: list {' and '.join(tags)} in generator.sampling_params.stop"
            )
        if found:
            return
