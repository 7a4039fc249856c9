"""Where assignments come from: ``key=value`` arguments, YAML files, mappings. Nothing is typed or checked here yet."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_megatron.errors import Problem

OPTIONS = ("--check", "--config", "--help", "--recipe")
"""Options of the commands, for whoever mistypes one."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value for one key."""

    key: str
    """Dotted key."""
    value: Any
    """The value as read."""
    text: str | None
    """How it was typed, where it was typed."""
    source: str
    """Which file, or the command line."""
    spelled: str
    """The key as the user wrote it, before renaming."""

    def below(self, name: str, value: Any) -> Assignment:
        """Return an entry of this assignment's mapping as an assignment of its own."""
        return Assignment(f"{self.key}.{name}", value, None, self.source, f"{self.spelled}.{name}")

    def typed(self) -> Any:
        """Return the text read as YAML, or as it is where it is no YAML."""
        try:
            return _yaml_value(self.text or "")
        except ValueError:
            return self.text

    def renamed(self, key: str) -> Assignment:
        """Return the same under another key."""
        return dataclasses.replace(self, key=key)

    def with_value(self, value: Any) -> Assignment:
        """Return the same with its interpolations resolved; a number taken from another key may stand for a string."""
        return dataclasses.replace(self, value=value, text=str(value) if isinstance(value, int | float) else None)


def read_mapping(mapping: Mapping[str, Any], source: str, text: bool = False) -> list[Assignment]:
    """Read a mapping, whose keys may be dotted. ``text``: strings may stand for other types, as when typed."""
    found = []
    for key, value in mapping.items():
        typed = value if text and isinstance(value, str) else None
        found.append(Assignment(str(key), value, typed, source, str(key)))
    return found


def read_arguments(args: Sequence[str]) -> tuple[list[Assignment], list[Problem]]:
    """Read ``key=value`` and ``--config FILE`` arguments, in order, and name what cannot be read."""
    found: list[Assignment] = []
    problems: list[Problem] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--config" or arg.startswith("--config="):
            path = arg.partition("=")[2] if "=" in arg else next(rest, "")
            entries, wrong = read_yaml(path)
            found += entries
            problems += wrong
            continue
        key, equals, text = arg.partition("=")
        if refused := _refusal(arg, bool(equals)):
            problems.append(Problem(key, text, refused))
            continue
        try:
            found.append(Assignment(key, _yaml_value(text), text, "command line", key))
        except ValueError as error:
            problems.append(Problem(key, text, str(error)))
    return found, problems


def names_key(assignments: Sequence[Assignment], key: str) -> bool:
    """Return whether one of ``assignments`` gives ``key`` a value, by itself or inside a mapping for a section."""
    return any(
        item.key == key
        or (key.startswith(f"{item.key}.") and isinstance(item.value, Mapping) and names_key(_entries(item), key))
        for item in assignments
    )


def _entries(item: Assignment) -> list[Assignment]:
    return [item.below(str(name), value) for name, value in item.value.items()]


def read_yaml(path: str) -> tuple[list[Assignment], list[Problem]]:
    """Read a YAML file, or say why it cannot be read, with the line."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def wrong(fix: str) -> tuple[list[Assignment], list[Problem]]:
        return [], [Problem("--config", path, fix)]

    if not path:
        return wrong("name a YAML file")
    try:
        content = OmegaConf.load(Path(path).expanduser())
        plain = OmegaConf.to_container(content, resolve=False)
    except FileNotFoundError:
        return wrong("no such file")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return wrong(f"{place}{error.problem or error.context}")
    except yaml.YAMLError as error:
        return wrong(" ".join(str(error).split()))
    except OmegaConfBaseException as error:
        return wrong(" ".join(str(error).split()))
    except (OSError, UnicodeDecodeError) as error:
        return wrong(str(error))
    if not isinstance(plain, dict):
        return wrong("must hold a mapping of keys to values")
    return read_mapping({str(key): value for key, value in plain.items()}, path), []


def _refusal(arg: str, has_value: bool) -> str | None:
    """Say why an argument is not an assignment; None if it is."""
    if arg.startswith(("+", "~")):
        return (
            f"'{arg[0]}' adds or removes keys in Hydra; here every key exists already: write it without, "
            "or subclass the configuration class to add your own"
        )
    if arg.startswith("-"):
        near = difflib.get_close_matches(arg.partition("=")[0], OPTIONS, n=1)
        return f"unknown option{f'; did you mean {near[0]}?' if near else ''} Settings are written key=value"
    if has_value:
        return None
    if re.fullmatch(r"\d+x\d+", arg):
        return f"settings are written key=value; a machine is written --check={arg}"
    return "settings are written key=value"


def _yaml_value(text: str) -> Any:
    """Read typed text as YAML: ``4``, ``1e-6``, ``true``, ``null``, ``[a, b]``, ``{a: 1}``. Raises ValueError."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text.encode()
        node = OmegaConf.from_dotlist([f"value={text}"])
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or str(error)
        raise ValueError(f"not readable as YAML: {reason.splitlines()[0]}") from None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"not readable as an interpolation, ${{other.key}} or ${{oc.env:NAME}}: {reason}") from None
    except UnicodeEncodeError:
        raise ValueError("holds bytes that are not UTF-8") from None
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    value = plain["value"]
    is_block = isinstance(value, dict | list) and text.lstrip()[:1] not in ("{", "[")
    return text if is_block else value  # "a: b" is a string, not YAML's block mapping
