"""An event loop whose time passes at once: sleeping costs nothing, and things happen in the order of their times."""

import asyncio
import selectors


class _Selector(selectors.SelectSelector):
    """Instead of waiting, it puts the clock forward."""

    loop = None

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will happen"
            self.loop.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """A loop at simulated time ``now``, in seconds."""

    def __init__(self):
        self.now = 0.0
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self

    def time(self):
        return self.now


def simulate(work):
    """What a coroutine returns in simulated time, and how long it took."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work), runner.get_loop().time()
