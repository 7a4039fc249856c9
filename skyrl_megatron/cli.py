"""The command ``skyrl-megatron VERB [ARGUMENTS]``. ``skyrl-megatron VERB --help`` shows the options of a verb.

Verbs that train, check or evaluate take ``--recipe NAME``, which without NAME lists the recipes of the verb, or
``--recipe FILE.yaml``; and ``model=PATH``, short for ``trainer.policy.model.path=PATH``. ``train`` and ``check``
without model, recipe and file are of the embedded run: a tiny model and its data, which are made first.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl_megatron import __version__

VERBS = {
    "train": ("skyrl_megatron.entrypoints.main_base", "train a model; key=value"),
    "train-async": ("skyrl_megatron.entrypoints.fully_async", "train while rollouts run ahead of training; key=value"),
    "sft": ("skyrl_megatron_supervised.sft", "train a model on conversations; key=value"),
    "dpo": ("skyrl_megatron_supervised.dpo", "train a model on preferences; key=value"),
    "reward": ("skyrl_megatron_supervised.reward", "train a reward model; key=value"),
    "evaluate": ("skyrl_megatron.entrypoints.main_generate", "evaluate a model; key=value"),
    "check": ("skyrl_megatron.entrypoints.main_base:check_only", "check a configuration; starts nothing"),
    "doctor": ("skyrl_megatron_tools.doctor.__main__", "check this machine, each finding with its fix"),
    "prepare": ("skyrl_megatron.data.prepare", "write a data set of prompts: addition, aime, gsm8k, …"),
    "examples": ("skyrl_megatron_tools.write_examples", "write the examples and their data makers into a folder"),
    "convert": ("skyrl_megatron.cli:convert", "convert a checkpoint to a Hugging Face folder"),
    "report": ("skyrl_megatron_observe.run_report", "write report.html of a run"),
    "dashboard": ("skyrl_megatron_observe.dashboard", "serve the dashboards of runs"),
    "compare": ("skyrl_megatron_observe.compare_runs", "compare a run with a baseline; exit code 1 if it is worse"),
    "diagnose": ("skyrl_megatron_observe.diagnose", "show what each process of a hanging run waits for"),
    "explain-mismatch": (
        "skyrl_megatron_tools.logprob_mismatch.explain_mismatch",
        "why trainer and engine log-probs differ",
    ),
    "replay-batch": ("skyrl_megatron_tools.replay_batch", "repeat a training step from its dump"),
    "serve-engine": ("skyrl_megatron_tools.remote.serve_engine", "serve an engine on another host"),
    "weight-versions": ("skyrl_megatron_tools.weight_versions", "publish versions of weights in a folder or store"),
    "one-step": ("skyrl_megatron_tools.one_step", "run one training step end to end"),
    "cluster": ("skyrl_megatron_tools.cluster.__main__", "start, show or stop a Ray cluster"),
}
"""Verb → (module with a ``main(arguments)``, or ``module:function``; help text). A verb whose package is not here,
because only the core is, is neither shown nor run."""
ALIASES = {
    "run": "train",
    "run-async": "train-async",
    "eval": "evaluate",
    "explain-gap": "explain-mismatch",
}
"""Other names of verbs, including earlier ones."""
REPLACED = {"simulate": "check --gpu TYPE: its step on paper has the staleness of an asynchronous run"}
"""Removed verb → what replaces it."""
BRIDGES_COMMANDS = ("list", "inspect", "import", "export", "merge", "verify")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return its exit code."""
    command_line = list(sys.argv[1:] if argv is None else argv)
    if not command_line or command_line[0] in ("-h", "--help"):
        print(__doc__)
        print("\n".join(f"  {name:<18}{VERBS[name][1]}" for name in verbs()))
        return 0 if command_line else 2
    if command_line == ["--version"]:
        print(f"skyrl-megatron {__version__}")
        return 0
    verb, *arguments = command_line
    verb = ALIASES.get(verb, verb)
    if verb in REPLACED:
        print(f"VERB={verb}: removed; use skyrl-megatron {REPLACED[verb]}", file=sys.stderr)
        return 2
    if verb not in verbs():
        package = VERBS[verb][0].partition(".")[0] if verb in VERBS else ""
        reason = f"its package {package} is not installed; install it, or" if package else "unknown verb;"
        print(f"VERB={verb}: {reason} choose one of {', '.join(verbs())}", file=sys.stderr)
        return 2
    path = VERBS[verb][0]
    if verb in ("train", "train-async", "check") and not {"-h", "--help"} & set(arguments):
        path, arguments = _of_the_recipe(verb, arguments)
    module, _, function = path.partition(":")
    work: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function or "main")
    return work(arguments)


EMBEDDED = "skyrl_megatron_tools.embedded.embedded"
NOT_EMBEDDED = ("trainer.policy.model.path", "data.train_data")
"""Keys that say what to train: without a recipe or file, each makes a run another than the embedded one."""


def _of_the_recipe(verb: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the module of ``train``, ``train-async`` or ``check`` and its arguments: of a recipe of supervised
    training the check of its verb; of an embedded recipe, or where nothing says what to train, the embedded run."""
    from skyrl_megatron.config import parse  # loads the configuration, which other verbs do without

    added = ["trainer.fully_async.enabled=true"] if verb == "train-async" else []
    if verb == "check" and not any(arg.partition("=")[0] == "--check" for arg in arguments):
        added = ["--check"]
    names, rest = parse.split_recipe(arguments)
    owner = parse.verb_of_recipe(names[0]) if len(names) == 1 else None
    if verb == "check" and owner in parse.SUPERVISED:
        return VERBS[owner][0], [*arguments, *added]
    embedded = owner == parse.TRAIN and names[0].startswith("embedded")
    if not names and not any(arg.partition("=")[0] == "--config" for arg in rest):
        assignments = parse.read_arguments([arg for arg in rest if not arg.startswith("--")])[0]
        embedded = not any(parse.names_key(assignments, key) for key in NOT_EMBEDDED)
    if embedded and importlib.util.find_spec(EMBEDDED.partition(".")[0]) is not None:
        return EMBEDDED, [*arguments, *added]
    return VERBS[verb][0], arguments


def verbs() -> list[str]:
    """Return the verbs whose package is installed. Imports none of them."""
    packages = {name: path.partition(".")[0] for name, (path, _) in VERBS.items()}
    here = {package for package in set(packages.values()) if importlib.util.find_spec(package) is not None}
    return [name for name, package in packages.items() if package in here]


def convert(args: Sequence[str]) -> int:
    """``skyrl-megatron convert CHECKPOINT OUT``: convert a checkpoint to a Hugging Face folder.

    CHECKPOINT is the folder that a run prints at its end (``checkpoint: …/global_step_N``), or any Megatron checkpoint
    folder. OUT must not exist. ``python -m bridges export --help`` lists further arguments. If the first argument is a
    command of ``python -m bridges`` (list, inspect, import, export, merge, verify), that command runs.
    """
    if not args or args[0] in ("-h", "--help"):
        print(inspect.getdoc(convert))
        return 0 if args else 2
    runs_bridges = args[0] in BRIDGES_COMMANDS or args[0].startswith("-")
    if not runs_bridges and (problem := _conversion_problem(args)):
        print(f"convert {args[0]}: {problem}", file=sys.stderr)
        return 2
    from bridges import __main__ as bridges  # loads torch, which takes seconds

    if runs_bridges:
        return bridges.main(args)
    return bridges.main(["export", "--megatron", args[0], "--out", *args[1:]])


def _conversion_problem(args: Sequence[str]) -> str | None:
    """Return what is wrong with the folders of ``convert CHECKPOINT OUT``, without loading anything."""
    if len(args) < 2 or args[1].startswith("-"):
        return "add the folder to write as the second argument"
    checkpoint, out = Path(args[0]), Path(args[1])
    if not checkpoint.is_dir():
        return "no such folder: give a folder global_step_N of a run, or a Megatron checkpoint"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return f"{out} exists: remove it, or name another folder as the second argument"
    return None


if __name__ == "__main__":
    sys.exit(main())
