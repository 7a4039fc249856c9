"""Faults inside a run, at a phase of a step. Imported by the run's own script, so that a fault comes from its driver.

The script of ``tests/job/runs.py`` is given ``from tests.faults import injection; injection.arm(...)``: when the
driver enters the phase for the first time at or behind the step, a thread of it makes the fault.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import psutil

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}
SLOW_SHARE, SLICE_S = 0.9, 0.1
"""A process that is slow ×10 stands still for nine tenths of each slice."""
ROOM = 100_000
"""Bytes that a file may have for one whose disk is full."""


def arm(who: str, what: str, when: str, step: int = 0, *, delay_s: float = 0.05, lasts_s: float = 60.0) -> None:
    """Let ``what`` happen to ``who`` once, ``delay_s`` after the driver came into the phase ``when`` of a step that
    follows ``step`` whole ones; 0: before the phase begins. ``lasts_s``: how long one that becomes slow stays so.

    The phase ``between updates`` is behind a step's first optimizer step. May be called several times."""
    from skyrl_megatron.trainer.phases import Phases
    from skyrl_megatron.trainer.ppo import RayPPOTrainer
    from skyrl_megatron.workers.worker_group import WorkerGroup

    trainers, enter, made, done = [], Phases.__call__, RayPPOTrainer.__init__, threading.Event()
    update = WorkerGroup.train_mini_batch

    def remember(self, *args, **kwargs):
        made(self, *args, **kwargs)
        trainers.append(self)

    def entered(self, name):
        due = name == when and trainers and trainers[-1].phases is self and trainers[-1].global_step >= step
        if due and not done.is_set():
            done.set()
            _note(trainers[-1], f"{who} · {what} · {when} at step {trainers[-1].global_step}")
            if what == "exception":
                raise RuntimeError(f"an exception in {when}")
            victims = find(trainers[-1], who)
            maker = threading.Thread(target=_happen, args=(victims, what, delay_s, lasts_s), daemon=True)
            maker.start()
            if not delay_s:
                maker.join()
        return enter(self, name)

    def updated(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        if when == "between updates" and kwargs["more_follow"]:
            entered(trainers[-1].phases, when)
        return result

    RayPPOTrainer.__init__, Phases.__call__, WorkerGroup.train_mini_batch = remember, entered, updated


def find(trainer, who: str) -> list[psutil.Process]:
    """Return the processes of ``who`` in a run: ``driver``, ``policy 1`` (a role and a rank), ``engine core``,
    ``engine worker``, ``engine actor``, ``gcs_server`` or ``raylet``."""
    from skyrl_megatron.config.run_folder import run_folder
    from skyrl_megatron.trainer.diagnosis import processes

    own = psutil.Process()
    if who == "driver":
        return [own]
    if who in ("gcs_server", "raylet"):
        found = [each for each in own.children(recursive=True) if each.name() == who]
    elif who.startswith("engine"):
        place = {"engine actor": 0, "engine core": 1, "engine worker": -1}[who]
        slot = trainer.inference_engine_client.pool.slots[0]
        found = [psutil.Process(trainer.loop.run(slot.engine.process_ids())[place])]
    else:
        role, rank = who.split()
        logs = processes(run_folder(trainer.cfg).resolve())
        pids = {pid for pid, log in logs.items() if log is not None and log.stem == f"{role}_rank{rank}"}
        found = [each for each in map(psutil.Process, pids) if each.ppid() not in pids]
    assert found, f"nobody here is {who}"
    return found


def _happen(victims: list[psutil.Process], what: str, delay_s: float, lasts_s: float) -> None:
    time.sleep(delay_s)
    if what == "slow":
        end = time.monotonic() + lasts_s
        while time.monotonic() < end:
            for victim in victims:
                victim.suspend()
            time.sleep(SLICE_S * SLOW_SHARE)
            for victim in victims:
                victim.resume()
            time.sleep(SLICE_S * (1 - SLOW_SHARE))
    for victim in victims:
        if what in SIGNALS:
            victim.send_signal(SIGNALS[what])
        elif what == "full disk":
            victim.rlimit(psutil.RLIMIT_FSIZE, (ROOM, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _note(trainer, text: str) -> None:
    """Leave a line in ``faults.txt`` of the folder that the run was started in, before anything happens."""
    from pathlib import Path

    with (Path(trainer.cfg.trainer.ckpt_path).parent / "faults.txt").open("a") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
