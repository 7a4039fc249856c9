"""A run in a cluster that was joined: an actor holds it, and what it prints is shown here, once, in order and at once.

Ray's own forwarding of output repeats lines, folds those that look alike, and delays all of them: it is not used.
"""

from __future__ import annotations

import io
import queue
import re
import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_megatron import progress as start_times
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.entrypoints.command import noise_into, readable_warnings
from skyrl_megatron.errors import DistributedError, SkyRLMegatronError
from skyrl_megatron.progress import heartbeat, spoke
from skyrl_megatron.trainer.console import ConsoleSink
from skyrl_megatron.trainer.stopping import StopRequested, StopSignal
from skyrl_megatron.workers.actor_group import ACTOR_LOST, lost_because

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

WAIT_S = 0.5
"""Longest wait for the next line, and so for a Ctrl-C to be passed on."""

type Printed = tuple[bool, str]
"""(whether it is for stderr, text)."""


class _Printer(io.StringIO):
    """A stream that puts what is written into a queue."""

    def __init__(self, printed: queue.Queue[Printed], *, error: bool) -> None:
        super().__init__()
        self._printed, self._error = printed, error

    def write(self, text: str) -> int:
        self._printed.put((self._error, text))
        return len(text)


class RunHolder:
    """The actor. Its methods are called side by side: :meth:`printed` and :meth:`stop` while :meth:`run` goes on."""

    def __init__(self) -> None:
        self._printed: queue.Queue[Printed] = queue.Queue()
        self._experiment: Any = None
        self._ended = False

    def run(self, cfg: SkyRLTrainConfig, experiment: Any, started: str) -> bool:
        """Run it from start to end; returns whether it was stopped before. ``started``: marks of the command. Raises
        what the run raises."""
        start_times.take_over(started)
        out, err = (_Printer(self._printed, error=error) for error in (False, True))
        try:
            with redirect_stdout(out), noise_into(run_folder(cfg) / "console.log", err), readable_warnings():
                with heartbeat(ConsoleSink(run_folder(cfg) / "console.log").say):
                    self._experiment = experiment(cfg)
                    self._experiment.run()
        except StopRequested:
            return True
        finally:
            self._ended = True
        return False

    def printed(self) -> list[Printed] | None:
        """Return what was printed since the last call, after a short wait for it; None once the run has ended."""
        ended, found = self._ended, []
        try:
            found.append(self._printed.get(timeout=0 if ended else WAIT_S))
            while True:
                found.append(self._printed.get_nowait())
        except queue.Empty:
            return None if ended and not found else found

    def stop(self) -> None:
        """Ask the run to end after the step in work, as soon as there is a trainer that can be asked."""
        while not self._ended:
            trainer = getattr(self._experiment, "trainer", None)
            if trainer is not None:
                trainer.stop.request()
                return
            time.sleep(WAIT_S)


def run_in_cluster(cfg: SkyRLTrainConfig, experiment: Any) -> None:
    """Run ``experiment(cfg)`` in an actor of the joined cluster and show what it prints.

    The first Ctrl-C ends it after the step in work and raises StopRequested, the second one at once. Raises what the
    run raises; DistributedError when its process dies.
    """
    actor: Any = ray.remote(RunHolder)
    # beside this process: a node that is lost elsewhere costs ranks, which the run can name, and not the run itself
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    holder = actor.options(num_cpus=0, max_concurrency=3, scheduling_strategy=here).remote()
    ended = holder.run.remote(cfg, experiment, start_times.handed_on())
    told = False
    with StopSignal() as signals:
        try:
            while (printed := ray.get(holder.printed.remote(), timeout=cfg.trainer.phase_timeout_s)) is not None:
                spoke()  # the actor prints what takes long
                for error, text in printed:
                    stream = sys.stderr if error else sys.stdout
                    stream.write(text)
                    stream.flush()
                if signals.requested and not told:
                    told = True
                    holder.stop.remote()
            stopped = ray.get(ended)
        except ACTOR_LOST as error:
            raise DistributedError(
                f"the process of the run died ({_told(error)}); the same command continues from the last checkpoint"
            ) from error
        except ray.exceptions.GetTimeoutError as error:
            raise DistributedError(
                f"the process of the run did not answer for {cfg.trainer.phase_timeout_s:g} s "
                "(trainer.phase_timeout_s); see ray status; the same command continues from the last checkpoint"
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SkyRLMegatronError):
                raise error.cause from error
            raise
    if stopped:
        raise signals.stopped()


def _told(error: Exception) -> str:
    """Return why the process is gone, and the node that Ray names further down."""
    node = re.search(r"\bip(?: address)?: ([\d.]*\d)", str(error), re.IGNORECASE)
    why = lost_because(error) if isinstance(error, OutOfMemoryError) else str(error).strip().splitlines()[0]
    return why + (f" Node {node[1]}" if node else "")
