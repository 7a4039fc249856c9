"""All commands by one name: ``skyrl-megatron VERB [ARGUMENTS]``; ``skyrl-megatron VERB --help`` says more of each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

VERBS = {
    "run": ("entrypoints.main_base", "train; key=value"),
    "run-async": ("entrypoints.fully_async", "train with rollouts that run ahead; key=value"),
    "evaluate": ("entrypoints.main_generate", "evaluate a model; key=value"),
    "check": ("entrypoints.check", "what a configuration comes to; starts nothing"),
    "simulate": ("trainer.simulate.__main__", "predict a run's step time and staleness"),
    "dashboard": ("entrypoints.dashboard", "look at runs, while they go and afterwards"),
    "compare": ("entrypoints.compare", "hold a run against another; exit code 1 when it is worse"),
    "diagnose": ("entrypoints.diagnose", "what every process of a run that hangs waits for"),
    "convert": ("entrypoints.convert", "a run's checkpoint as a Hugging Face folder, and the commands of bridges"),
    "replay-batch": ("entrypoints.replay_batch", "train a dumped step again, bit for bit or with other settings"),
    "explain-gap": ("entrypoints.gap.command", "why trainer and engine disagree"),
    "serve-engine": ("entrypoints.serve_engine", "an engine on another host"),
}
"""Verb → module with a ``main(arguments)``, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        print("\n".join(f"  {name:<14}{text}" for name, (_, text) in VERBS.items()))
        return 0 if given else 2
    verb, *arguments = given
    if verb not in VERBS:
        print(f"VERB={verb}: no such verb; there are {', '.join(VERBS)}", file=sys.stderr)
        return 2
    work: Callable[[Sequence[str]], int] = importlib.import_module(f"skyrl_megatron.{VERBS[verb][0]}").main
    return work(arguments)


if __name__ == "__main__":
    sys.exit(main())
