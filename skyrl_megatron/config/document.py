"""Write the pages that follow from the configuration classes.

``python -m skyrl_megatron.config.document`` writes CONFIG.md, a line per key, and the recipe ``ppo_base_config`` for
scripts decorated with ``hydra.main``. With a file as argument it writes the whole text of all keys there
(``launch/docs.sh``).
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.config.fields import (
    Bounds,
    OneOf,
    Section,
    default_of,
    field_docstrings,
    field_types,
    sections_of,
)
from skyrl_megatron.config.parse import ALIASES, DEPRECATED, RECIPES, describe
from skyrl_megatron.config.table import OTHER_ROLES, STEP_WISE, AdvantageEstimator, ObjectiveRow, PolicyLossType

_HEAD = """\
# Configuration

<!-- Written by `python -m skyrl_megatron.config.document`; a test compares CONFIG.md with the classes. -->

Set keys on the command line (`trainer.seed=1`), in a YAML file (`--config run.yaml`), or in Python
(`SkyRLTrainConfig.from_cli_overrides`). Later assignments win.

- A mapping for a **section** sets the fields that it names: `trainer.placement={colocate_all: false}`. A mapping for a
  **dict option** (`mapping`) replaces it whole; a dotted key into it sets one entry.
- `${other.key}` takes another key's value, `${oc.env:NAME}` that of an environment variable.
- Relative paths start at the current folder. `config.yaml` in the log folder has absolute paths and all resolved
  values; `--check --show-config` prints them.
- Unknown keys, wrong types and values out of range are errors (exit code 2), all listed at once. A setting without
  effect gives a warning. Hydra's `+key=value` is rejected: subclass a class and use `make_config`.
- `derive.py` and `resolve.py` of `skyrl_megatron/config/` fill in what follows from other keys and from the machine.
"""
_SHORT = """
Each line is a key with its default, its values, and the start of its explanation. The whole text is in
`skyrl_megatron/config/schema/` and on the site that `launch/docs.sh` builds.
"""
_WIDTH = 50
"""CONFIG.md shows the clauses of an explanation that fit in as many characters, and at least the first."""


_SIGNS = {"at least": ">=", "at most": "<=", "above": ">", "below": "<"}


def document(root: type[Section] = SkyRLTrainConfig, *, whole: bool = False) -> str:
    """Return the text of CONFIG.md; ``whole``: with the whole explanation of each key."""
    parts = [_HEAD if whole else _HEAD + _SHORT]
    for name, section in sections_of(root).items():
        parts += _section(section, default_of(root, name), name, 2, whole, "")
    parts += [objectives(), _other_spellings()]
    return "\n".join(parts)


def _section(
    cls: type[Section], base: Section | None, key: str, level: int, in_full: bool, text: str
) -> Iterator[str]:
    """Yield a section's own settings (``base`` holds their defaults), then its subsections. ``text``: the explanation
    of the field that holds it, which is shown if its class has more than one place."""
    yield f"{'#' * min(level, 4)} `{key}`\n"
    sections, texts, model = sections_of(cls), field_docstrings(cls), _described_before(key)
    yield f"{_meaning(text if base is None else inspect.getdoc(cls) or '', in_full)}\n"
    if model is not None:
        yield f"As `{model}`{_differences(key, model)}.\n"
    shown = _shown(cls, key)
    inert = [] if in_full else [name for name in shown if _is_inert(cls, name)]
    for name in shown:
        if name in inert:
            continue
        value = default_of(cls, name) if base is None else getattr(base, name)
        values = _values(field_types(cls)[name], value)
        yield f"- `{name}={_default(value)}`{values and f' ({values})'}: {_meaning(texts[name], in_full)}"
    if inert:
        yield f"- For scripts written for SkyRL, without effect: {', '.join(f'`{name}`' for name in inert)}."
    yield ""
    for name in sections if model is None else ():
        yield from _section(
            sections[name], getattr(base, name, None), f"{key}.{name}", level + 1, in_full, texts[name]
        )


def _described_before(key: str) -> str | None:
    """Return the section with the same keys that is described before ``key``, else None."""
    if key in (f"trainer.{role}" for role in OTHER_ROLES):
        return "trainer.policy"
    return "generator.sampling_params" if key == "generator.eval_sampling_params" else None


def _is_inert(cls: type[Section], name: str) -> bool:
    return field_docstrings(cls)[name].startswith("No effect")


def _shown(cls: type[Section], key: str) -> list[str]:
    """Return the settings of a section that have a line: those that the section described before does not have."""
    names = [name for name in field_types(cls) if name not in sections_of(cls)]
    model = _described_before(key)
    return names if model is None else [name for name in names if f"{model}.{name}" not in _defaults()]


def shown_keys(root: type[Section] = SkyRLTrainConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys that have a line in CONFIG.md. The others have no effect, or are in a section that is as another
    one."""
    yield from (f"{prefix}{name}" for name in _shown(root, prefix.rstrip(".")) if not _is_inert(root, name))
    for name, section in sections_of(root).items() if _described_before(prefix.rstrip(".")) is None else ():
        yield from shown_keys(section, f"{prefix}{name}.")


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return key → default of all settings, before any follows from another."""
    return dict(_values_of({name: default_of(SkyRLTrainConfig, name) for name in field_types(SkyRLTrainConfig)}, ""))


def _values_of(fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Section):
            inside = {field: getattr(value, field) for field in field_types(type(value))}
            yield from _values_of(inside, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _differences(key: str, model: str) -> str:
    """Return in which defaults the section ``key`` differs from ``model``, and which of its keys are missing."""
    here, there = _defaults_in(key), _defaults_in(model)
    if not here:  # it is None until it is derived from the other
        return ""
    other = [f"`{name}={_default(value)}`" for name, value in here.items() if name in there and value != there[name]]
    parts = {name.partition(".")[0] for name in here}
    missing = [f"`{name}`" for name in dict.fromkeys(name.partition(".")[0] for name in there) if name not in parts]
    text = f", except {', '.join(other)}" if other else ""
    return text + (f", without {', '.join(missing)}" if missing else "")


def _defaults_in(section: str) -> dict[str, Any]:
    prefix = f"{section}."
    return {name.removeprefix(prefix): value for name, value in _defaults().items() if name.startswith(prefix)}


def _meaning(text: str, in_full: bool) -> str:
    """Put an explanation on one line; cut it after a clause unless ``whole``."""
    text = _flow(text)
    if in_full or len(text) <= _WIDTH:
        return text
    clauses = re.split(r"(?<=[.;])\s", text)
    shown = clauses.pop(0)
    while clauses and (len(shown) + len(clauses[0]) < _WIDTH or shown.count("(") > shown.count(")")):
        shown += f" {clauses.pop(0)}"
    return re.sub(r";$", ".", shown)


def _values(annotation: Any, default: Any) -> str:
    """Return the values that a key takes, as far as its default does not show them."""
    kind = describe(annotation)
    shown = kind.removesuffix(" or null") if default is None else kind
    plain = type(default).__name__ == shown
    return "; ".join([*([] if plain else [shown]), *_rules(annotation)])


def _rules(annotation: Any) -> Iterator[str]:
    """Yield the ``Annotated`` rules of a type, in words."""
    if get_origin(annotation) is Annotated:
        for rule in get_args(annotation)[1:]:
            if isinstance(rule, OneOf):
                yield ", ".join(rule.choices)
            elif isinstance(rule, Bounds):
                yield re.sub("|".join(_SIGNS), lambda match: _SIGNS[match[0]], str(rule))
    elif get_origin(annotation) is not list:
        for part in get_args(annotation):
            yield from _rules(part)


def _default(value: Any) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    text = value if isinstance(value, str) and value else words.get(repr(value), repr(value))
    return text.replace(os.path.expanduser("~/"), "~/")


def _flow(text: str) -> str:
    """Return text on one line, escaped for a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _other_spellings() -> str:
    lines = ["## Other spellings\n"]
    lines += [f"- `{old}` is another name of `{new}`." for old, new in ALIASES.items()]
    moved = [old for old, new in DEPRECATED.items() if new == f"generator.inference_engine.{old.rpartition('.')[2]}"]
    names = ", ".join(f"`{old.rpartition('.')[2]}`" for old in moved)
    lines.append(f"- `generator.X` is now `generator.inference_engine.X`, with a DeprecationWarning, for {names}.")
    lines += [f"- `{old}` is now `{new}`." for old, new in DEPRECATED.items() if old not in moved]
    return "\n".join(lines) + "\n"


def objectives() -> str:
    """Return the tables of the built-in losses and estimators."""
    lines = [
        "## Losses and estimators\n",
        *_head("loss", "what it is", "section", "also reads", "ratio to", "off-policy correction"),
    ]
    for loss in PolicyLossType:
        row = loss.row
        ratio_to = "engine" if row.reads_rollout else "old" if row.reads_old else "none"
        if row.anchor:
            ratio_to += f", or engine with `{row.anchor}=rollout`"
        correction = "yes" if row.corrected else "refused" if row.refuses else "no"
        lines.append(f"| {_common(loss, row)} | {ratio_to} | {correction} |")
    lines += ["", *_head("estimator", "what it is", "section", "also reads", "needs", "step-wise trajectories")]
    for estimator in AdvantageEstimator:
        facts = estimator.row
        needs = {"a critic": facts.critic, "groups": facts.groups, "a teacher": facts.teacher}
        parts = [name for name, needed in needs.items() if needed] + [f"`{key}`" for key in facts.needs]
        step_wise = "no" if STEP_WISE in facts.refuses else "yes"
        lines.append(f"| {_common(estimator, facts)} | {', '.join(parts)} | {step_wise} |")
    return "\n".join(lines) + "\n"


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _common(name: str, row: ObjectiveRow) -> str:
    """Return the first columns of a row: name, meaning, section, other settings."""
    section = "" if row.settings is None else f"`{name}.*`"
    others = ", ".join(f"`{setting}`" for setting in sorted(row.reads or ()))
    return f"`{name}` | {row.meaning} | {section} | {others}"


def base_config() -> str:
    """Return all keys with their defaults as YAML; paths in the home folder start with ``~/``."""
    from omegaconf import OmegaConf

    sections = {name: default_of(SkyRLTrainConfig, name) for name in field_types(SkyRLTrainConfig)}
    values = OmegaConf.create({name: get_config_as_dict(section) for name, section in sections.items()})
    head = "# All keys at their defaults, for scripts decorated with hydra.main (docs/coming-from-skyrl.md).\n"
    return head + OmegaConf.to_yaml(values).replace(os.path.expanduser("~/"), "~/")


def main(arguments: list[str]) -> int:
    """Write CONFIG.md and the YAML file, or the whole text into the given file."""
    root = Path(__file__).parents[2]
    if arguments in (["-h"], ["--help"]):
        print(main.__doc__)
        return 0
    if arguments:
        Path(arguments[0]).write_text(document(whole=True))
        return 0
    (root / "CONFIG.md").write_text(document())
    (RECIPES / "ppo_base_config.yaml").write_text(base_config())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
