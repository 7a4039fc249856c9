"""Evaluation of the policy on held-out prompts: per dataset, over all of them, and per set of ``data.eval_sets``."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.staging import write_file
from skyrl_megatron.algorithms.sample_scores import majority_at_k, pass_at_k
from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.config.schema.evaluation import BEST, SETS, STOP, EvalSetConfig, StopCondition, eval_sets
from skyrl_megatron.errors import ConfigError, Problem
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.rollout.interface import (
    GeneratorInterface,
    GeneratorOutput,
    get_metrics_from_generator_output,
    last_reward,
    total_reward,
)
from skyrl_megatron.rollout.outputs import (
    concatenate_generator_outputs,
    prepare_generator_input,
    row_uids,
    select_rows,
)
from skyrl_megatron.trainer.event_loop import with_timeout
from skyrl_megatron.trainer.identity import Identity, other_parts, read_identity, short, write_identity

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema.generator import SamplingParams

DATASET_KEY = "data_source"
"""Column of a row that names its dataset."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows that were sampled from a dataset, with the uid and the other columns of each row's prompt."""

    output: GeneratorOutput
    uids: list[str]
    extras: list[Mapping[str, Any]]

    def rows_by(self, column: str, default: str = "unknown") -> dict[str, list[int]]:
        """Return value of the column, in alphabetical order → rows."""
        found: dict[str, list[int]] = defaultdict(list)
        for row, extra in enumerate(self.extras):
            found[str(extra.get(column, default))].append(row)
        return dict(sorted(found.items()))

    def select(self, rows: Sequence[int]) -> Sampled:
        """Return some of the rows."""
        output = select_rows(self.output, rows)
        return Sampled(output, [self.uids[row] for row in rows], [self.extras[row] for row in rows])


async def evaluate(
    cfg: SkyRLTrainConfig,
    eval_dataset: Any,
    generator: GeneratorInterface,
    tokenizer: Any,
    global_step: int,
    sets: Mapping[str, Any] | None = None,
    *,
    identity: Identity | None = None,
) -> dict[str, float]:
    """Return ``eval/<dataset>/{avg_score, pass_at_n, mean_positive_reward}``, the same for ``all`` prompts, and for
    each named adapter as ``eval/adapter/<name>/…``; and the scores of each set as ``eval/<set>/…``.

    Samples ``eval_n_samples_per_prompt`` responses per prompt with ``eval_sampling_params``, for ``eval_batch_size``
    prompts at a time. ``sets``: name → dataset, for each of ``data.eval_sets``. With ``dump_eval_results``, prompts,
    responses and scores are written to ``<dataset or set>.jsonl`` in :func:`rows_folder`. ``identity``: see there.
    """
    settings, folder = cfg.generator, rows_folder(cfg, global_step, identity)
    if cfg.trainer.dump_eval_results:
        private_folder(folder)
        if identity is not None:
            write_identity(folder, identity)
    assert settings.eval_sampling_params is not None
    metrics: dict[str, float] = {}
    if eval_dataset is not None and len(eval_dataset):
        n = settings.eval_n_samples_per_prompt
        sampled = await _sample(cfg, eval_dataset, generator, n, settings.eval_sampling_params, global_step)
        metrics |= _scores("all", sampled, n)
        for source, rows in sampled.rows_by(DATASET_KEY).items():
            if source in (sets or ()):
                fix = (
                    f"data.val_data has rows of a data set {source}, whose scores have the same names: rename the set"
                )
                raise ConfigError([Problem(f"{SETS}.{source}", source, fix)])
            metrics |= _scores(source, sampled.select(rows), n)
            _dump(cfg, folder, source, sampled, rows, tokenizer)
        owners = sampled.rows_by(ADAPTER_KEY)
        for adapter in cfg.trainer.policy.model.lora.adapters:
            if adapter in owners:
                metrics |= _scores(f"adapter/{adapter}", sampled.select(owners[adapter]), n)
    for name, dataset in (sets or {}).items():
        one = eval_sets(cfg.data.eval_sets)[name]
        given = {key: value for key in ("temperature", "top_p") if (value := getattr(one, key)) is not None}
        params = dataclasses.replace(settings.eval_sampling_params, **given)
        sampled = await _sample(cfg, dataset, generator, one.n, params, global_step)
        metrics |= _set_scores(name, one, sampled, tokenizer)
        _dump(cfg, folder, name, sampled, range(len(sampled.uids)), tokenizer)
    return metrics


def require_scores(cfg: SkyRLTrainConfig, scores: Mapping[str, float]) -> None:
    """Raise ConfigError if ``trainer.stop_when`` or ``best_metric`` reads a score that evaluations do not have."""
    trainer = cfg.trainer
    asked = [(BEST, trainer.best_metric, trainer.best_metric)] if trainer.best_metric else []
    if trainer.stop_when:
        asked.append((STOP, trainer.stop_when, StopCondition.parse(trainer.stop_when).metric))
    fix = f"evaluations have no such score: use one of {', '.join(scores)}"
    problems = [
        Problem(key, value, fix) for key, value, metric in asked if metric.startswith("eval/") and metric not in scores
    ]
    if problems:
        raise ConfigError(problems)


async def _sample(
    cfg: SkyRLTrainConfig, dataset: Any, generator: GeneratorInterface, n: int, params: SamplingParams, step: int
) -> Sampled:
    """Sample ``n`` responses to each prompt of ``dataset``."""
    sampling, size = engine_sampling(params), cfg.trainer.eval_batch_size
    outputs: list[GeneratorOutput] = []
    uids: list[str] = []
    extras: list[Mapping[str, Any]] = []
    for start in range(0, len(dataset), size):
        prompts = dataset.collate_fn([dataset[row] for row in range(start, min(start + size, len(dataset)))])
        generator_input, batch_uids = prepare_generator_input(
            prompts, n, sampling, cfg.environment.env_class, "eval", step
        )
        work = generator.generate(generator_input, disable_tqdm=True)
        outputs.append(await with_timeout(work, cfg.trainer.phase_timeout_s, "eval"))
        uids += row_uids(outputs[-1], batch_uids)
        by_uid = {str(prompt["uid"]): prompt["env_extras"] or {} for prompt in prompts}
        extras += [by_uid[uid] for uid in uids[len(extras) :]]
    return Sampled(concatenate_generator_outputs(outputs), uids, extras)


def _scores(source: str, sampled: Sampled, samples: int) -> dict[str, float]:
    scores = get_metrics_from_generator_output(sampled.output, sampled.uids)
    named = {
        f"eval/{source}/avg_score": scores["avg_score"],
        f"eval/{source}/pass_at_{samples}": scores["pass_at_n"],
        f"eval/{source}/mean_positive_reward": scores["mean_positive_reward"],
    }
    return {name: value for name, value in named.items() if value is not None}


def _set_scores(name: str, one: EvalSetConfig, sampled: Sampled, tokenizer: Any) -> dict[str, float]:
    """Return the scores of a set, and those of each value of its column ``group_by`` if there are several."""
    metrics = _group_scores(name, one, sampled, tokenizer)
    groups = sampled.rows_by(one.group_by)
    for group, rows in groups.items() if len(groups) > 1 else ():
        metrics |= _group_scores(f"{name}/{group.replace('/', '_')}", one, sampled.select(rows), tokenizer)
    return metrics


def _group_scores(name: str, one: EvalSetConfig, sampled: Sampled, tokenizer: Any) -> dict[str, float]:
    metrics = _scores(name, sampled, one.n)
    metrics.pop(f"eval/{name}/pass_at_{one.n}")
    prompts: dict[str, list[tuple[Hashable, bool]]] = defaultdict(list)
    last = sampled.output.get("is_last_step") or [True] * len(sampled.uids)
    for row in np.flatnonzero(last).tolist():
        answer = _answer(sampled.output, row, tokenizer) if one.majority_at else None
        prompts[sampled.uids[row]].append((answer, last_reward(sampled.output["rewards"][row]) > 0))
    for k in one.ks:
        shares = [pass_at_k(len(each), sum(passed for _, passed in each), k) for each in prompts.values()]
        metrics[f"eval/{name}/pass_at_{k}"] = sum(shares) / len(shares)
    for k in sorted(set(one.majority_at)):
        shares = [majority_at_k([a for a, _ in each], [float(p) for _, p in each], k) for each in prompts.values()]
        metrics[f"eval/{name}/majority_at_{k}"] = sum(shares) / len(shares)
    return metrics


def _answer(output: GeneratorOutput, row: int, tokenizer: Any) -> str:
    """Return the answer of a row: what the environment read from it, or else the text of the last turn."""
    parsed = output.get("parsed_answers")
    if parsed and (answer := parsed[row]) is not None:
        return answer
    mask = np.asarray(output["loss_masks"][row]) > 0
    if not mask.any():  # overlong responses are masked
        mask = np.ones_like(mask)
    end = int(np.flatnonzero(mask)[-1]) + 1
    others = np.flatnonzero(~mask[:end])
    begin = int(others[-1]) + 1 if len(others) else 0
    tokens = np.asarray(output["response_ids"][row])[begin:end]
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True)).strip()


def rows_folder(cfg: SkyRLTrainConfig, step: int, identity: Identity | None = None) -> Path:
    """Return the folder of the rows of an evaluation: ``export_path/dumped_evals/global_step_N``.

    ``identity``: of what is evaluated. If the folder has rows of something else, eight digits of the identity are
    appended to its name.
    """
    folder = Path(cfg.trainer.export_path) / "dumped_evals" / f"global_step_{step}"
    if identity is None or not folder.exists():
        return folder
    saved = read_identity(folder)
    free = bool(saved) and not other_parts(saved, identity)
    return folder if free else folder.with_name(f"{folder.name}_{short(identity)}")


def _dump(
    cfg: SkyRLTrainConfig, folder: Path, name: str, sampled: Sampled, rows: Sequence[int], tokenizer: Any
) -> None:
    if not cfg.trainer.dump_eval_results:
        return
    output = sampled.output
    entries = [
        {
            "uid": sampled.uids[row],
            "prompt": tokenizer.decode(output["prompt_token_ids"][row]),
            "response": tokenizer.decode(output["response_ids"][row]),
            "score": total_reward(output["rewards"][row]),
            "stop_reason": None if output["stop_reasons"] is None else output["stop_reasons"][row],
        }
        for row in rows
    ]
    content = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    write_file(folder / f"{name.replace('/', '_')}.jsonl", content.encode())
