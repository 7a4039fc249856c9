"""Evaluate only: ``skyrl-megatron evaluate [--config FILE.yaml] [--check [--show-config]] key=value …``

Scores the model of ``trainer.policy.model.path`` on ``data.val_data`` with ``generator.eval_sampling_params``. Starts
engines and environments, but no trainer. ``--check`` reports whether the configuration can run, and starts nothing;
``--show-config`` adds the resolved configuration.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.entrypoints.command import run_command
from skyrl_megatron.preflight import check, load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    if any(arg.partition("=")[0] == "--check" for arg in args):
        return check.run(args, training=False)
    return run_command(lambda: _evaluate(args), beats=True)


def _evaluate(args: Sequence[str]) -> int:
    began = time.perf_counter()
    cfg, _ = load_config(SkyRLTrainConfig, args, training=False)
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.trainer.evaluate import evaluate

    class EvalOnlyEntrypoint(BasePPOExp):
        """An experiment that evaluates once, with engines and a generator."""

        trains = False

        def get_train_dataset(self) -> None:
            return None

        def run(self) -> None:
            tracker = self.get_tracker()
            try:
                client = self.start_engines()
                generator = self.get_generator(self.cfg, self.tokenizer, client)

                async def ask() -> dict[str, float]:
                    await client.start()
                    self.start_up.done(f"engines: {len(client.pool.alive())} ready")
                    try:
                        return await evaluate(self.cfg, self.eval_dataset, generator, self.tokenizer, 0)
                    finally:
                        await generator.stop()

                metrics = asyncio.run(ask())
                tracker.open(total_steps=0)
                tracker.log(metrics, 0)
                for name, value in sorted(metrics.items()):
                    tracker.say(f"{name} {value:.4f}")
            finally:
                tracker.finish()
                self.stop()

    run_experiment(cfg, EvalOnlyEntrypoint, began=began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
