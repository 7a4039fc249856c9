"""Evaluation of the policy on held-out prompts: per dataset, over all of them, and per set of ``data.eval_sets``."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bridges.staging import write_file
from skyrl_megatron.algorithms.metrics import majority_at_k, pass_at_k
from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.config.rules.evaluation_rules import (
    VAL_DATA,
    HeldOutGroups,
    group_name,
    metric_problems,
    name_problems,
)
from skyrl_megatron.config.schema.evaluation import DATASET_KEY, UNKNOWN, EvalSetConfig, eval_sets
from skyrl_megatron.errors import ConfigError
from skyrl_megatron.identity import Identity, other_parts, read_identity, short, write_identity
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.rollout.interface import (
    GeneratorInterface,
    GeneratorOutput,
    get_metrics_from_generator_output,
    sampled_trajectories,
)
from skyrl_megatron.rollout.outputs import (
    concatenate_generator_outputs,
    prepare_generator_input,
    rewards_of_rows,
    row_uids,
    select_rows,
)
from skyrl_megatron.trainer.event_loop import with_timeout

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.schema.generator import SamplingParams


class HeldOutPrompts(Protocol):
    """A data set of prompts: ``PromptDataset``, or a user's own."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any:
        """Return a row."""

    def collate_fn(self, rows: list[Any]) -> list[dict[str, Any]]:
        """Return the entries of rows: ``prompt``, ``uid``, ``env_class``, ``env_extras``."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows that were sampled from a dataset, with the uid and the other columns of each row's prompt."""

    output: GeneratorOutput
    uids: list[str]
    extras: list[Mapping[str, Any]]

    def rows_by(self, column: str, default: str = UNKNOWN) -> dict[str, list[int]]:
        """Return value of the column, in alphabetical order → rows."""
        rows: dict[str, list[int]] = defaultdict(list)
        for row, extra in enumerate(self.extras):
            rows[str(extra.get(column, default))].append(row)
        return dict(sorted(rows.items()))

    def select(self, rows: Sequence[int]) -> Sampled:
        """Return some of the rows."""
        output = select_rows(self.output, rows)
        return Sampled(output, [self.uids[row] for row in rows], [self.extras[row] for row in rows])


async def evaluate(
    cfg: SkyRLTrainConfig,
    eval_dataset: HeldOutPrompts | None,
    generator: GeneratorInterface,
    tokenizer: Any,
    global_step: int,
    sets: Mapping[str, HeldOutPrompts] | None = None,
    *,
    identity: Identity | None = None,
) -> dict[str, float]:
    """Return ``eval/<dataset>/{avg_score, pass_at_n, mean_positive_reward, num_failed}``, the same for ``all``
    prompts, and for each named adapter as ``eval/adapter/<name>/…``; and the scores of each set as ``eval/<set>/…``.

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
        sources = sampled.rows_by(DATASET_KEY)
        _require_names(cfg, {VAL_DATA: sources})
        for source, rows in sources.items():
            metrics |= _scores(source, sampled.select(rows), n)
            _dump(cfg, folder, source, sampled, rows, tokenizer)
        owners = sampled.rows_by(ADAPTER_KEY)
        for adapter in cfg.trainer.policy.model.lora.adapters:
            if adapter in owners:
                metrics |= _scores(f"adapter/{adapter}", sampled.select(owners[adapter]), n)
    for name, dataset in (sets or {}).items():
        one = eval_sets(cfg.data.eval_sets)[name]
        usual = settings.eval_sampling_params
        temperature = usual.temperature if one.temperature is None else one.temperature
        top_p = usual.top_p if one.top_p is None else one.top_p
        params = dataclasses.replace(usual, temperature=temperature, top_p=top_p)
        sampled = await _sample(cfg, dataset, generator, one.n, params, global_step)
        metrics |= _set_scores(name, one, sampled, tokenizer)
        _dump(cfg, folder, name, sampled, range(len(sampled.uids)), tokenizer)
    return metrics


def require_metrics(cfg: SkyRLTrainConfig, eval_dataset: Any, sets: Mapping[str, Any], *, trains: bool = True) -> None:
    """Raise ConfigError if two parts of the held-out data would have scores of the same names, or if
    ``trainer.stop_when`` or ``best_metric`` of a run that ``trains`` reads a metric that it will not have. A custom
    data set without ``values_of`` is not looked into."""
    groups: dict[str, Collection[str]] = {}
    if hasattr(eval_dataset, "values_of"):
        groups[VAL_DATA] = eval_dataset.values_of(DATASET_KEY)
    for name, dataset in sets.items():
        if hasattr(dataset, "values_of"):
            groups[name] = dataset.values_of(eval_sets(cfg.data.eval_sets)[name].group_by)
    _require_names(cfg, groups)
    if trains and (problems := list(metric_problems(cfg, groups))):
        raise ConfigError(problems)


def _require_names(cfg: SkyRLTrainConfig, groups: HeldOutGroups) -> None:
    if problems := list(name_problems(cfg, groups)):
        raise ConfigError(problems)


async def _sample(
    cfg: SkyRLTrainConfig,
    dataset: HeldOutPrompts,
    generator: GeneratorInterface,
    n: int,
    params: SamplingParams,
    step: int,
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
        extras += [by_uid[uid] for uid in uids[len(extras) :]]  # a generator may return several rows a sample
    return Sampled(concatenate_generator_outputs(outputs), uids, extras)


def _scores(source: str, sampled: Sampled, samples: int) -> dict[str, float]:
    """Return the scores over the samples that were scored, and the number of those that failed."""
    scores = get_metrics_from_generator_output(sampled.output, sampled.uids)
    failed = sum(trajectory.failed for trajectory in sampled_trajectories(sampled.output, sampled.uids))
    named = {
        f"eval/{source}/num_failed": float(failed),
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
        metrics |= _group_scores(f"{name}/{group_name(group)}", one, sampled.select(rows), tokenizer)
    return metrics


def _group_scores(name: str, one: EvalSetConfig, sampled: Sampled, tokenizer: Any) -> dict[str, float]:
    metrics = _scores(name, sampled, one.n)
    metrics.pop(f"eval/{name}/pass_at_{one.n}", None)  # a set has the unbiased estimates of its ``ks`` instead
    prompts: dict[str, list[tuple[Hashable, bool]]] = defaultdict(list)
    for trajectory in sampled_trajectories(sampled.output, sampled.uids):
        if not trajectory.failed:
            answer = _answer(sampled.output, trajectory.rows[-1], tokenizer) if one.majority_at else None
            prompts[trajectory.uid].append((answer, trajectory.last_reward > 0))

    for k in sorted({*one.ks, *one.majority_at}):
        enough = [samples for samples in prompts.values() if len(samples) >= k]  # others failed
        if enough and k in one.ks:
            shares = [pass_at_k(len(samples), sum(passed for _, passed in samples), k) for samples in enough]
            metrics[f"eval/{name}/pass_at_{k}"] = sum(shares) / len(shares)
        if enough and k in one.majority_at:
            shares = [majority_at_k([a for a, _ in votes], [float(p) for _, p in votes], k) for votes in enough]
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
    output, scores = sampled.output, rewards_of_rows(sampled.output)
    errors = output.get("errors") or [None] * len(scores)
    entries = [
        {
            "uid": sampled.uids[row],
            "prompt": tokenizer.decode(output["prompt_token_ids"][row]),
            "response": tokenizer.decode(output["response_ids"][row]),
            "score": scores[row],
            "stop_reason": None if output["stop_reasons"] is None else output["stop_reasons"][row],
            "error": errors[row],
        }
        for row in rows
    ]
    content = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    write_file(folder / f"{name.replace('/', '_')}.jsonl", content.encode())
