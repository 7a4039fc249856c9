"""``report.html`` of one or several runs, made from their folders, during a run and at its end.

The data of the page is a block of bytes: the length of a header as little-endian uint32, the header as JSON, padded
with spaces to a multiple of four, then the float32 columns of each run. In a file it is compressed and in base64.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_megatron.config.metric_table import describe
from skyrl_megatron.errors import LaunchError, SkyRLMegatronError, SkyRLMegatronWarning
from skyrl_megatron.trainer.recorders import TRAJECTORIES
from skyrl_megatron.trainer.tracking import METRICS_FILE

LARGEST = 1_200_000
"""Maximum number of values of a run in a page. Longer runs are downsampled, and extremes are kept."""
_NAN = float("nan")


class Columns:
    """Metric → float32 column with a value for each line of ``metrics.jsonl``, NaN if the line has none."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. Values that are not numbers become NaN."""
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
        """Return the sorted names."""
        return sorted(self._columns)

    def values(self, after: int = 0) -> np.ndarray:
        """Return the lines from number ``after`` on, [names, rows − after] float32."""
        table = np.full((len(self._columns), max(self.rows - after, 0)), np.nan, np.float32)
        for row, name in enumerate(self.names()):
            column = np.asarray(self._columns[name], np.float32)[after:]
            table[row, : len(column)] = column
        return table


def thinned(values: np.ndarray, largest: int = LARGEST) -> np.ndarray:
    """Downsample ``values`` [names, n] float32 to at most ``largest`` numbers, if there are more. Of each bucket of
    consecutive lines two remain, with the minimum and the maximum of each name in their order."""
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
    kept: np.ndarray = np.take_along_axis(parts, order, axis=2).reshape(names, 2 * buckets)
    return kept


SPANS = "spans.jsonl"
EXPERTS = "expert_load.jsonl"
SAMPLES = "samples"
SAMPLE_FORMAT = 1
LOG_BYTES = 16_384


class RunReader:
    """Reads the folder of a run; :meth:`refresh` reads new lines. Raises LaunchError if it is not a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        if not self.folder.is_dir():
            raise LaunchError(f"RUN={folder}: no such folder. Pass log_path/project_name/run_name of a run")
        if not any((self.folder / name).is_file() for name in (METRICS_FILE, "config.yaml")):
            inside = sorted(path.parent.relative_to(self.folder) for path in self.folder.glob(f"*/{METRICS_FILE}"))
            inside += sorted(path.parent.relative_to(self.folder) for path in self.folder.glob(f"*/*/{METRICS_FILE}"))
            hint = f". It contains runs: {', '.join(map(str, inside[:5]))}" if inside else ""
            raise LaunchError(f"RUN={folder}: not a run, it has neither {METRICS_FILE} nor config.yaml{hint}")
        self.name = "/".join(self.folder.resolve().parts[-2:])
        self.life = 0
        """How often the file was replaced, which makes the lines read before void."""
        self.columns = Columns()
        self._offset, self._last_step = 0, -1.0

    def refresh(self) -> bool:
        """Read the complete lines that were added, and return whether there were any."""
        path = self.folder / METRICS_FILE
        size = path.stat().st_size if path.is_file() else 0
        if size < self._offset:
            self._reset()
        before = self.columns.rows
        if size > self._offset:
            with path.open("rb") as file:
                file.seek(self._offset)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # it is being written
                    self._offset += len(raw)
                    self._take(raw)
        return self.columns.rows != before

    def _reset(self) -> None:
        self.columns, self._offset, self._last_step = Columns(), 0, -1.0
        self.life += 1

    def _take(self, raw: bytes) -> None:
        with contextlib.suppress(ValueError):
            line = json.loads(raw)
            if isinstance(line, dict) and isinstance(line.get("step"), int | float):
                self.columns.add(line)

    def age_s(self) -> float | None:
        """Return the seconds since the run last wrote to a file, None if it never did."""
        paths = (self.folder / name for name in (METRICS_FILE, "console.log"))
        times = [path.stat().st_mtime for path in paths if path.is_file()]
        return time.time() - max(times) if times else None

    def config(self) -> dict[str, str]:
        """Return dotted key → value of the configuration. If it cannot be read, the only entry is the error."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return {}
        import yaml

        try:
            return dict(_flat("", yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))))
        except (OSError, ValueError, yaml.YAMLError) as error:
            return {"config.yaml": f"cannot be read: {str(error).splitlines()[0]}"}

    def log_tail(self) -> list[str]:
        """Return the last lines of ``console.log``."""
        path = self.folder / "console.log"
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-60:]

    def spans(self, most_bytes: int) -> list[dict[str, Any]]:
        """Return the timelines of some steps: the newest ones, and evenly spaced earlier ones."""
        return _some_lines(self.folder / SPANS, most_bytes, {"step": int, "lanes": dict})

    def expert_loads(self, most_bytes: int) -> list[dict[str, Any]]:
        """Return the tokens of each expert, for some steps."""
        return _some_lines(self.folder / EXPERTS, most_bytes, {"step": int, "layers": list, "load": list})

    def sample_steps(self) -> list[int]:
        """Return the steps with samples on disk."""
        return self._steps(SAMPLES)

    def trajectory_steps(self) -> list[int]:
        """Return the steps with trajectories of agents on disk."""
        return self._steps(TRAJECTORIES)

    def _steps(self, name: str) -> list[int]:
        paths = (self.folder / name).glob("step_*.json*")
        return sorted(int(path.stem[5:]) for path in paths if path.stem[5:].isdigit())

    def trajectory_text(self, step: int) -> str:
        """Return the JSON list of a step's trajectories. Raises LaunchError if it cannot be read."""
        path = self.folder / TRAJECTORIES / f"step_{step}.jsonl"
        try:
            return f"[{','.join(line for line in path.read_text().split('\n')[:-1])}]"
        except (OSError, ValueError) as error:
            raise LaunchError(f"trajectories of step {step}: {path} cannot be read ({error})") from error

    def sample_text(self, step: int) -> str:
        """Return the JSON of a step's samples. Raises LaunchError if it cannot be read or has another format."""
        path = self.folder / SAMPLES / f"step_{step}.json"
        try:
            text = path.read_text()
            version = json.loads(text).get("format")
        except (OSError, ValueError, AttributeError) as error:
            raise LaunchError(f"samples of step {step}: {path} cannot be read ({error})") from error
        if version != SAMPLE_FORMAT:
            raise LaunchError(
                f"samples of step {step}: {path} has format {version}, this version reads {SAMPLE_FORMAT}; open the "
                "run with the version that wrote it"
            )
        return text


def _some_lines(path: Path, most_bytes: int, parts: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return the newest ten lines and as many evenly spaced earlier ones as fit, in order. Lines without all ``parts``
    (name → type) are dropped: another version may have written them."""
    if not path.is_file():
        return []
    positions: list[tuple[int, int]] = []
    with path.open("rb") as file:
        begin = 0
        for raw in file:
            if raw.endswith(b"\n"):
                positions.append((begin, len(raw)))
            begin += len(raw)
        size = max((length for _, length in positions[-10:]), default=1)
        count = min(len(positions), max(most_bytes // size, 1))
        newest = min(count, 10)
        old = len(positions) - newest
        others = count - newest
        chosen = [number * old // others for number in range(others)] if others else []
        lines = []
        for start, length in (positions[number] for number in [*chosen, *range(old, len(positions))]):
            file.seek(start)
            with contextlib.suppress(ValueError):
                lines.append(json.loads(file.read(length)))
    records = [line for line in lines if isinstance(line, dict)]
    return [line for line in records if all(isinstance(line.get(name), kind) for name, kind in parts.items())]


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, json.dumps(value) if not isinstance(value, str) else value


STATIC = Path(__file__).with_name("static")
SCRIPTS = ("data", "charts", "panels", "time", "experts", "strip", "choices", "samples", "agents", "compare", "main")
"""Parts of the page's script, in the order of their dependencies."""
SPAN_BYTES = 1_500_000
EXPERT_BYTES = 1_000_000
SAMPLE_BYTES = 3_000_000
TRAJECTORY_BYTES = 2_000_000
"""Limits of a file for all runs together. A server sends more samples on request."""


def data_block(
    runs: Sequence[RunReader], *, samples: bool = False, live: bool = False, known: Sequence[tuple[int, int]] = ()
) -> bytes:
    """Return the data of the page. ``samples``: include as many samples as a file may have. ``live``: a server sends
    the rest. ``known``: ``life`` and number of lines of each run that the page has already; only later lines are sent.
    """
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
                "samples": _some(run.sample_steps(), run.sample_text, SAMPLE_BYTES // len(runs)) if samples else {},
                "trajectory_steps": run.trajectory_steps(),
                "trajectories": _some(run.trajectory_steps(), run.trajectory_text, TRAJECTORY_BYTES // len(runs))
                if samples
                else {},
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
    """Return the whole page, for a file, or for a server if ``live``."""
    packed = base64.b64encode(zlib.compress(data_block(runs, samples=not live, live=live), 6)).decode()
    title = " · ".join(run.name for run in runs)
    return _frame().replace("{{title}}", title.replace("<", "&lt;")).replace("{{data}}", packed)


def write_page(runs: Sequence[RunReader], path: Path) -> int:
    """Write the page to ``path``, atomically, and return its size in bytes."""
    text = page(runs).encode()
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_bytes(text)
    unfinished.replace(path)
    return len(text)


@cache
def _frame() -> str:
    frame = (STATIC / "page.html").read_text()
    script = "\n".join((STATIC / f"{name}.js").read_text() for name in SCRIPTS)
    return frame.replace("{{style}}", (STATIC / "style.css").read_text()).replace("{{script}}", script)


def _descriptions(names: Sequence[str]) -> dict[str, list[str]]:
    """Return metric → [unit, meaning, what a bad value points to, "higher" or "lower" if that is better]."""
    rows = {name: describe(name) for name in names}
    return {name: [row.unit, row.meaning, row.bad, row.better] for name, row in rows.items() if row is not None}


def _some(steps: Sequence[int], text_of: Callable[[int], str], most_bytes: int) -> dict[str, Any]:
    """Return step → samples: the newest step, the first, and evenly spaced ones between them while they fit. Warns of
    steps that cannot be read."""
    chosen, left = dict[str, Any](), most_bytes
    order = [*steps[-1:], *steps[:1], *(steps[len(steps) * part // 16] for part in range(1, 16) if steps)]
    for step in dict.fromkeys(order):
        try:
            text = text_of(step)
        except LaunchError as error:
            warnings.warn(f"{error}; skipped", SkyRLMegatronWarning, stacklevel=2)
            continue
        if len(text) <= left:
            chosen[str(step)] = json.loads(text)
            left -= len(text)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``report.html`` into the folder of a run, and return the exit code."""
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
