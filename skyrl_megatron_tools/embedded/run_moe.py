"""The program of ``launch/run_moe.sh``: ``[--recipe NAME|FILE.yaml] [--check[=NxM]] [model=PATH] [key=value …]``

Without ``--recipe``, ``--config`` and ``model=`` it starts the embedded run. A recipe is the name of a file in
``launch/recipes``, or the path of a YAML file; one with the section ``sft`` is a run of ``skyrl-megatron sft``.
``model=`` is short for ``trainer.policy.model.path=``. ``--check`` reports whether the configuration can run, and
starts nothing; ``--show-config`` adds the resolved configuration.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_megatron.command import run_command
from skyrl_megatron.config.parse import names_key, read_arguments, read_yaml
from skyrl_megatron.entrypoints import main_base
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron_supervised import sft
from skyrl_megatron_tools.embedded import embedded

EMBEDDED = "embedded"
EMBEDDED_RUNS: dict[str, list[str]] = {EMBEDDED: []} | {
    name: [f"--config={main_base.config_dir}/{name}.yaml"]
    for name in (
        "embedded-lora",
        "embedded-ppo",
        "embedded-distill",
        "embedded-async",
        "embedded-mlperf",
        "embedded-muon",
    )
}
"""Recipes of the embedded run → additional arguments of that run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    args = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        recipe, rest = _split(args)
        if recipe in EMBEDDED_RUNS:
            return embedded.main([*EMBEDDED_RUNS[recipe], *rest])
        if recipe is not None and _supervises(recipe):
            return sft.main(["--config", recipe, *rest])
        return main_base.main(rest if recipe is None else ["--config", recipe, *rest])

    return run_command(work)


def _supervises(recipe: str) -> bool:
    """Return whether a recipe has the section ``sft``. The command reports what is wrong with the file."""
    return any(item.key.partition(".")[0] == "sft" for item in read_yaml(recipe)[0])


def _split(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the recipe (a name of :data:`EMBEDDED_RUNS`, a file, or None) and the other arguments. Raises ConfigError
    for an unknown recipe."""
    asked: list[str] = []
    rest: list[str] = []
    given = iter(args)
    for arg in given:
        if arg == "--recipe" or arg.startswith("--recipe="):
            asked.append(arg.partition("=")[2] if "=" in arg else next(given, ""))
        else:
            rest.append(f"trainer.policy.model.path={arg.removeprefix('model=')}" if arg.startswith("model=") else arg)
    if len(asked) > 1:
        fix = "give one recipe; add more keys with --config FILE.yaml"
        raise ConfigError([Problem("--recipe", ", ".join(asked), fix)])
    if asked:
        return _recipe(asked[0]), rest
    own = any(arg == "--config" or arg.startswith("--config=") for arg in rest)
    return None if own or names_key(read_arguments(rest)[0], "trainer.policy.model.path") else EMBEDDED, rest


def _recipe(name: str) -> str:
    """Return the file of a recipe, or the name of an embedded run. Raises ConfigError for an unknown name."""
    if os.sep in name or name.endswith((".yaml", ".yml")):
        return name
    known = sorted(path.stem for path in Path(main_base.config_dir).glob("*.yaml"))
    if name in known:
        return name if name in EMBEDDED_RUNS else f"{main_base.config_dir}/{name}.yaml"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    fix = f"no such recipe{hint} Use one of {', '.join(known)}, or the path of a YAML file"
    raise ConfigError([Problem("--recipe", name, fix)])


if __name__ == "__main__":
    sys.exit(main())
