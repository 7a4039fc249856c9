"""Evaluate only: ``skyrl-megatron evaluate [--config FILE.yaml] [--check [--show-config]] key=value …``

Scores the model of ``trainer.policy.model.path`` on ``data.val_data`` with ``generator.eval_sampling_params``, and on
the sets of ``data.eval_sets``. The model is a Hugging Face folder or name, or a checkpoint ``global_step_N`` of a run.
Checkpoints and exports of step N are sampled with the seeds of step N, so the scores are those of the run. Starts
engines and environments, but no trainer. ``--check`` reports whether the configuration can run, and starts nothing (it
converts a checkpoint for that); ``--show-config`` adds the resolved configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyrl_megatron.checks import load_config
from skyrl_megatron.command import run_command
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.resolve import private_folder, run_folder
from skyrl_megatron.entrypoints import check
from skyrl_megatron.errors import ConfigError, Problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    if any(arg.partition("=")[0] == "--check" for arg in args):
        return run_command(lambda: _check(args))
    return run_command(lambda: _evaluate(args), beats=True)


def _check(args: Sequence[str]) -> int:
    with _hugging_face_folder(args) as (args, _):
        return check.run(args, training=False)


def _evaluate(args: Sequence[str]) -> int:
    began = time.perf_counter()
    with _hugging_face_folder(args) as (args, step):
        score_model(args, step, began)
    return 0


MODEL = "trainer.policy.model.path"
_STEP = re.compile(r"global_step_(\d+)")


@contextlib.contextmanager
def _hugging_face_folder(args: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """Yield arguments whose model is a Hugging Face folder, and the step of the model, 0 if its path names none.

    A checkpoint is converted to a temporary folder in ``trainer.export_path``. Raises ConfigError if it cannot be.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # load_config issues them
        trainer = parse(SkyRLTrainConfig, args)[0].trainer
    path = Path(trainer.policy.model.path or "")
    named = [int(match[1]) for part in path.parts[-2:] if (match := _STEP.fullmatch(part))]
    step = named[-1] if named else 0
    if not path.is_dir():
        yield args, step
        return
    from bridges.convert import export_megatron  # loads torch
    from bridges.errors import BridgeError
    from bridges.source import MANIFEST

    if not any((folder / MANIFEST).is_file() for folder in (path, path.parent)):
        yield args, step
        return
    private_folder(Path(trainer.export_path))
    with tempfile.TemporaryDirectory(prefix=f".global_step_{step}-", dir=trainer.export_path) as folder:
        try:
            export_megatron(path, Path(folder) / "policy")
        except BridgeError as error:
            raise ConfigError([Problem(MODEL, str(path), str(error))]) from error
        others = [arg for arg in args if not arg.startswith((f"{MODEL}=", "model="))]
        yield [*others, f"{MODEL}={folder}/policy"], step


def score_model(args: Sequence[str], step: int = 0, began: float | None = None) -> Path:
    """Evaluate the Hugging Face model of ``args`` as step ``step``, and log and print the scores. Returns the folder
    of the rows."""
    cfg, _ = load_config(SkyRLTrainConfig, args, training=False)
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment
    from skyrl_megatron.identity import evaluation_identity
    from skyrl_megatron.trainer.evaluate import evaluate, rows_folder
    from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

    identity = evaluation_identity(cfg)
    folder = rows_folder(cfg, step, identity)

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
                        return await evaluate(
                            self.cfg,
                            self.eval_dataset,
                            generator,
                            self.tokenizer,
                            step,
                            self.eval_sets,
                            identity=identity,
                        )
                    finally:
                        await generator.stop()

                metrics = asyncio.run(ask())
                logged = [line["step"] for line in read_metrics(run_folder(self.cfg) / METRICS_FILE)]
                tracker.open(total_steps=0, resumed_from=max(logged, default=None))  # keeps the lines of the run
                tracker.log(metrics, step)
                for name, value in sorted(metrics.items()):
                    tracker.say(f"{name} {value:.4f}")
                if self.cfg.trainer.dump_eval_results:
                    tracker.say(f"rows: {folder}")
            finally:
                tracker.finish()
                self.stop()

    run_experiment(cfg, EvalOnlyEntrypoint, began=began)
    return folder


if __name__ == "__main__":
    sys.exit(main())
