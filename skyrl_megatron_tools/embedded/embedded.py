"""The embedded run: ``skyrl-megatron train [--recipe embedded-NAME] [--check [--show-config]] [key=value …]``

A small Qwen3-MoE with a million parameters (grouped-query attention, q/k norm, 8 experts, top-2) learns two-digit sums
with GRPO on two CPU cores. The run has every part of a large run: two Megatron ranks, two vLLM engines that take turns
with them, weight sync, checkpoints, evaluation on held-out sums, an export. It creates the model itself, from
``trainer.seed``, as a Hugging Face folder with tokenizer and chat template.

On a machine with GPUs, or in a cluster (``RAY_ADDRESS``), ranks and engines share one or two GPUs, or as many as
``trainer.placement.policy_num_gpus_per_node`` says. On CPU a rank and an engine share a core.

``--check`` reports whether the run can start, and its layout, memory and batch sizes, and starts nothing;
``--show-config`` adds the resolved configuration. Keys are those of every run, on top of
the recipe ``embedded``. Files are stored in ``$SKYRL_MEGATRON_HOME`` (default ``~/.cache/skyrl_megatron``);
the same command continues a run that ended early. With ``trainer.policy.model.path=…`` that model is trained instead,
in other folders and without the warm-up.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.checks import QuickCheck, load_config, quick_check, run_hardware
from skyrl_megatron.command import require_memory, run_command, with_strict_rows
from skyrl_megatron.config import SkyRLTrainConfig, TrainerConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.load import parse
from skyrl_megatron.config.parse import Assignment, names_key, read_arguments, split_recipe
from skyrl_megatron.data.curriculum import curriculum, difficulty
from skyrl_megatron.entrypoints import check
from skyrl_megatron.entrypoints.main_base import config_dir
from skyrl_megatron.entrypoints.main_generate import score_model
from skyrl_megatron.plugins import requested_option
from skyrl_megatron.tiny_model import write_embedded_model
from skyrl_megatron.workers.runtime_env import start_server

if TYPE_CHECKING:
    from skyrl_megatron.data.prompts import PromptDataset
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron.trainer import RayPPOTrainer


NEEDED_GIB = 5.0
WARM_MODEL = "warmed_up_model"
"""Folder of the model after the warm-up, next to the folder of the initial model. Runs with adapters, a critic or a
teacher start from it."""
WARM_MODEL_OF_TURNS = "warmed_up_model_of_two_turns"
ADAPTERS, CRITIC, TEACHER, ASYNC, MLPERF, MUON = "adapters", "critic", "teacher", "async", "mlperf", "muon"
WARMUP_TRAINERS = {"": "WarmedUpTrainer", MUON: "WarmedUpTrainer", ASYNC: "WarmedUpAsyncTrainer"}
"""Variant → trainer of ``embedded/warmup.py`` that does the warm-up and continues with the same optimizer."""
TEACHER_STEP = 64
"""Step of the embedded run whose export is the teacher of the distillation variant."""
GPUS = "trainer.placement.policy_num_gpus_per_node"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 failed, 2 the configuration has problems."""
    names, args = split_recipe(list(sys.argv[1:] if argv is None else argv))
    if {"-h", "--help"} & set(args):
        print(__doc__)
        return 0
    args = [
        *(f"--config={config_dir}/{name}.yaml" for name in names if name != "embedded"),
        *with_strict_rows(args, "data"),
    ]
    if checks := [arg for arg in args if arg.partition("=")[0] == "--check"]:
        rest = [arg for arg in args if arg not in checks]
        return run_command(lambda: check.run([*checks, *arguments(rest, check.requested_hardware(args))]), beats=True)
    return run_command(lambda: _train(args), beats=True)


def arguments(args: Sequence[str], hardware: Hardware) -> list[str]:
    """Return arguments for recipe, model and data of the seed in ``args``, followed by ``args``, which override them.

    A model in ``args`` replaces the embedded one and has its own folders. On GPUs, ranks and engines share one GPU, or
    two with expert parallelism, or as many as ``args`` set.
    """
    assignments = read_arguments(args)[0]
    number, folder = _seed_folder(assignments)
    data = write_problems(folder / "sums", number)
    model, variant = _own_model(args), _variant(args)
    runs = folder / f"{Path(model).name}_{zlib.crc32(model.encode()):08x}" if model else folder
    taught = runs / "exports" / f"global_step_{TEACHER_STEP}" / "policy"
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
        defaults |= _devices(assignments, hardware, apart=variant in (ASYNC, MLPERF))
    if variant == MLPERF:
        defaults |= _benchmark(args, data, folder)
    path = model
    if not model:
        warm = folder / _warm_model(variant)
        seeded = write_embedded_model(folder / "model", number)
        path = str(seeded if variant in WARMUP_TRAINERS or not warm.exists() else warm)
        defaults["trainer.policy.model.path"] = path
    if variant == CRITIC:
        defaults["trainer.critic.model.path"] = path
    if variant == TEACHER and not names_key(assignments, "trainer.teacher.models"):
        defaults["trainer.teacher.model.path"] = taught
    added = [f"{key}={value}" for key, value in defaults.items() if not names_key(assignments, key)]
    variants = {ADAPTERS: ["embedded-lora"], ASYNC: ["embedded-async"], MUON: ["embedded-muon"]}
    files = ["embedded", *variants.get(variant, [])]
    return [*(f"--config={config_dir}/{name}.yaml" for name in files), *added, *args]


def _seed_folder(assignments: Sequence[Assignment]) -> tuple[int, Path]:
    """Return the seed in ``assignments``, and the folder of its model, data and runs."""
    seed = next((item.text or "" for item in reversed(assignments) if item.key == "trainer.seed"), "42")
    number = int(seed) if seed.isdigit() else 42  # the configuration reports any other text as a problem
    home = Path(os.environ.get("SKYRL_MEGATRON_HOME", "~/.cache/skyrl_megatron")).expanduser().absolute()
    return number, home / "embedded" / f"seed_{number}"


def _devices(assignments: Sequence[Assignment], hardware: Hardware, *, apart: bool) -> dict[str, object]:
    """Return the settings of GPUs and their use. ``apart``: the engine has a separate GPU and samples while ranks
    train."""
    gpus = next((item.text or "" for item in reversed(assignments) if item.key == GPUS), "")
    ranks = int(gpus) if gpus.isdigit() and int(gpus) else max(min(2, hardware.gpus_per_node - apart), 1)
    return {
        GPUS: ranks,
        "trainer.policy.megatron_config.expert_model_parallel_size": 1 if ranks % 2 else 2,
        "trainer.placement.colocate_all": not apart,
        "generator.inference_engine.num_engines": 1 if apart else ranks,
    }


def _own_model(args: Sequence[str]) -> str | None:
    """Return the path or name of the model in ``args``; None: the embedded model."""
    asked = names_key(read_arguments(args)[0], "trainer.policy.model.path")
    return _asked(args).policy.model.path if asked else None


def _variant(args: Sequence[str]) -> str:
    """Return the variant of the embedded run that ``args`` select, which is also the name of its folder; "": none."""
    if any(arg.endswith(f"{MLPERF}.yaml") for arg in args):
        return MLPERF
    trainer = _asked(args)
    if trainer.policy.model.lora.rank > 0:
        return ADAPTERS
    taught = trainer.algorithm.distillation.loss_coef or trainer.algorithm.distillation.reward_coef
    if trainer.algorithm.advantage_estimator == "gae":
        return CRITIC
    if taught:
        return TEACHER
    muon = trainer.policy.optimizer_config.optimizer == "muon"
    return ASYNC if trainer.fully_async.enabled else MUON if muon else ""


def _asked(args: Sequence[str]) -> TrainerConfig:
    """Return the trainer's settings of ``args`` alone, without the recipe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # load_config issues them later
        return parse(SkyRLTrainConfig, args)[0].trainer


def write_problems(folder: Path, seed: int) -> Path:
    """Write all sums of two two-digit numbers that have two digits, in both orders: 3,240 problems. Returns
    ``folder``.

    A random fifth of the operand pairs, in both orders, is the validation set.
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


HELD_OUT = 256
"""Held-out tasks of the variant that is a miniature of MLPerf Training 6.1, ``llm_post_training``."""


def _benchmark(args: Sequence[str], data: Path, folder: Path) -> dict[str, object]:
    """Return the settings of the miniature: held-out tasks sampled by its rules, the curriculum once it exists, and
    learning rate and gradient clip by the sequences of an optimizer step."""
    from skyrl_megatron.data import prepare

    held_out, order = data / "held_out.parquet", folder / MLPERF / "curriculum.txt"
    if not held_out.exists():
        operands = _operands(data / "validation.parquet")
        prepare.write(prepare.addition_rows("held_out", random.Random(0).sample(operands, HELD_OUT)), held_out)
    cfg = parse(SkyRLTrainConfig, [f"--config={config_dir}/embedded.yaml", *args])[0]
    sequences = cfg.trainer.policy_mini_batch_size * cfg.generator.n_samples_per_prompt
    sets = f"{{held_out: {{data: ['{held_out}'], n: 4, temperature: 0.1, top_p: 0.95, pass_at: [1, 4]}}}}"
    settings: dict[str, object] = {
        "data.val_data": "[]",
        "data.eval_sets": sets,
        "trainer.policy.optimizer_config.lr": f"{3e-4 * (sequences / 512) ** 0.5:.4g}",
        "trainer.policy.optimizer_config.max_grad_norm": f"{2 / sequences**0.5:.4g}",
    }
    return settings | ({"data.sampler": "list", "data.sampler_options.path": order} if order.exists() else {})


def _operands(path: Path) -> list[tuple[int, int]]:
    from skyrl_megatron.data.row_files import load_source

    rows = load_source(str(path))
    return [tuple(rows[number]["extra_info"]["operands"]) for number in range(len(rows))]


def _write_curriculum(args: Sequence[str], hardware: Hardware) -> None:
    """Measure the pass rate of the initial policy for each training task, and write the order of the tasks, unless it
    exists."""
    number, folder = _seed_folder(read_arguments(args)[0])
    work = folder / MLPERF
    order = work / "curriculum.txt"
    if order.exists():
        return
    train = folder / "sums" / "train.parquet"
    keys = [f"trainer.{name}_path={work}/pass_rates" for name in ("ckpt", "export", "log")]
    keys += ["trainer.stop_when=null", "trainer.best_metric=null", "trainer.dump_eval_results=true"]
    rows = score_model(
        arguments([*args, *keys, f"data.eval_sets={{train: {{data: ['{train}'], n: 4, temperature: 1.0}}}}"], hardware)
    )
    passed: dict[int, list[bool]] = {}
    for line in (rows / "train.jsonl").read_text().splitlines():
        answer = json.loads(line)
        if answer["error"] is None:
            passed.setdefault(int(answer["uid"]), []).append(answer["score"] > 0)
    sizes = [float(sum(map(int, f"{a}{b}"))) for a, b in _operands(train)]
    rates = [sum(answers) / len(answers) for answers in (passed.get(uid, [False]) for uid in range(len(sizes)))]
    uids = curriculum(difficulty(rates, sizes), 16, number)
    unfinished = order.with_suffix(".new")
    unfinished.write_text("".join(f"{uid}\n" for uid in uids))
    unfinished.rename(order)


def _train(args: Sequence[str]) -> int:
    began = time.perf_counter()
    hardware = run_hardware()
    if (option := requested_option(args)) is not None:
        return option(arguments(args, hardware), SkyRLTrainConfig)
    ahead = quick_check(SkyRLTrainConfig, arguments(args, hardware), hardware)
    if ahead is QuickCheck.FINISHED:
        return 0
    if ahead is QuickCheck.RUN:
        start_server()
    trainer = WARMUP_TRAINERS.get(_variant(args)) if _own_model(args) is None else None
    if trainer is None:
        _warm_up_once(args, hardware)
        if _variant(args) == MLPERF:
            _write_curriculum(args, hardware)
        began = time.perf_counter()
    cfg, _ = load_config(SkyRLTrainConfig, arguments(args, hardware), hardware)
    require_memory(NEEDED_GIB, "the embedded default")
    from skyrl_megatron.entrypoints.experiment import BasePPOExp, run_experiment

    run_experiment(cfg, _warmup_experiment(trainer) if trainer else BasePPOExp, began=began)
    return 0


def _warm_model(variant: str) -> str:
    """Return the name of the folder of the warmed-up model with which a variant starts."""
    return WARM_MODEL_OF_TURNS if variant == MLPERF else WARM_MODEL


def _warm_up_once(args: Sequence[str], hardware: Hardware) -> None:
    """Create the warmed-up model with which the run starts, unless it exists or ``args`` set another model."""
    (number, folder), variant = _seed_folder(read_arguments(args)[0]), _variant(args)
    warm = folder / _warm_model(variant)
    if _own_model(args) is not None or warm.exists():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(SkyRLTrainConfig, arguments(args, hardware), hardware)  # report problems before any work
    require_memory(NEEDED_GIB, "the embedded default")
    from skyrl_megatron.entrypoints.experiment import run_experiment

    work = folder / f"warm_up{'_of_two_turns' if variant == MLPERF else ''}"
    places = {"ckpt": work / "ckpts", "export": work / "exports", "log": work / "logs"}
    keys = [f"trainer.seed={number}", "trainer.run_name=warm-up"]
    keys += [f"trainer.{name}_path={path}" for name, path in places.items()]
    if variant == MLPERF:
        keys += ["generator.max_turns=2", "generator.max_input_length=64", "generator.batched=false"]
    cfg, _ = load_config(SkyRLTrainConfig, arguments(keys, hardware), hardware)
    run_experiment(cfg, _warmup_experiment("WarmUpOnlyTrainer"))
    (work / "exports" / "global_step_0" / "policy").rename(warm)


def _warmup_experiment(trainer: str) -> type[BasePPOExp]:
    """Return an experiment with a trainer of ``skyrl_megatron_tools/embedded/warmup.py``."""
    from skyrl_megatron.entrypoints.experiment import BasePPOExp
    from skyrl_megatron_tools.embedded import warmup

    class EmbeddedExp(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
            made: RayPPOTrainer = getattr(warmup, trainer)(*args, **kwargs)
            return made

        def get_eval_dataset(self) -> PromptDataset | None:
            """Return the validation prompts, with which the warm-up measures its score, even if evaluation is off."""
            return self._dataset("data.val_data", self.cfg.data.val_data) if self.cfg.data.val_data else None

    return EmbeddedExp


if __name__ == "__main__":
    sys.exit(main())
