"""Evaluation of the policy on held-out prompts, per dataset and over all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.config.resolve import private_folder
from skyrl_megatron.config.roles import ADAPTER_KEY
from skyrl_megatron.inference.sampling_params import engine_sampling
from skyrl_megatron.rollout.interface import (
    GeneratorInterface,
    GeneratorOutput,
    get_metrics_from_generator_output,
    total_reward,
)
from skyrl_megatron.rollout.outputs import (
    concatenate_generator_outputs,
    prepare_generator_input,
    row_uids,
    select_rows,
)
from skyrl_megatron.trainer.event_loop import with_timeout

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

DATASET_KEY = "data_source"
"""Column of a row that names its dataset."""


async def evaluate(
    cfg: SkyRLTrainConfig, eval_dataset: Any, generator: GeneratorInterface, tokenizer: Any, global_step: int
) -> dict[str, float]:
    """Return ``eval/<dataset>/{avg_score, pass_at_n, mean_positive_reward}``, the same for ``all`` prompts, and for
    each named adapter as ``eval/adapter/<name>/…``.

    Samples ``eval_n_samples_per_prompt`` responses per prompt with ``eval_sampling_params``, for ``eval_batch_size``
    prompts at a time. With ``dump_eval_results``, prompts, responses and scores are written to
    ``export_path/dumped_evals/global_step_N/<dataset>.jsonl``.
    """
    settings = cfg.generator
    assert settings.eval_sampling_params is not None
    sampling = engine_sampling(settings.eval_sampling_params)
    samples, size = settings.eval_n_samples_per_prompt, cfg.trainer.eval_batch_size
    outputs: list[GeneratorOutput] = []
    uids: list[str] = []
    sources: list[str] = []
    owners: list[str] = []
    names = tuple(cfg.trainer.policy.model.lora.adapters)
    for start in range(0, len(eval_dataset), size):
        end = min(start + size, len(eval_dataset))
        prompts = eval_dataset.collate_fn([eval_dataset[row] for row in range(start, end)])
        generator_input, batch_uids = prepare_generator_input(
            prompts, samples, sampling, cfg.environment.env_class, "eval", global_step
        )
        work = generator.generate(generator_input, disable_tqdm=True)
        outputs.append(await with_timeout(work, cfg.trainer.phase_timeout_s, "eval"))
        uids += row_uids(outputs[-1], batch_uids)
        by_uid = {str(prompt["uid"]): prompt["env_extras"] or {} for prompt in prompts}
        extras = [by_uid[uid] for uid in uids[len(sources) :]]
        sources += [str(extra.get(DATASET_KEY, "unknown")) for extra in extras]
        owners += [str(extra.get(ADAPTER_KEY)) for extra in extras]
    output = concatenate_generator_outputs(outputs)
    metrics = _scores("all", output, uids, samples)
    for source in sorted(set(sources)):
        rows = [row for row, name in enumerate(sources) if name == source]
        metrics |= _scores(source, select_rows(output, rows), [uids[row] for row in rows], samples)
        if cfg.trainer.dump_eval_results:
            folder = Path(cfg.trainer.export_path) / "dumped_evals" / f"global_step_{global_step}"
            _dump(folder / f"{source.replace('/', '_')}.jsonl", output, rows, uids, tokenizer)
    for adapter in names:
        if rows := [row for row, name in enumerate(owners) if name == adapter]:
            own = select_rows(output, rows)
            metrics |= _scores(f"adapter/{adapter}", own, [uids[row] for row in rows], samples)
    return metrics


def _scores(source: str, output: GeneratorOutput, uids: Sequence[str], samples: int) -> dict[str, float]:
    scores = get_metrics_from_generator_output(output, uids)
    named = {
        f"eval/{source}/avg_score": scores["avg_score"],
        f"eval/{source}/pass_at_{samples}": scores["pass_at_n"],
        f"eval/{source}/mean_positive_reward": scores["mean_positive_reward"],
    }
    return {name: value for name, value in named.items() if value is not None}


def _dump(path: Path, output: GeneratorOutput, rows: Sequence[int], uids: Sequence[str], tokenizer: Any) -> None:
    private_folder(path.parent)
    with path.open("w") as file:
        for row in rows:
            entry = {
                "uid": uids[row],
                "prompt": tokenizer.decode(output["prompt_token_ids"][row]),
                "response": tokenizer.decode(output["response_ids"][row]),
                "score": total_reward(output["rewards"][row]),
                "stop_reason": None if output["stop_reasons"] is None else output["stop_reasons"][row],
            }
            file.write(json.dumps(entry) + "\n")
