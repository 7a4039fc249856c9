"""A run in an existing Ray cluster. An actor runs it, and this process prints the actor's output in order, without
delay.

Ray's own forwarding of output is not used, because it repeats, deduplicates and delays lines.
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
from skyrl_megatron.command import readable_warnings, redirect_stderr
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import DistributedError, SkyRLMegatronError
from skyrl_megatron.progress import heartbeat, note_output
from skyrl_megatron.trainer.console import ConsoleSink
from skyrl_megatron.trainer.stopping import StopRequested, StopSignal
from skyrl_megatron.workers.actor_group import ACTOR_LOST, lost_because, unpickled_line

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

WAIT_S = 0.5
"""Maximum wait for the next line in seconds. A Ctrl-C is forwarded after at most this time."""

type Printed = tuple[bool, str]
"""(whether the text is for stderr, text)."""


class _Printer(io.StringIO):
    """A stream that writes into a queue."""

    def __init__(self, printed: queue.Queue[Printed], *, error: bool) -> None:
        super().__init__()
        self._printed, self._error = printed, error

    def write(self, text: str) -> int:
        self._printed.put((self._error, text))
        return len(text)


class RunActor:
    """The actor that runs the experiment. :meth:`printed` and :meth:`stop` are called concurrently with
    :meth:`run`."""

    def __init__(self) -> None:
        self._printed: queue.Queue[Printed] = queue.Queue()
        self._experiment: Any = None
        self._ended = False

    def run(self, cfg: SkyRLTrainConfig, experiment: Any, started: str) -> bool:
        """Run the experiment. Returns whether it was stopped early. ``started``: start times of the command. Raises
        the errors of the run."""
        start_times.restore_marks(started)
        out, err = (_Printer(self._printed, error=error) for error in (False, True))
        try:
            with redirect_stdout(out), redirect_stderr(run_folder(cfg) / "console.log", err), readable_warnings():
                with heartbeat(ConsoleSink(run_folder(cfg) / "console.log").say):
                    self._experiment = experiment(cfg)
                    self._experiment.run()
        except StopRequested:
            return True
        finally:
            self._ended = True
        return False

    def printed(self) -> list[Printed] | None:
        """Return the output since the last call, after a wait of at most WAIT_S; None when the run has ended."""
        ended, found = self._ended, []
        try:
            found.append(self._printed.get(timeout=0 if ended else WAIT_S))
            while True:
                found.append(self._printed.get_nowait())
        except queue.Empty:
            return None if ended and not found else found

    def stop(self) -> None:
        """Request that the run ends after the current step. Waits until the trainer exists."""
        while not self._ended:
            trainer = getattr(self._experiment, "trainer", None)
            if trainer is not None:
                trainer.stop.request()
                return
            time.sleep(WAIT_S)


def run_in_cluster(cfg: SkyRLTrainConfig, experiment: Any) -> None:
    """Run ``experiment(cfg)`` in an actor of the cluster, and print its output.

    The first Ctrl-C ends the run after the current step and raises StopRequested; the second ends it at once. Raises
    the errors of the run, and DistributedError if its process dies.
    """
    actor: Any = ray.remote(RunActor)
    # on the node of this process: the loss of another node then costs only ranks, which the run can report
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    holder = actor.options(num_cpus=0, max_concurrency=3, scheduling_strategy=here).remote()
    ended = holder.run.remote(cfg, experiment, start_times.format_marks())
    stopping = False
    with StopSignal() as signals:
        try:
            while (printed := ray.get(holder.printed.remote(), timeout=cfg.trainer.phase_timeout_s)) is not None:
                note_output()  # the actor prints what takes long
                for error, text in printed:
                    stream = sys.stderr if error else sys.stdout
                    stream.write(text)
                    stream.flush()
                if signals.requested and not stopping:
                    stopping = True
                    holder.stop.remote()
            stopped = ray.get(ended)
        except ACTOR_LOST as error:
            raise DistributedError(
                f"the process of the run died ({_reason(error)}); the same command continues from the last checkpoint"
            ) from error
        except ray.exceptions.GetTimeoutError as error:
            raise DistributedError(
                f"the process of the run did not answer for {cfg.trainer.phase_timeout_s:g} s "
                "(trainer.phase_timeout_s); run ray status; the same command continues from the last checkpoint"
            ) from error
        except ray.exceptions.UnserializableException as error:
            raise DistributedError(f"the process of the run failed: {unpickled_line(error)}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SkyRLMegatronError):
                raise error.cause from error
            raise
    if stopped:
        raise signals.stopped()


def _reason(error: Exception) -> str:
    """Return why the process died, and the node that Ray's message names."""
    node = re.search(r"\bip(?: address)?: ([\d.]*\d)", str(error), re.IGNORECASE)
    why = lost_because(error) if isinstance(error, OutOfMemoryError) else str(error).strip().splitlines()[0]
    return why + (f" Node {node[1]}" if node else "")
