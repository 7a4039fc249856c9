"""Recipes by name: what commands take next to keys, ``--recipe NAME`` and ``model=PATH``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.entrypoints.main_base import config_dir
from skyrl_megatron.errors import ConfigError, Problem

VERBS = ("train", "train-async", "sft", "dpo", "reward", "evaluate", "check")
"""Verbs of ``skyrl-megatron`` that take recipes."""


def with_recipe(args: Sequence[str]) -> list[str]:
    """Return the arguments with ``--recipe NAME`` as ``--config FILE``, and ``model=`` as the key that it stands for.

    The recipe comes first, so that keys and further files win over it. Raises ConfigError for an unknown recipe, and
    for one of the embedded run, which makes its model and data before it starts.
    """
    name, rest = split(args)
    if name is None:
        return rest
    if name == "embedded" or name.startswith("embedded-"):
        fix = f"this run makes its model and data first: start it with launch/run_moe.sh --recipe {name}"
        raise ConfigError([Problem("--recipe", name, fix)])
    return ["--config", file_of(name), *rest]


def split(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe as it is named (None: none is) and the other arguments, ``model=`` as a key.

    Raises ConfigError for more than one recipe.
    """
    names: list[str] = []
    rest: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--recipe" or arg.startswith("--recipe="):
            names.append(arg.partition("=")[2] if "=" in arg else next(remaining, ""))
        else:
            rest.append(f"trainer.policy.model.path={arg.removeprefix('model=')}" if arg.startswith("model=") else arg)
    if len(names) > 1:
        fix = "give one recipe; add more keys with --config FILE.yaml"
        raise ConfigError([Problem("--recipe", ", ".join(names), fix)])
    return (names[0] if names else None), rest


def file_of(name: str) -> str:
    """Return the file of a recipe: one of ``launch/recipes``, or a path. Raises ConfigError for an unknown name."""
    if os.sep in name or name.endswith((".yaml", ".yml")):
        return name
    recipes = sorted(path.stem for path in Path(config_dir).glob("*.yaml"))
    if name in recipes:
        return f"{config_dir}/{name}.yaml"
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    fix = f"no such recipe{hint} Use one of {', '.join(recipes)}, or the path of a YAML file"
    raise ConfigError([Problem("--recipe", name, fix)])
