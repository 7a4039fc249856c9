"""The folder of a run, read while the run writes it: metrics, configuration, spans, expert loads, samples, log."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import LaunchError
from skyrl_megatron.trainer.dashboard.columns import Columns

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
