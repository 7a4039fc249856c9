"""``task.toml`` of a task: values by type, so that a wrong one is one error with file and key.

A task is written by others. Its numbers are finite and positive, and at most what the run allows
(``environment.skyrl_gym.task``); its texts have no NUL.
"""

from __future__ import annotations

import logging
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridges.errors import BridgeError
from bridges.files import read_inside
from skyrl_megatron.config.schema.generator import TaskEnvConfig
from skyrl_megatron.errors import DataError

log = logging.getLogger(__name__)
SETTINGS_BYTES = 1 << 16
"""Most bytes of ``task.toml``."""
LONGEST_TEXT = 1 << 16
"""Most characters of one value."""


def read_text(path: Path, folder: Path, most: int) -> str:
    """Return the text of a file of a task. Raises DataError that names the file."""
    try:
        return read_inside(path, folder, most).decode()
    except (OSError, ValueError, BridgeError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from error


def read_settings(path: Path, folder: Path) -> Settings:
    """Return the settings in a TOML file. Raises DataError that names the file."""
    text = read_text(path, folder, SETTINGS_BYTES)
    try:
        return Settings(path, tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} of a task cannot be read: {error}") from error


class Settings:
    """A table of TOML. Each method returns a value of one type, or its default where the key is absent, and raises
    DataError that names file and key for any other."""

    def __init__(self, file: Path, values: Mapping[str, Any], section: str = "") -> None:
        self.file, self.values, self._section = file, values, section

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def name(self, key: str) -> str:
        """Return ``section.key``."""
        return f"{self._section}.{key}" if self._section else key

    def table(self, key: str) -> Settings:
        """Return a table; an empty one if it is absent."""
        values = self.values.get(key, {})
        if not isinstance(values, Mapping):
            raise self.wrong(key, f"a table: [{self.name(key)}]")
        return Settings(self.file, values, self.name(key))

    def text(self, key: str, default: str = "") -> str:
        """Return a text without NUL."""
        value = self.values.get(key, default)
        if not _is_text(value):
            raise self.wrong(key, "a text")
        return str(value)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def words(self, key: str) -> list[str]:
        """Return a list of texts that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(map(_is_text, value)):
            raise self.wrong(key, "a list of words" if key in self else "given as a list of words")
        return list(value)

    def tables_or_texts(self, key: str) -> list[str | Settings]:
        """Return a list of texts and tables."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(_is_text(each) or isinstance(each, Mapping) for each in value):
            raise self.wrong(key, "a list of texts or tables")
        return [each if isinstance(each, str) else Settings(self.file, each, self.name(key)) for each in value]

    def number(self, key: str, default: float, most: float) -> float:
        """Return a positive number of at most ``most``; a larger one is lowered, with a line in the log."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_positive(value):
            raise self.wrong(key, "a positive number")
        return self.lowered(key, value, most)

    def lowered(self, key: str, value: float, most: float) -> float:
        """Return a value of a key, at most ``most``."""
        if value > most:
            log.warning("%s: %s is lowered to this run's limit, %g", self.file, self.name(key), most)
        return min(value, most)

    def variables(self, key: str) -> dict[str, str]:
        """Return a table of environment variables."""
        variables = {}
        table = self.table(key)
        for name, value in table.values.items():
            text = shown_value(value) if isinstance(value, bool | int | float) else value
            is_name = name and "=" not in name and _is_text(name)
            if not (is_name and _is_text(text) and text.count("${") <= MOST_TEMPLATES):
                raise table.wrong(name, "a name and a text, for a variable")
            variables[name] = text
        return variables

    def wrong(self, key: str, expected: str) -> DataError:
        """Return the error of a key."""
        value = shown_value(self.values[key], repr)[:80] if key in self.values else "nothing"
        return DataError(f"{self.file}: {self.name(key):.200} is {value}, must be {expected}: correct it")


MOST_TEMPLATES = 100
"""Most templates in the value of a variable."""


def shown_value(value: object, shown: Callable[[object], str] = str) -> str:
    """Return a value as text, also a whole number of more digits than Python writes."""
    try:
        return shown(value)
    except ValueError:
        return "a number of thousands of digits"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= LONGEST_TEXT


def _is_positive(value: float) -> bool:
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # a whole number beyond float64
        return value > 0


class TaskBounds:
    """What a task may ask for, of ``environment.skyrl_gym.task``; what is not set there is this machine's.

    ``memory``, ``disk``: bytes. ``cpus``: cores. ``images``: paths that tasks may name besides those in their folder.
    """

    def __init__(self, cfg: TaskEnvConfig) -> None:
        quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        self.cpus = float(cfg.max_cpus or len(os.sched_getaffinity(0)))
        self.memory, self.disk = cfg.max_memory or quarter, cfg.max_disk or quarter
        self.processes, self.timeout_s = cfg.max_processes, cfg.max_timeout_s
        self.images = tuple(cfg.images)
