"""Repeat a training step of a run from its dumped batch: ``skyrl-megatron replay-batch RUN --step N [key=value …]``

RUN is the folder of a run (log_path/project_name/run_name) with ``trainer.dump_data_batch=true``. The command starts
the run's ranks without engines and loads the last checkpoint before step N (without one, the initial model). It then
trains the dumped batches up to step M (default N). With the run's own settings, all metrics must be bitwise equal. If
the run saved step M, so must weights, moments and random states. The exit code is 1 if something differs.
``key=value`` changes a setting, such as the loss, the estimator or the layout. The command then prints the metrics of
both runs. It writes to the folder RUN-step-N next to RUN; ``skyrl-megatron dashboard RUN RUN-step-N`` compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.command import run_command
from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.errors import ConfigError, Problem, SkyRLMegatronWarning

if TYPE_CHECKING:
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron_tools.replay_trainer import ReplayPlan


QUIET = ("resume_mode=none", "logger=console", "dump_data_batch=false", "prometheus_port=null")
"""Settings of the trainer that the replay overrides. They do not change what it computes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code: 0 if equal or with changed settings, 1 if not equal, 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="replay-batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="training step to repeat, from 1")
    parser.add_argument("--until", type=int, metavar="M", help="last step to repeat (default N)")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="settings to change")
    args = parser.parse_intermixed_args(argv)
    return run_command(lambda: _replay(args.run, args.step, args.until or args.step, args.keys))


def _replay(run: Path, first: int, last: int, keys: Sequence[str]) -> int:
    cfg = _config(run, first, keys)
    from skyrl_megatron.entrypoints.experiment import run_experiment
    from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics
    from skyrl_megatron_tools.replay_trainer import STATES, compared_numbers, plan_replay

    plan = plan_replay(cfg, first, last, same=not keys)
    (run_folder(cfg) / STATES).unlink(missing_ok=True)
    run_experiment(cfg, _experiment(plan))
    recorded, replayed = (read_metrics(folder / METRICS_FILE) for folder in (run, run_folder(cfg)))
    numbers = compared_numbers(recorded, replayed)
    print(f"\nsteps {plan.begins + 1} to {last} of {run}, from {plan.folder or 'the model'}", end="")
    print(f", with {' '.join(keys)}" if keys else "")
    print("\n".join(_table(numbers if keys else [row for row in numbers if row[2] != row[3]])))
    differ = sum(before != now for _, _, before, now in numbers)
    print(f"{len(numbers) - differ} of {len(numbers)} numbers are bitwise equal")
    if keys:
        return 0
    others = _states_differ(run_folder(cfg) / STATES, plan)
    return int(differ > 0 or not numbers or others)


def _config(run: Path, step: int, keys: Sequence[str]) -> SkyRLTrainConfig:
    """Return the run's configuration with ``keys`` changed, for a replay without engines. Raises ConfigError."""
    from skyrl_megatron.checks import load_config
    from skyrl_megatron.config import SkyRLTrainConfig

    path = run / "config.yaml"
    if not path.is_file():
        fix = "has no config.yaml: give the folder of a run, log_path/project_name/run_name"
        raise ConfigError([Problem("RUN", run, fix)])
    run_folder = run.resolve()
    names = [f"log_path={run_folder.parent.parent}", f"project_name={run_folder.parent.name}"]
    names.append(f"run_name={run_folder.name}-step-{step}")
    overrides = [f"trainer.{name}" for name in (*names, *QUIET)]
    overrides.append("generator.unaccounted_sampling=warn")  # the rows are sampled already
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkyRLMegatronWarning)  # printed when the run started
        cfg, _ = load_config(SkyRLTrainConfig, ["--config", str(path), *keys, *overrides], scripted=True)
    cfg.trainer.opentelemetry_endpoint = None
    engine = cfg.generator.inference_engine
    engine.run_engines_locally = engine.enable_registry = engine.enable_http_endpoint = False
    return cfg


def _experiment(plan: ReplayPlan) -> type[BasePPOExp]:
    """Return an experiment without engines, environments and evaluation."""
    from skyrl_megatron.entrypoints.experiment import BasePPOExp

    class ReplayExp(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
            from skyrl_megatron_tools.replay_trainer import BatchReplay

            return BatchReplay(*args, plan=plan, **kwargs)

        def get_inference_client(self) -> Any:
            return None

        def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> Any:
            return None

        def get_eval_dataset(self) -> None:
            return None

    return ReplayExp


def _table(numbers: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the lines of the printed table."""
    lines = [f"{'step':>6}  {'metric':<52}{'recorded':>16}{'replayed':>16}{'difference':>12}"] if numbers else []
    for step, name, before, now in numbers:
        change = "" if before is None or now is None else f"{now - before:.3g}"
        shown = ["none" if value is None else f"{value:.8g}" for value in (before, now)]
        lines.append(f"{step:>6}  {name:<52}{shown[0]:>16}{shown[1]:>16}{change:>12}")
    return lines


def _states_differ(path: Path, plan: ReplayPlan) -> bool:
    """Print how the trained state compares with the run's checkpoint, and return whether it differs."""
    if plan.expected is None:
        print(f"the run has no checkpoint of step {plan.last} to compare the weights with")
        return False
    comparison = json.loads(path.read_text())
    if comparison["differ"]:
        shown = ", ".join(comparison["differ"][:3])
        print(f"{len(comparison['differ'])} tensors differ from {plan.expected}, such as {shown}")
        return True
    print(f"weights, moments and random states ({comparison['compared']}) are bitwise equal to {plan.expected}")
    return False


if __name__ == "__main__":
    sys.exit(main())
