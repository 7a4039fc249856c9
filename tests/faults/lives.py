"""Lives of one small run: each continues where the one before ended, and meets a fault. What is left after each is
checked by :meth:`Lives.live` and by the next life, which has to continue from there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults import object_store
from tests.faults.injection import LISTENS
from tests.faults.places import place
from tests.job import runs

GONE_S = 90
STEPS = 60
"""Steps of the whole run, which no life comes to the end of."""
KEYS = {
    "trainer__ckpt_interval": 1,
    "trainer__max_ckpts_to_keep": 3,
    "trainer__phase_timeout_s": 240,
    "trainer__max_training_steps": STEPS,
    "trainer__epochs": 1000,  # never what ends a run
}
NO_FAULT = ""


@dataclass(frozen=True)
class Life:
    """What a life left."""

    run: runs.Run
    began: int
    """The step that it continued from."""
    saved: int
    """The step of the newest checkpoint after it."""
    log: str
    """What it added to ``console.log``."""

    @property
    def waited(self) -> list[str]:
        """Lines that tell of a wait that only its deadline ended."""
        return [line for line in (self.log + self.message).splitlines() if "no answer within" in line]

    @property
    def message(self) -> str:
        """Its stderr without warnings, and without the lines about waits, which a busy machine causes."""
        lines = self.run.err.splitlines()
        return "\n".join(line for line in lines if not line.startswith(("warning: ", "… ")))


class Lives:
    """The run in ``folder``. ``kind``: what it has for itself of what others share (``places.py``)."""

    def __init__(self, folder: Path, kind: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.place = place(kind, folder)
        self.folder = runs.prepare(folder)
        (folder / "sitecustomize.py").write_text(LISTENS)
        self.saved = 0
        self.checkpoints = f"{object_store.BUCKET}{folder}" if kind == "object store" else str(folder / "ckpts")

    def live(self, fault: str, *, planted: str = "", timeout_s: float = runs.TIMEOUT_S, **overrides: object) -> Life:
        """Continue, with the arguments of ``injection.arm`` in ``fault``, until the fault ends the run or it ends by
        itself. Whatever happened: no process is left, and the newest checkpoint is whole. ``planted``: code that takes
        a guard away first."""
        began, logged = self.saved, self._logged()
        body = planted + (f"\nfrom tests.faults import injection\ninjection.arm({fault})\n" if fault else "\n")
        keys = KEYS | {"trainer__ckpt_path": self.checkpoints}
        process = runs.start(self.folder, body, prefix=self.place.prefix, **keys | overrides)
        children: dict[int, psutil.Process] = {}
        try:
            out, err = self._watched(process, children, timeout_s)
        finally:
            process.kill()
        _, alive = psutil.wait_procs(list(children.values()), timeout=GONE_S)
        for each in alive:
            each.kill()
        self.place.repair()
        assert not alive, f"left over: {alive}"
        self.saved = self.newest()
        ended = runs.Run(process.returncode, out, err, self.folder)
        if began and "\nweights: version" in out:  # it came to where it continues
            assert f"(step {began} of" in out, f"it did not continue from step {began}: {out[-2000:]}{err[-4000:]}"
        return Life(ended, began, self.saved, self._logged().removeprefix(logged))

    def _logged(self) -> str:
        path = self.folder / "logs/skyrl/run/console.log"
        return path.read_text() if path.is_file() else ""

    def newest(self) -> int:
        """Return the step of the newest checkpoint, all of whose files are as they were written; 0: there is none."""
        from skyrl_megatron.runtime.checkpoint.store import CheckpointStore

        store = CheckpointStore(self.checkpoints)
        step = store.pointer()
        if step is None:
            return 0
        store.verify(store.folder(step))
        return step

    def _watched(self, process, children: dict[int, psutil.Process], timeout_s: float) -> tuple[str, str]:
        """Read what it says to its end, and note its processes meanwhile."""
        import subprocess
        import time

        end = time.monotonic() + timeout_s
        while True:
            try:
                for each in psutil.Process(process.pid).children(recursive=True):
                    children.setdefault(each.pid, each)
            except psutil.NoSuchProcess:
                pass
            try:
                return process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < end, f"the run did not end: {self._logged()[-4000:]}"

    @property
    def stacks(self) -> str:
        """What a run that hung noted of its processes; "" when none did."""
        path = self.folder / "logs/skyrl/run/stacks.txt"
        return path.read_text() if path.is_file() else ""

    @property
    def faults(self) -> list[str]:
        """Every fault that happened so far, as ``injection`` noted it."""
        path = self.folder / "faults.txt"
        return path.read_text().splitlines() if path.is_file() else []

    @property
    def lines(self) -> list[dict[str, float]]:
        """The lines of ``metrics.jsonl``."""
        text = (self.folder / "logs/skyrl/run/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]
