"""The embedded default: ``python -m skyrl_megatron.entrypoints.embedded [--check] [key=value …]``

A small seeded Qwen3-MoE learns two-digit sums with GRPO on two CPU cores, with everything that a large run has: two
Megatron ranks, two vLLM engines that take turns with them, weight sync, checkpoints, evaluation on held-out operand
pairs, an export. On a machine with GPUs, or a cluster (``RAY_ADDRESS``), ranks and engines share one or two of them,
or as many as ``trainer.placement.policy_num_gpus_per_node`` says; on CPU a rank and an engine share a core. Keys are
those of every run, on top of ``launch/recipes/embedded.yaml``; files are kept in ``$SKYRL_MEGATRON_HOME`` (default
``~/.cache/skyrl_megatron``), so that the same command again continues where the last one ended. With a model of your
own (``trainer.policy.model.path=…``) it is the same run of that model, in other folders and without the warm-up.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config import SkyRLTrainConfig, TrainerConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.parse.load import parse
from skyrl_megatron.config.parse.sources import Assignment, names_key, read_arguments
from skyrl_megatron.entrypoints import check
from skyrl_megatron.entrypoints.checks import load_config
from skyrl_megatron.entrypoints.command import require_memory, run_command
from skyrl_megatron.entrypoints.finished import Ahead, look_ahead
from skyrl_megatron.entrypoints.main_base import config_dir
from skyrl_megatron.entrypoints.run_hardware import run_hardware
from skyrl_megatron.workers.forked import start_server

if TYPE_CHECKING:
    from skyrl_megatron.data.prompts import PromptDataset
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.trainer import RayPPOTrainer

NEEDED_GIB = 5.0
WARM_MODEL = "warmed_up_model"
"""Folder, beside the seeded model, of what the warm-up made of it: where runs with adapters, a critic or a teacher
begin."""
ADAPTERS, CRITIC, TEACHER, ASYNC = "adapters", "critic", "teacher", "async"
WARMING_UP = {"": "WarmedUpTrainer", ASYNC: "WarmedUpAsyncTrainer"}
"""Trainers, of ``trainer/warmup.py``, of the variants that warm up themselves, with the optimizer that goes on."""
TAUGHT_AFTER = 64
"""Step of the embedded run whose export teaches."""
GPUS = "trainer.placement.policy_num_gpus_per_node"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (0 done, 1 failed, 2 the configuration is wrong)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    if checks := [arg for arg in args if arg.partition("=")[0] == "--check"]:
        rest = [arg for arg in args if arg not in checks]
        return run_command(lambda: check.run([*checks, *arguments(rest, check.asked_hardware(args))]), beats=True)
    return run_command(lambda: _train(args), beats=True)


def arguments(args: Sequence[str], hardware: Hardware) -> list[str]:
    """Return the recipe, model and data for the seed that ``args`` ask for, and ``args`` themselves, which win.

    A model that ``args`` name takes the place of the seeded one, and gets folders of its own. On GPUs ranks and
    engines share them: one, or two with the experts split over them; or as many as ``args`` say.
    """
    from skyrl_megatron.entrypoints.embedded_model import write_embedded_model

    given = read_arguments(args)[0]
    number, folder = _seed_folder(given)
    data = write_problems(folder / "sums", number)
    model, variant = _own_model(args), _variant(args)
    runs = folder / f"{Path(model).name}_{zlib.crc32(model.encode()):08x}" if model else folder
    taught = runs / "exports" / f"global_step_{TAUGHT_AFTER}" / "policy"
    runs = runs / variant
    defaults = {
        "data.train_data": f"['{data}/train.parquet']",
        "data.val_data": f"['{data}/validation.parquet']",
        "trainer.seed": number,
        "trainer.ckpt_path": f"{runs}/ckpts",
        "trainer.export_path": f"{runs}/exports",
        "trainer.log_path": f"{runs}/logs",
    }
    if not hardware.is_cpu:
        defaults |= _devices(given, hardware, apart=variant == ASYNC)
    path = model
    if not model:
        warm = folder / WARM_MODEL
        seeded = write_embedded_model(folder / "model", number)
        path = str(seeded if variant in WARMING_UP or not warm.exists() else warm)
        defaults["trainer.policy.model.path"] = path
    if variant == CRITIC:
        defaults["trainer.critic.model.path"] = path
    if variant == TEACHER and not names_key(given, "trainer.teacher.models"):
        defaults["trainer.teacher.model.path"] = taught
    added = [f"{key}={value}" for key, value in defaults.items() if not names_key(given, key)]
    files = ["embedded", *{ADAPTERS: ["embedded-lora"], ASYNC: ["embedded-async"]}.get(variant, [])]
    return [*(f"--config={config_dir}/{name}.yaml" for name in files), *added, *args]


def _seed_folder(given: Sequence[Assignment]) -> tuple[int, Path]:
    """Return the seed that is asked for, and the folder of its model, data and runs."""
    seed = next((item.text or "" for item in reversed(given) if item.key == "trainer.seed"), "42")
    number = int(seed) if seed.isdigit() else 42  # anything else is an error that the configuration names
    home = Path(os.environ.get("SKYRL_MEGATRON_HOME", "~/.cache/skyrl_megatron")).expanduser().absolute()
    return number, home / "embedded" / f"seed_{number}"


def _devices(given: Sequence[Assignment], hardware: Hardware, *, apart: bool) -> dict[str, object]:
    """Return how many GPUs the run takes, and who uses them. ``apart``: the engine samples beside the ranks, on a GPU
    of its own."""
    asked = next((item.text or "" for item in reversed(given) if item.key == GPUS), "")
    ranks = int(asked) if asked.isdigit() and int(asked) else max(min(2, hardware.gpus_per_node - apart), 1)
    return {
        GPUS: ranks,
        "trainer.policy.megatron_config.expert_model_parallel_size": 1 if ranks % 2 else 2,
        "trainer.placement.colocate_all": not apart,
        "generator.inference_engine.num_engines": 1 if apart else ranks,
    }


def _own_model(args: Sequence[str]) -> str | None:
    """Return the path or name of the model that ``args`` ask for; None is the seeded one."""
    asked = names_key(read_arguments(args)[0], "trainer.policy.model.path")
    return _asked(args).policy.model.path if asked else None


def _variant(args: Sequence[str]) -> str:
    """Return what ``args`` add to the embedded run, which is also the name of its folder; "": nothing."""
    trainer = _asked(args)
    if trainer.policy.model.lora.rank > 0:
        return ADAPTERS
    taught = trainer.algorithm.distillation.loss_coef or trainer.algorithm.distillation.reward_coef
    if trainer.algorithm.advantage_estimator == "gae":
        return CRITIC
    return TEACHER if taught else ASYNC if trainer.fully_async.enabled else ""


def _asked(args: Sequence[str]) -> TrainerConfig:
    """Return the trainer's settings as ``args`` alone describe them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are given when the configuration is read
        return parse(SkyRLTrainConfig, args)[0].trainer


def write_problems(folder: Path, seed: int) -> Path:
    """Write every two-digit sum of two two-digit numbers, in both orders: 3,240 problems.

    A random fifth of the pairs of operands is held out in both orders.
    """
    from skyrl_megatron.data import prepare

    pairs = [(a, b) for a in range(10, 50) for b in range(a, 100 - a)]
    random.Random(seed).shuffle(pairs)
    held_out = len(pairs) // 5
    if not (folder / "validation.parquet").exists():
        for split, some in (("train", pairs[held_out:]), ("validation", pairs[:held_out])):
            both_orders = [problem for a, b in some for problem in sorted({(a, b), (b, a)})]
            prepare.write(prepare.addition_rows(split, both_orders), folder / f"{split}.parquet")
    return folder


def _train(args: Sequence[str]) -> int:
    began = time.perf_counter()
    hardware = run_hardware()
    ahead = look_ahead(SkyRLTrainConfig, arguments(args, hardware), hardware)
    if ahead is Ahead.FINISHED:
        return 0
    if ahead is Ahead.RUN:
        start_server()
    trainer = WARMING_UP.get(_variant(args)) if _own_model(args) is None else None
    if trainer is None:
        _warm_up_once(args, hardware)
        began = time.perf_counter()
    cfg, _ = load_config(SkyRLTrainConfig, arguments(args, hardware), hardware)
    require_memory(NEEDED_GIB, "the embedded default")
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment

    run_experiment(cfg, _warmed_up(trainer) if trainer else BasePPOExp, began=began)
    return 0


def _warm_up_once(args: Sequence[str], hardware: Hardware) -> None:
    """Make the model that the run begins with, unless it is there or ``args`` name another."""
    number, folder = _seed_folder(read_arguments(args)[0])
    if _own_model(args) is not None or (folder / WARM_MODEL).exists():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(SkyRLTrainConfig, arguments(args, hardware), hardware)  # mistakes are told before any work
    require_memory(NEEDED_GIB, "the embedded default")
    from skyrl_megatron.entrypoints.experiment import run_experiment

    work = folder / "warm_up"
    places = {"ckpt": work / "ckpts", "export": work / "exports", "log": work / "logs"}
    keys = [f"trainer.seed={number}", "trainer.run_name=warm-up"]
    keys += [f"trainer.{name}_path={path}" for name, path in places.items()]
    cfg, _ = load_config(SkyRLTrainConfig, arguments(keys, hardware), hardware)
    run_experiment(cfg, _warmed_up("WarmUpAlone"))
    (work / "exports" / "global_step_0" / "policy").rename(folder / WARM_MODEL)


def _warmed_up(trainer: str) -> type[BasePPOExp]:
    """Return the usual experiment with a trainer of ``trainer/warmup.py``."""
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.trainer import warmup

    class EmbeddedExp(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
            made: RayPPOTrainer = getattr(warmup, trainer)(*args, **kwargs)
            return made

        def get_eval_dataset(self) -> PromptDataset | None:
            """Read what the warm-up is measured on, whether or not the run evaluates."""
            return self._dataset("data.val_data", self.cfg.data.val_data) if self.cfg.data.val_data else None

    return EmbeddedExp


if __name__ == "__main__":
    sys.exit(main())
