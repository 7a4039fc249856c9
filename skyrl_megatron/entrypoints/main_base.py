"""Train: ``skyrl-megatron train [--config FILE.yaml] [--check] key=value …``

``--check`` reports whether the configuration can run, and starts nothing. :func:`main` starts a run only with a
configuration that has been parsed, resolved and validated. ``BasePPOExp`` and ``skyrl_entrypoint``, for scripts that
build their own run, are in :mod:`.experiment`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyrl_megatron.checks import QuickCheck, load_config, quick_check
from skyrl_megatron.command import run_command, with_strict_rows
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.parse import RECIPES
from skyrl_megatron.config.schema.run import own_keys
from skyrl_megatron.entrypoints import check
from skyrl_megatron.plugins import option_lines, requested_option
from skyrl_megatron.workers.runtime_env import start_server

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, skyrl_entrypoint

__all__ = ["BasePPOExp", "config_dir", "main", "skyrl_entrypoint"]

config_dir = str(RECIPES)
"""Folder of the recipes of the package, for ``--config``."""

HELP = """\
usage: skyrl-megatron train [--recipe NAME] [--config FILE.yaml] [--check] [key=value ...]

  key=value       set one key, e.g. trainer.policy.megatron_config.tensor_model_parallel_size=2
                  key={a: 1} replaces a whole dict option; key.a=1 sets one entry of it
  --recipe NAME   a recipe of the package, or a YAML file; without NAME: list them; model=PATH replaces its model
  --config FILE   read keys from a YAML file; may be repeated; later assignments win
  --check         report whether the configuration can run, all its problems, hours, disk, memory and layout; starts
                  neither Ray nor CUDA; exit code 0 if it can run, 2 if not
  --check=2x8     the same for 2 nodes of 8 GPUs instead of this machine
  --show-config   with --check: also print the memory of all phases and the resolved configuration
  --gpu h100      with --check: GPUs of this size (a100, h20, h100, h200, b200, b300, gb200, or a size such as 80GB)
  --host-memory 2TB
                  with --check: memory of a node
  --strict-rows   data.strict_rows=true: refuse prompts whose messages have a key that nothing reads
  --help          print this text"""


def main(
    argv: Sequence[str] | None = None,
    *,
    experiment: type[BasePPOExp] | None = None,
    config: type[SkyRLTrainConfig] = SkyRLTrainConfig,
) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems.

    ``argv``: default: the arguments of the command line. ``experiment`` and ``config``: custom classes that replace
    :class:`BasePPOExp` and :class:`SkyRLTrainConfig`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print("\n".join([HELP, *_further_help(config)]))
        return 0
    args = with_strict_rows(args, "data")
    if any(arg.partition("=")[0] == "--check" for arg in args):
        return check.run(args, cls=config, scripted=_brings_data(experiment))
    return run_command(lambda: _run(args, experiment, config), beats=True)


def check_only(argv: Sequence[str]) -> int:
    """Check a configuration like ``--check``. Returns the exit code."""
    return main(argv if any(arg.partition("=")[0] == "--check" for arg in argv) else ["--check", *argv])


def _run(args: Sequence[str], experiment: type[BasePPOExp] | None, config: type[SkyRLTrainConfig]) -> int:
    if (option := requested_option(args)) is not None:
        return option(args, config)
    return _train(args, experiment, config)


def _train(args: Sequence[str], experiment: type[BasePPOExp] | None, config: type[SkyRLTrainConfig]) -> int:
    began = time.perf_counter()
    ahead = quick_check(config, args) if experiment is None else QuickCheck.RUN
    if ahead is QuickCheck.FINISHED:
        return 0
    if ahead is QuickCheck.RUN:
        start_server()
    cfg, _ = load_config(config, args, scripted=_brings_data(experiment))
    from skyrl_megatron.entrypoints import experiment as experiments  # loads Ray, not needed to report a wrong key

    experiments.run_experiment(cfg, experiment or experiments.BasePPOExp, began=began)
    return 0


def _further_help(config: type[SkyRLTrainConfig]) -> list[str]:
    """Return the options that plugins registered, and the keys that a script added to its configuration."""
    lines = [*option_lines(), "", "All keys with their meaning: CONFIG.md"]
    if config is SkyRLTrainConfig:
        return lines
    return [*lines, "Keys of this script:", *own_keys(config)]


def _brings_data(experiment: type[BasePPOExp] | None) -> bool:
    """Return whether an experiment overrides how prompts are read from ``data.train_data`` and ``data.val_data``."""
    if experiment is None:
        return False
    from skyrl_megatron.entrypoints.experiment import BasePPOExp

    return any(
        getattr(experiment, name) is not getattr(BasePPOExp, name) for name in ("get_train_dataset", "_dataset")
    )


def __getattr__(name: str) -> Any:
    if name in ("BasePPOExp", "skyrl_entrypoint"):
        from skyrl_megatron.entrypoints import experiment

        return getattr(experiment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())
