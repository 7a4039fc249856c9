"""How far sampling may run ahead, and which groups a step must take so that none is ever trained too late.

A group whose oldest token is of version v may be trained at version v + bound, its deadline, and not later. A step at
version j takes ``batch`` groups, the oldest first. At any time there are at most ``batch · (bound + 1)`` untrained
groups (:func:`room`); yet several slow ones may come to have the same deadline, while younger ones are trained in
their place. All deadlines can be met as long as, after the step at j and for every k, at most ``batch · k`` groups are
left that are due by j + k: a step that would leave more waits for them (:func:`may_step`).
"""

from __future__ import annotations

from collections.abc import Mapping


def room(*, batch: int, bound: int, version: int, steps: int, accepted: int, running: int) -> int:
    """Count the groups that may be started at ``version``.

    ``accepted``: groups that were trained, are trained now or wait for it, since version 0; ``running``: groups that
    are sampled; ``steps``: of the whole run.
    """
    return min(bound + version + 1, steps) * batch - (accepted + running)


def may_step(*, batch: int, bound: int, version: int, running: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Return whether the oldest ``batch`` of the finished groups leave no deadline that cannot be met.

    ``running``, ``finished``: how many groups there are by the version of their oldest token.
    """
    waiting, done = 0, 0
    for left, oldest in enumerate(range(version - bound, version)):
        if left == 0:
            waiting = sum(count for each, count in running.items() if each <= oldest)
            done = sum(count for each, count in finished.items() if each <= oldest)
        else:
            waiting += running.get(oldest, 0)
            done += finished.get(oldest, 0)
        if waiting + max(done - batch, 0) > batch * left:
            return False
    return True
