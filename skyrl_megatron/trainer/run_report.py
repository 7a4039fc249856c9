"""``report.html`` and ``curves.png`` of a run, from its folder, while it runs and at its end.

The data is a block of bytes: the length of a header as little-endian uint32, the header as JSON padded with spaces to
a multiple of four, then float32 columns of each run, one run after the other. In a file it is deflated, in base64.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import struct
import sys
import time
import warnings
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, SkyRLMegatronWarning
from skyrl_megatron.trainer.metric_table import describe

if TYPE_CHECKING:
    pass


LARGEST = 1_200_000
"""Numbers that a page gets; longer runs are thinned, extremes kept."""
_NAN = float("nan")


class Columns:
    """A float32 for each line of ``metrics.jsonl``, by name; NaN where a line has none."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line. What is not a number is left out."""
        for name, value in line.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("f")
            missing = self.rows - len(column)
            if missing > 0:
                column.extend([_NAN] * missing)
            column.append(value if isinstance(value, int | float) else _NAN)
        self.rows += 1

    def names(self) -> list[str]:
        """Return the names in their order."""
        return sorted(self._columns)

    def values(self, after: int = 0) -> np.ndarray:
        """Return [names, rows − after] float32: lines from number ``after`` on."""
        found = np.full((len(self._columns), max(self.rows - after, 0)), np.nan, np.float32)
        for row, name in enumerate(self.names()):
            column = np.asarray(self._columns[name], np.float32)[after:]
            found[row, : len(column)] = column
        return found


def thinned(values: np.ndarray, largest: int = LARGEST) -> np.ndarray:
    """Return at most ``largest`` numbers of ``values`` [names, n] float32: where there are more, equally many lines
    become two, which hold the smallest and the largest value of each name in the order in which they came."""
    names, lines = values.shape
    if names * lines <= largest:
        return values
    buckets = max(largest // (2 * names), 1)
    size = -(-lines // buckets)
    padded = np.full((names, buckets * size), np.nan, np.float32)
    padded[:, :lines] = values
    parts = padded.reshape(names, buckets, size)
    empty = np.isnan(parts)
    low = np.where(empty, np.inf, parts).argmin(axis=2)
    high = np.where(empty, -np.inf, parts).argmax(axis=2)
    order = np.stack([np.minimum(low, high), np.maximum(low, high)], axis=2)
    found: np.ndarray = np.take_along_axis(parts, order, axis=2).reshape(names, 2 * buckets)
    return found


METRICS = "metrics.jsonl"
SPANS = "spans.jsonl"
EXPERTS = "expert_load.jsonl"
SAMPLES = "samples"
SAMPLE_FORMAT = 1
LOG_BYTES = 16_384


class RunReader:
    """What ``folder`` holds so far; :meth:`refresh` reads on. Raises LaunchError where there is no run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        if not self.folder.is_dir():
            raise LaunchError(f"RUN={folder}: no such folder; give log_path/project_name/run_name of a run")
        if not any((self.folder / name).is_file() for name in (METRICS, "config.yaml")):
            inside = sorted(path.parent.relative_to(self.folder) for path in self.folder.glob(f"*/{METRICS}"))
            inside += sorted(path.parent.relative_to(self.folder) for path in self.folder.glob(f"*/*/{METRICS}"))
            hint = f"; the folder has runs in it: {', '.join(map(str, inside[:5]))}" if inside else ""
            raise LaunchError(f"RUN={folder}: no run, it has neither {METRICS} nor config.yaml{hint}")
        self.name = "/".join(self.folder.resolve().parts[-2:])
        self.life = 0
        """How often the run was begun anew, so that what was read before is void."""
        self.columns = Columns()
        self._offset, self._last_step = 0, -1.0

    def refresh(self) -> bool:
        """Read whole lines that were added; return whether there were any."""
        path = self.folder / METRICS
        size = path.stat().st_size if path.is_file() else 0
        if size < self._offset:
            self._begin_anew()
        before = self.columns.rows
        if size > self._offset:
            with path.open("rb") as file:
                file.seek(self._offset)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # is being written
                    self._offset += len(raw)
                    self._take(raw)
        return self.columns.rows != before

    def _begin_anew(self) -> None:
        self.columns, self._offset, self._last_step = Columns(), 0, -1.0
        self.life += 1

    def _take(self, raw: bytes) -> None:
        with contextlib.suppress(ValueError):
            line = json.loads(raw)
            if isinstance(line, dict) and isinstance(line.get("step"), int | float):
                self.columns.add(line)

    def age_s(self) -> float | None:
        """Return the seconds since the run wrote anything; None when it has not."""
        paths = (self.folder / name for name in (METRICS, "console.log"))
        times = [path.stat().st_mtime for path in paths if path.is_file()]
        return time.time() - max(times) if times else None

    def config(self) -> dict[str, str]:
        """Return the configuration by dotted keys; one entry that says why where it cannot be read."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return {}
        import yaml

        try:
            return dict(_flat("", yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))))
        except (OSError, ValueError, yaml.YAMLError) as error:
            return {"config.yaml": f"cannot be read: {str(error).splitlines()[0]}"}

    def log_tail(self) -> list[str]:
        """Return the last lines for people."""
        path = self.folder / "console.log"
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-60:]

    def spans(self, most_bytes: int) -> list[dict[str, Any]]:
        """Return who did what when, of some steps: the newest, and others evenly between the first and these."""
        return _some_lines(self.folder / SPANS, most_bytes, {"step": int, "lanes": dict})

    def expert_loads(self, most_bytes: int) -> list[dict[str, Any]]:
        """Return the tokens of each expert, of some steps."""
        return _some_lines(self.folder / EXPERTS, most_bytes, {"step": int, "layers": list, "load": list})

    def sample_steps(self) -> list[int]:
        """Return the steps whose samples are on disk."""
        paths = (self.folder / SAMPLES).glob("step_*.json")
        return sorted(int(path.stem[5:]) for path in paths if path.stem[5:].isdigit())

    def sample_text(self, step: int) -> str:
        """Return the JSON of a step's samples. Raises LaunchError for one that cannot be shown."""
        path = self.folder / SAMPLES / f"step_{step}.json"
        try:
            text = path.read_text()
            found = json.loads(text).get("format")
        except (OSError, ValueError, AttributeError) as error:
            raise LaunchError(f"samples of step {step}: {path} cannot be read ({error})") from error
        if found != SAMPLE_FORMAT:
            raise LaunchError(f"samples of step {step}: {path} has format {found}, this version reads {SAMPLE_FORMAT}")
        return text


def _some_lines(path: Path, most_bytes: int, parts: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return the newest ten lines and, evenly, as many others as fit, in their order; those that have all ``parts``,
    by name and type, as another version may have written others."""
    if not path.is_file():
        return []
    places: list[tuple[int, int]] = []
    with path.open("rb") as file:
        begin = 0
        for raw in file:
            if raw.endswith(b"\n"):
                places.append((begin, len(raw)))
            begin += len(raw)
        size = max((length for _, length in places[-10:]), default=1)
        count = min(len(places), max(most_bytes // size, 1))
        newest = min(count, 10)
        old = len(places) - newest
        others = count - newest
        chosen = [number * old // others for number in range(others)] if others else []
        lines = []
        for place, length in (places[number] for number in [*chosen, *range(old, len(places))]):
            file.seek(place)
            with contextlib.suppress(ValueError):
                lines.append(json.loads(file.read(length)))
    whole = [line for line in lines if isinstance(line, dict)]
    return [line for line in whole if all(isinstance(line.get(name), kind) for name, kind in parts.items())]


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, json.dumps(value) if not isinstance(value, str) else value


STATIC = Path(__file__).with_name("static")
SCRIPTS = ("data", "charts", "panels", "time", "experts", "strip", "samples", "compare", "main")
"""Parts of the page's script, in the order in which they need each other."""
SPAN_BYTES = 1_500_000
EXPERT_BYTES = 1_000_000
SAMPLE_BYTES = 3_000_000
"""Of a file, all runs together; a server gives more when asked."""


def data_block(
    runs: Sequence[RunReader], *, samples: bool = False, live: bool = False, known: Sequence[tuple[int, int]] = ()
) -> bytes:
    """Return what the page shows of the runs. ``samples``: with as many as a file may hold. ``live``: a server answers
    for the rest. ``known``: life and lines of each run that the page has; it gets what came after them."""
    described, blocks = [], []
    for number, run in enumerate(runs):
        life, lines = known[number] if number < len(known) else (-1, 0)
        after = lines if life == run.life else 0
        values = run.columns.values(after)
        if after == 0:
            values = thinned(values)
        age = run.age_s()
        described.append(
            {
                "name": run.name,
                "folder": str(run.folder),
                "life": run.life,
                "lines": run.columns.rows,
                "after": after,
                "age_s": age,
                "names": run.columns.names(),
                "rows": values.shape[1],
                "config": run.config(),
                "log": run.log_tail(),
                "spans": run.spans(SPAN_BYTES // len(runs)),
                "experts": run.expert_loads(EXPERT_BYTES // len(runs)),
                "sample_steps": run.sample_steps(),
                "samples": _some_samples(run, SAMPLE_BYTES // len(runs)) if samples else {},
            }
        )
        blocks.append(np_bytes(values))
    names = sorted({name for run in runs for name in run.columns.names()})
    header = json.dumps({"live": live, "runs": described, "metrics": _descriptions(names)}).encode()
    header += b" " * (-len(header) % 4)
    return b"".join([struct.pack("<I", len(header)), header, *blocks])


def np_bytes(values: Any) -> bytes:
    """Return the columns of [names, rows] float32, little-endian."""
    return bytes(values.astype("<f4").tobytes())


def page(runs: Sequence[RunReader], *, live: bool = False) -> str:
    """Return the whole page, for a file, or ``live`` for the server that answers its questions."""
    packed = base64.b64encode(zlib.compress(data_block(runs, samples=not live, live=live), 6)).decode()
    title = " · ".join(run.name for run in runs)
    return _frame().replace("{{title}}", title.replace("<", "&lt;")).replace("{{data}}", packed)


def write_page(runs: Sequence[RunReader], path: Path) -> int:
    """Write the page to ``path``, at once for whoever reads it, and return its size in bytes."""
    text = page(runs).encode()
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(text)
    beside.replace(path)
    return len(text)


@cache
def _frame() -> str:
    frame = (STATIC / "page.html").read_text()
    script = "\n".join((STATIC / f"{name}.js").read_text() for name in SCRIPTS)
    return frame.replace("{{style}}", (STATIC / "style.css").read_text()).replace("{{script}}", script)


def _descriptions(names: Sequence[str]) -> dict[str, list[str]]:
    """Return unit, meaning and what a bad value points to, by metric."""
    found = {name: describe(name) for name in names}
    return {name: [row.unit, row.meaning, row.bad] for name, row in found.items() if row is not None}


def _some_samples(run: RunReader, most_bytes: int) -> dict[str, Any]:
    """Return samples by step: of the newest step, the first, and further ones evenly between them while they fit.
    Warns of those that cannot be shown."""
    steps, chosen, left = run.sample_steps(), dict[str, Any](), most_bytes
    order = [*steps[-1:], *steps[:1], *(steps[len(steps) * part // 16] for part in range(1, 16) if steps)]
    for step in dict.fromkeys(order):
        try:
            text = run.sample_text(step)
        except LaunchError as error:
            warnings.warn(f"{error}; left out", SkyRLMegatronWarning, stacklevel=2)
            continue
        if len(text) <= left:
            chosen[str(step)] = json.loads(text)
            left -= len(text)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``report.html`` into the folder of a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl-megatron report", description="Write report.html of a run.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    try:
        run = RunReader(parser.parse_args(argv).run)
        run.refresh()
        write_page([run], run.folder / "report.html")
    except (SkyRLMegatronError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(run.folder / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
