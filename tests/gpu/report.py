"""The folder that a climb leaves: six files, complete at every moment, also when the ladder is killed.

``summary.md`` has the outcome of every rung, the figures and the next thing to do, ``results.json`` the figures as
they were printed, ``environment.txt`` the machine, ``logs.txt`` the end of every rung's output, ``running.log`` the
output of the rung that runs, ``records.zip`` profiles, memory snapshots, and what failed runs have logged. Each file
is replaced as a whole. Together they stay below 64 MB.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.gpu.ladder import Rung

LOG_BYTES = 200_000
"""The end of a rung's output that is kept."""
RUNNING_BYTES = 4 << 20
"""``running.log`` is cut to its end when it is longer."""
RECORD_BYTES, RECORDS_BYTES = 24 << 20, 48 << 20
"""Limits of one file of ``records.zip``, compressed, and of the archive."""
NEW = ".new."
"""Starts the name of a file that is not complete."""
RECORDED = ("forward_backward*.json.gz", "optim_step*.json.gz", "*.pickle")
LOGGED = ("*.log", "metrics.jsonl")
"""Patterns of what is recorded of every rung, the last file of each, and of one that did not pass, all files."""
PASSED = re.compile(r"^(\S+\.py::.+?) PASSED", re.MULTILINE)
"""A test that has passed, in pytest's output."""
FIGURES = 12
"""Of a rung in ``summary.md``; ``results.json`` has all."""
FAILED = ("failed", "too slow", "interrupted")
OUT_OF_TIME = "out of time"
"""The climb ended before the rung: it says nothing of the rung, which the next call resumes."""
NOT_RUNNABLE = "not runnable"
"""Starts the outcome of a rung for which this machine lacks something; what it lacks follows."""


class Report:
    """Outcomes by rung, read from the folder if it has some."""

    def __init__(self, folder: Path, rungs: Sequence[Rung]) -> None:
        self.folder, self._all = folder, rungs
        if not folder.exists() and not folder.name.startswith(NEW):  # it appears as a whole
            shutil.rmtree(self._new(folder), ignore_errors=True)
            Report(self._new(folder), rungs).folder.rename(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{NEW}*"):
            unfinished.unlink()
        self.running, self._records = folder / "running.log", folder / "records.zip"
        results = folder / "results.json"
        self.rungs: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}
        if not self._records.exists():
            with zipfile.ZipFile(self._new(self._records), "w"):
                pass
            self._new(self._records).rename(self._records)
        for name in ("logs.txt", "environment.txt"):
            if not (folder / name).exists():
                self.write_text(name, "")
        if self.running.exists() and (text := self.running.read_text(errors="replace")):  # of a climb that was killed
            name = text.partition("\n")[0]
            if name in self.rungs:
                self.rungs[name]["tests"] = [*self.rungs[name].get("tests", []), *PASSED.findall(text)]
                self._log(f"{name}: interrupted", text)
        self.running.write_bytes(b"")
        self.write()

    def outcome(self, name: str) -> str:
        """Return the outcome of a rung; "" if it has not been started."""
        return str(self.rungs.get(name, {}).get("outcome", ""))

    def begin(self, name: str, tests: Sequence[str]) -> None:
        """Record what is true of a rung if the ladder ends now. ``tests``: those that have passed."""
        self.set(name, "interrupted", tests=list(tests))
        self.running.write_text(f"{name}\n")

    def set(self, name: str, outcome: str, seconds: float = 0.0, **more: Any) -> None:
        """Record an outcome."""
        kept = {key: self.rungs[name][key] for key in ("tests",) if key in self.rungs.get(name, {})}
        self.rungs[name] = {"outcome": outcome, "seconds": round(seconds, 1)} | kept | more
        self.write()

    def add(self, rung: Rung, outcome: str, seconds: float, work: Path) -> str:
        """Record the end of a rung, whose files are in ``work``. Return the last line that it printed."""
        output = self.running.read_text(errors="replace")
        self.record(rung.name, work, logs=outcome != "passed")
        self._log(f"{rung.name}: {outcome}, {seconds:.0f} s", output)
        more: dict[str, Any] = {"figures": figures} if (figures := printed_json(output)) is not None else {}
        more["tests"] = [*self.rungs[rung.name]["tests"], *PASSED.findall(output)]
        last = telling_line(output)
        self.set(rung.name, outcome, seconds, last=last, **more)
        self.running.write_bytes(b"")
        return last

    def record(self, name: str, work: Path, *, logs: bool) -> None:
        """Add a rung's profiles and snapshots to ``records.zip`` while there is room, and the ends of its ``logs``."""
        new = self._new(self._records)
        with zipfile.ZipFile(self._records) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
            for item in old.infolist():
                if not item.filename.startswith(f"{name}/"):  # of an earlier try
                    archive.writestr(item, old.read(item))
            for pattern in RECORDED:
                for path in sorted(work.rglob(pattern))[-1:]:
                    if compressed_bytes(path) < min(RECORD_BYTES, RECORDS_BYTES - new.stat().st_size):
                        archive.write(path, f"{name}/{path.relative_to(work)}")
            for path in [path for pattern in LOGGED if logs for path in sorted(work.rglob(pattern))]:
                if LOG_BYTES < RECORDS_BYTES - new.stat().st_size:
                    archive.writestr(f"{name}/{path.relative_to(work)}", path.read_bytes()[-LOG_BYTES:])
        new.rename(self._records)

    def cut_running(self) -> None:
        """Cut ``running.log`` to its end if it is long. What runs appends to it."""
        if self.running.stat().st_size > RUNNING_BYTES:
            with self.running.open("r+b") as file:
                file.seek(-LOG_BYTES, 2)
                end = file.read()
                file.truncate(0)
                file.seek(0)
                file.write(end)

    def write(self) -> None:
        """Write results and summary."""
        self.write_text("results.json", json.dumps(self.rungs, indent=2))
        lines = ["| rung | outcome | s | proves |", "|---|---|---|---|"]
        for rung in self._all:
            entry = self.rungs.get(rung.name, {"outcome": "not run", "seconds": ""})
            lines.append(f"| {rung.name} | {entry['outcome']} | {entry['seconds']} | {rung.proves} |")
        lines += ["", f"{self.counts()}. Next: {self.following()}.", ""]
        for name, entry in self.rungs.items():
            if figures := list(numbers(entry.get("figures"))):
                lines.append(f"- {name}: {', '.join(f'{key} {value:g}' for key, value in figures[:FIGURES])}")
        self.write_text("summary.md", "\n".join([*lines, ""]))

    def counts(self) -> str:
        """Return how many rungs have which outcome."""
        kinds = [self.outcome(rung.name).partition(":")[0] or "not run" for rung in self._all]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    def following(self) -> str:
        """Return the next thing to do."""
        started = [rung.name for rung in self._all if self.outcome(rung.name)]
        waiting = [rung.name for rung in self._all if rung.name not in started]
        failed = [name for name in started if self.outcome(name) in (*FAILED, OUT_OF_TIME)]
        if failed and self.outcome(failed[0]) == "failed":
            return (
                f"mend {failed[0]} (its end in logs.txt: {self.rungs[failed[0]].get('last')}), then the same command"
            )
        if failed:
            return f"run the same command: {failed[0]} was {self.outcome(failed[0])}; the tests that passed are kept"
        return f"run the same command: {waiting[0]} is next" if waiting else "nothing: all rungs ran"

    def write_text(self, name: str, text: str) -> None:
        """Replace a file."""
        new = self._new(self.folder / name)
        new.write_text(text)
        new.rename(self.folder / name)

    def _new(self, path: Path) -> Path:
        return path.with_name(f"{NEW}{path.name}")

    def _log(self, title: str, output: str) -> None:
        """Append to ``logs.txt``, in which a rung has one section, its last."""
        sections = [text for text in (self.folder / "logs.txt").read_text().split("\n===== ")[1:]]
        name = title.split(":")[0]
        sections = [text for text in sections if not text.startswith((f"{name}:", f"{name}\n"))]
        self.write_text(
            "logs.txt", "".join(f"\n===== {text}" for text in [*sections, f"{title}\n{output[-LOG_BYTES:]}"])
        )


def compressed_bytes(path: Path) -> int:
    """Return the bytes that a file takes in an archive."""
    with tempfile.TemporaryFile() as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path)
        return file.tell()


def printed_json(output: str) -> object:
    """Return the last JSON object that a benchmark printed over several lines; None without one."""
    start, end = output.rfind("\n{\n"), output.rfind("\n}")
    if output.startswith("{\n") and start < 0:
        start = 0
    if start < 0 or end < start:
        return None
    try:
        return json.loads(output[start : end + 2])
    except ValueError:
        return None


def telling_line(output: str) -> str:
    """Return the first failed test of pytest's summary, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    return next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])[:300]


def numbers(figures: Any, name: str = "") -> list[tuple[str, float]]:
    """Return the figures of a JSON object by their path."""
    if isinstance(figures, dict):
        return [found for key, value in figures.items() for found in numbers(value, f"{name}.{key}" if name else key)]
    is_number = isinstance(figures, int | float) and not isinstance(figures, bool)
    return [(name, float(figures))] if is_number else []
