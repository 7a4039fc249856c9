"""Writes what is made of the configuration classes, ``python -m skyrl_megatron.config.document``: CONFIG.md, and for
scripts decorated with ``hydra.main``, which know keys from a file alone, ``launch/recipes/ppo_base_config.yaml``."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from skyrl_megatron.config import SkyRLTrainConfig, get_config_as_dict
from skyrl_megatron.config.fields import Bounds, OneOf, Section, default_of, field_types, leaves, sections_of
from skyrl_megatron.config.parse import ALIASES, DEPRECATED, describe

_HEAD = """\
# Configuration

<!-- Written by `python -m skyrl_megatron.config.document`; a test compares it with the classes. -->

Every key can be set on the command line (`trainer.seed=1`), in a YAML file (`--config run.yaml`), or in Python
(`SkyRLTrainConfig.from_cli_overrides`). Assignments apply in the order given; the later one wins.

- A mapping given for a **section** sets the fields it names: `trainer.placement={colocate_all: false}`.
- A mapping given for a **dict option** (type `mapping`) replaces it whole, defaults included; a dotted key into it
  sets one entry and keeps the others. Any default can so be undone: `…transformer_config_kwargs={}`.
- `${other.key}` takes another key's value, `${oc.env:NAME}` that of an environment variable.
- A relative path is meant from the folder in which the command is typed; `config.yaml` has absolute ones.
- A setting that changes nothing in a run is named in a warning, with the reason; of a key that one command line gives
  twice both values are named, and the later one counts.
- An unknown key, a wrong type and a value out of range are errors (exit code 2); all are listed at once. Hydra's
  `+key=value` is refused: subclass a class and use `make_config` to add keys.
- Values that follow from others, and what changes on a machine without GPUs, are filled in by
  `skyrl_megatron/config/derive.py` and `resolve.py`. Every run saves the result as `config.yaml` in its log folder;
  `--check` prints it.
"""


def document(root: type[Section] = SkyRLTrainConfig) -> str:
    """Return the whole text of CONFIG.md."""
    parts = [_HEAD]
    for name, section in sections_of(root).items():
        parts += _section(section, default_of(root, name), name, 2)
    parts.append(_other_spellings())
    return "\n".join(parts)


def _section(cls: type[Section], base: Section | None, key: str, level: int) -> Iterator[str]:
    """Yield a table of the section's own settings (``base`` holds their defaults), then its subsections."""
    yield f"{'#' * min(level, 4)} `{key}`\n"
    yield f"{_flow(inspect.getdoc(cls) or '')} (`{cls.__name__}`)\n"
    sections, texts = sections_of(cls), field_docstrings(cls)
    own = [name for name in field_types(cls) if name not in sections]
    if own:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        for name in own:
            kind, default = (
                _type(field_types(cls)[name]),
                _default(default_of(cls, name) if base is None else getattr(base, name)),
            )
            yield f"| `{name}` | {kind} | {default} | {_flow(texts[name])} |"
        yield ""
    for name, section in sections.items():
        path = f"{key}.{name}"
        if _described_before(path):
            yield f"{'#' * min(level + 1, 4)} `{path}`\n"
            yield f"{_flow(texts[name])} Keys as in `{_described_before(path)}`.\n"
        else:
            yield from _section(section, getattr(base, name, None), path, level + 1)


def _described_before(path: str) -> str | None:
    """Return the section whose table describes the same keys (reference, critic, evaluation), else None."""
    if path == "generator.eval_sampling_params":
        return "generator.sampling_params"
    match = re.fullmatch(r"trainer\.(ref|critic|teacher)\.(model|optimizer_config|fsdp_config|megatron_config)", path)
    return f"trainer.policy.{match[2]}" if match else None


def field_docstrings(cls: type) -> dict[str, str]:
    """Return field name → the text under it in the source, for a class and its parents."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if "__dataclass_fields__" not in owner.__dict__ or owner.__module__ == "types":
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    return texts


def own_keys(cls: type[SkyRLTrainConfig]) -> Iterator[str]:
    """Yield a line for each key that ``cls`` has beside those of every run: key, default and the text under it."""
    known = {key for key, _, _ in leaves(SkyRLTrainConfig)}
    for key, owner, name in leaves(cls):
        if key not in known:
            try:
                text = _flow(field_docstrings(owner).get(name, ""))
            except (OSError, TypeError):  # a class without a source file, of a notebook
                text = ""
            yield f"  {key}={default_of(owner, name)}  {text}".rstrip()


def _type(annotation: Any) -> str:
    rules = "; ".join(_rules(annotation))
    return describe(annotation) + (f"; {rules}" if rules else "")


def _rules(annotation: Any) -> Iterator[str]:
    """Yield the ``Annotated`` rules inside a type, in words."""
    if get_origin(annotation) is Annotated:
        for rule in get_args(annotation)[1:]:
            if isinstance(rule, OneOf):
                yield "one of " + ", ".join(f"`{choice}`" for choice in rule.choices)
            elif isinstance(rule, Bounds):
                yield str(rule)
    elif get_origin(annotation) is not list:
        for part in get_args(annotation):
            yield from _rules(part)


def _default(value: Any) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return f"`{text}`".replace(os.path.expanduser("~/"), "~/")


def _flow(text: str) -> str:
    """Put text on one line, safe inside a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _other_spellings() -> str:
    lines = ["## Other spellings\n"]
    lines += [f"- `{old}` is another name of `{new}`." for old, new in ALIASES.items()]
    lines.append("- Older flat engine keys are translated with one DeprecationWarning:\n")
    lines.append("| older key | key |\n|---|---|")
    lines += [f"| `{old}` | `{new}` |" for old, new in DEPRECATED.items()]
    return "\n".join(lines) + "\n"


def base_config() -> str:
    """Return every key at its default as YAML, paths from the home folder."""
    from omegaconf import OmegaConf

    sections = {name: default_of(SkyRLTrainConfig, name) for name in field_types(SkyRLTrainConfig)}
    values = OmegaConf.create({name: get_config_as_dict(section) for name, section in sections.items()})
    head = "# All keys at their defaults, for scripts decorated with hydra.main (docs/coming-from-skyrl.md).\n"
    return head + OmegaConf.to_yaml(values).replace(os.path.expanduser("~/"), "~/")


def main() -> int:
    """Write both into the repository."""
    root = Path(__file__).parents[2]
    (root / "CONFIG.md").write_text(document())
    (root / "launch" / "recipes" / "ppo_base_config.yaml").write_text(base_config())
    return 0


if __name__ == "__main__":
    sys.exit(main())
