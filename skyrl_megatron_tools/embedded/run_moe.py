"""The program of ``launch/run_moe.sh``: ``[--recipe NAME|FILE.yaml] [--check[=NxM]] [model=PATH] [key=value …]``

Without ``--recipe``, ``--config`` and ``model=`` it starts the embedded run. A recipe is the name of a file in
``launch/recipes``, or the path of a YAML file; one with the section ``sft`` is a run of ``skyrl-megatron sft``.
``model=`` is short for ``trainer.policy.model.path=``. ``--check`` reports whether the configuration can run, and
starts nothing; ``--show-config`` adds the resolved configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from skyrl_megatron.command import run_command
from skyrl_megatron.config.parse import names_key, read_arguments, read_yaml
from skyrl_megatron.entrypoints import main_base, recipes
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
    name, rest = recipes.split(args)
    if name is not None:
        return name if name in EMBEDDED_RUNS else recipes.file_of(name), rest
    configured = any(arg == "--config" or arg.startswith("--config=") for arg in rest)
    configured = configured or names_key(read_arguments(rest)[0], "trainer.policy.model.path")
    return None if configured else EMBEDDED, rest


if __name__ == "__main__":
    sys.exit(main())
