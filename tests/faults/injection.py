"""Faults inside a run, at a phase of a step. Imported by the run's own script, so that a fault comes from its driver.

The script of ``tests/job/runs.py`` is given ``from tests.faults import injection; injection.arm(...)``: when the
driver enters the phase for the first time at or after the step, a thread of it makes the fault.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV, "SIGTERM": signal.SIGTERM}
SLOW_SHARE, SLICE_S = 0.9, 0.1
"""A process that is slow ×10 stands still for nine tenths of each slice."""
ROOM = 100_000
"""Bytes that a file may have for one whose disk is full."""
PETABYTE = 1 << 50
EXITED = 3
UNEXPECTED = "an exception that nobody expects"
OWN = {"exit": 1, "exception": 2, "out of memory": 3}
"""Comes from a process's own code → which real-time signal lets it come from an engine's (``LISTENS``)."""
LISTENS = f"""\
import os
import signal


def fail(number, frame):
    if number == signal.SIGRTMIN + {OWN["exit"]}:
        os._exit({EXITED})
    if number == signal.SIGRTMIN + {OWN["out of memory"]}:
        bytearray({PETABYTE})
    raise RuntimeError("{UNEXPECTED}")


for number in {sorted(OWN.values())}:
    signal.signal(signal.SIGRTMIN + number, fail)
"""
"""``sitecustomize.py`` of a run: each of its Python processes fails in its main thread on command."""
JUMPS_AFTER_S = 0.02
FOUND_S = 300.0
"""Time in which a process that is being started has to appear."""


def arm(who: str, what: str, when: str, step: int = 0, *, delay_s: float = 0.05, lasts_s: float = 60.0) -> None:
    """Let ``what`` happen to ``who`` once, ``delay_s`` after the driver came into the phase ``when`` of a step that
    follows ``step`` whole ones; 0: before the phase begins. ``lasts_s``: how long one that becomes slow stays so, or a
    driver that is stopped.

    ``build_models``, ``heal``: as soon as the process is there. ``between updates``: after a step's first optimizer
    step. ``finish``: when all is done. May be called several times.

    In a rank ``exit``, ``exception`` and ``out of memory`` (of a petabyte, which its allocator refuses) come with its
    next call, as that is where its own code runs; in an engine wherever its main thread is."""
    from skyrl_megatron.trainer.console import Phases
    from skyrl_megatron.trainer.ppo import RayPPOTrainer
    from skyrl_megatron.workers.worker_group import WorkerGroup

    trainers, enter, made, done = [], Phases.__call__, RayPPOTrainer.__init__, threading.Event()
    update, finish = WorkerGroup.train_mini_batch, RayPPOTrainer.finish

    def remember(self, *args, **kwargs):
        made(self, *args, **kwargs)
        trainers.append(self)

    def entered(self, name):
        due = name == when and trainers and trainers[-1].phases is self and trainers[-1].global_step >= step
        if due and not done.is_set():
            done.set()
            trainer = trainers[-1]
            _note(trainer, f"{who} · {what} · {when} at step {trainer.global_step}")
            if who == "driver" and what in OWN:
                _in_own_code(what)
            if who == "environment":
                _in_environment(what)
            elif who == "registry":
                asks = threading.Thread(target=_in_registry, args=(trainer, what), daemon=True)
                asks.start()
                if when == "finish":
                    asks.join()
            elif who in ("disk", "network link", "object store", "clock"):
                _around(trainer, who, what, lasts_s)
            elif what in OWN and not who.startswith("engine"):
                if when == "build_models":
                    threading.Thread(target=_in_rank, args=(trainer, who, what), daemon=True).start()
                else:
                    _in_rank(trainer, who, what)
            else:
                starts = when in ("build_models", "heal")
                victims = [] if starts else _there(trainer, who)
                arguments = (trainer, who, victims, what, delay_s, lasts_s)
                maker = threading.Thread(target=_happen, args=arguments, daemon=True)
                maker.start()
                if not delay_s:
                    maker.join()
        return enter(self, name)

    def updated(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        if when == "between updates" and kwargs["more_follow"]:
            entered(trainers[-1].phases, when)
        return result

    def finished(self):
        entered(self.phases, "finish")
        finish(self)

    RayPPOTrainer.__init__, Phases.__call__, WorkerGroup.train_mini_batch = remember, entered, updated
    RayPPOTrainer.finish = finished


def find(trainer, who: str) -> list[psutil.Process]:
    """Return the processes of ``who`` in a run: ``driver``, ``policy 1`` (a role and a rank), ``engine core``,
    ``engine worker``, ``engine actor``, ``gcs_server`` or ``raylet``."""
    from skyrl_megatron.config.resolve import run_folder
    from skyrl_megatron_observe.hang import processes

    own = psutil.Process()
    if who == "driver":
        return [own]
    if who in ("gcs_server", "raylet"):
        found = [each for each in own.children(recursive=True) if each.name() == who]
    elif who.startswith("engine"):
        slot = trainer.inference_engine_client.pool.slots[0]
        pids = trainer.loop.run(slot.engine.process_ids())
        found = [psutil.Process(pids[{"engine actor": 0, "engine core": 1, "engine worker": -1}[who]])]
    else:
        role, rank = who.split()
        logs = processes(run_folder(trainer.cfg).resolve())
        pids = {pid for pid, log in logs.items() if log is not None and log.stem == f"{role}_rank{rank}"}
        found = [each for each in map(psutil.Process, pids) if each.ppid() not in pids]
    assert found, f"nobody here is {who}"
    return found


def _starting(trainer, who: str) -> list[psutil.Process]:
    """Return the processes of one that is being started, once they are there."""
    if who not in ("engine core", "engine worker"):
        return _there(trainer, who)
    end = time.monotonic() + FOUND_S
    while time.monotonic() < end:
        for process in psutil.Process().children(recursive=True):
            found = _forked_for(process)  # the core, then its workers
            if found := found[:1] if who == "engine core" else found[1:]:
                return found[-1:]
        time.sleep(0.05)
    raise AssertionError(f"nobody here is {who}")


def _forked_for(process: psutil.Process) -> list[psutil.Process]:
    """List what the fork server of an engine's actor has forked, in order: processes with the server's command line,
    which those that anybody starts for a moment have not; nothing for other processes, and for one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        servers = process.children() if process.name().startswith("ray::EngineActor") else []
        return [each for server in servers for each in server.children() if each.cmdline() == server.cmdline()]
    return []


def _there(trainer, who: str) -> list[psutil.Process]:
    """Return the processes of one as soon as it is there: what was lost before may still be starting."""
    end = time.monotonic() + FOUND_S
    while True:
        try:
            return find(trainer, who)
        except Exception:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def _in_own_code(what: str) -> None:
    """What happens in the driver's own thread."""
    if what == "exit":
        os._exit(EXITED)
    if what == "out of memory":
        bytearray(PETABYTE)
    raise RuntimeError(UNEXPECTED)


def _in_environment(what: str) -> None:
    """Let the next step of an environment raise, or take ten times what others take."""
    from digits import Digits

    step, left = Digits.step, [True]

    def strange(self, action):
        if left:
            left.clear()
            if what == "exception":
                raise RuntimeError("an exception of the environment")
            time.sleep(1.0)
        return step(self, action)

    Digits.step = strange


def _registry_of(client):
    return client.services["enable_registry"]


def _in_registry(trainer, what: str) -> None:
    """Ask the registry of a run for its engines, of which it fails to tell, or tells late; the status of its answer
    is a line of ``registry.txt``."""
    import httpx

    from skyrl_megatron.config.resolve import run_folder

    end = time.monotonic() + FOUND_S
    while not (client := getattr(trainer, "inference_engine_client", None)) or not _registry_of(client).url:
        assert time.monotonic() < end, "the run has no registry"
        time.sleep(0.05)
    registry = _registry_of(client)
    fleet = registry.fleet
    describe = fleet.describe

    def strange():
        fleet.describe = describe
        if what == "exception":
            raise RuntimeError(UNEXPECTED)
        time.sleep(1.0)
        return describe()

    fleet.describe = strange
    token = (run_folder(trainer.cfg) / "registry_token").read_text().strip()
    answer = httpx.get(f"{registry.url}/engines", headers={"Authorization": f"Bearer {token}"}, timeout=FOUND_S)
    with (_place(trainer) / "registry.txt").open("a") as file:
        file.write(f"{answer.status_code}\n")


def _around(trainer, who: str, what: str, lasts_s: float) -> None:
    """What happens to a run that has a disk, a network, a store or a time of day of its own (``places.py``)."""
    from tests.faults import object_store, places

    folder = _place(trainer)
    if who == "object store":
        object_store.spoil(what, lasts_s)
    elif who == "clock":
        threading.Timer(JUMPS_AFTER_S, places.jump, [folder]).start()  # whoever waits has begun to
    elif who == "disk":
        places.break_disk(folder, what)
        if what == "slow ×10":
            threading.Timer(lasts_s, places.mend_disk, [folder]).start()
    else:
        places.break_link(what)
        if what != "cut link":
            threading.Timer(lasts_s, places.mend_link).start()


def _in_rank(trainer, who: str, what: str) -> None:
    """Let the next call of a rank end its process, or raise, as soon as it asks for the rank's model."""
    role, rank = who.split()
    end = time.monotonic() + FOUND_S
    while role not in trainer.roles and time.monotonic() < end:
        time.sleep(0.05)
    actor = trainer.roles[role].group.actors[int(rank)]
    if what == "exit":
        actor.__ray_call__.remote(lambda self: os._exit(3))
        return

    def prepare(self):
        kind = type(self)

        def raises(self):
            del kind.engine
            if what == "out of memory":
                import torch

                torch.empty(PETABYTE, dtype=torch.uint8)
            raise RuntimeError(UNEXPECTED)

        kind.engine = property(raises, lambda self, value: self.__dict__.update(engine=value))

    import ray

    ray.get(actor.__ray_call__.remote(prepare), timeout=FOUND_S)


def _happen(trainer, who: str, victims: list[psutil.Process], what: str, delay_s: float, lasts_s: float) -> None:
    victims = victims or _starting(trainer, who)
    time.sleep(delay_s)
    if what == "slow" and victims == [psutil.Process()]:  # which could not wake itself
        still, runs = SLICE_S * SLOW_SHARE, SLICE_S * (1 - SLOW_SHARE)
        slice_ = f"kill -STOP {os.getpid()}; sleep {still}; kill -CONT {os.getpid()}; sleep {runs}"
        loop = f"for i in $(seq {round(lasts_s / SLICE_S)}); do {slice_}; done"
        subprocess.Popen(["sh", "-c", loop], start_new_session=True)
    elif what == "slow":
        end = time.monotonic() + lasts_s
        while time.monotonic() < end:
            for victim in victims:
                victim.suspend()
            time.sleep(SLICE_S * SLOW_SHARE)
            for victim in victims:
                victim.resume()
            time.sleep(SLICE_S * (1 - SLOW_SHARE))
    for victim in victims:
        if what == "SIGSTOP" and victim.pid == os.getpid():
            subprocess.Popen(["sh", "-c", f"sleep {lasts_s}; kill -CONT {victim.pid}"], start_new_session=True)
        if what in SIGNALS:
            victim.send_signal(SIGNALS[what])
        elif what in OWN:
            victim.send_signal(signal.SIGRTMIN + OWN[what])
        elif what == "full disk":
            victim.rlimit(psutil.RLIMIT_FSIZE, (ROOM, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _note(trainer, text: str) -> None:
    """Leave a line in ``faults.txt`` of the folder that the run was started in, before anything happens."""
    with (_place(trainer) / "faults.txt").open("a") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _place(trainer) -> Path:
    """Return the folder that the run was started in."""
    return Path(trainer.cfg.trainer.log_path).parent
