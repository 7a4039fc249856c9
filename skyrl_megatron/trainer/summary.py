"""The last lines of a run: its scores, and where its files are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_megatron.config.resolve import run_folder
from skyrl_megatron.plugins import run_files
from skyrl_megatron.trainer.checkpoints import export_folder
from skyrl_megatron.trainer.tracking import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig

SCORE = "eval/all/avg_score"


def summary_lines(cfg: SkyRLTrainConfig, saved_step: int | None, step: int) -> list[str]:
    """Return lines with the scores of the first and the last evaluation, if any, and the paths of the run's files."""
    folder = run_folder(cfg)
    scores = [line[SCORE] for line in read_metrics(folder / METRICS_FILE) if line.get(SCORE) is not None]
    shown = [f"{score:.3f}" for score in scores]
    score = f"{shown[0]} before · {shown[-1]} after" if len(shown) > 1 else "".join(shown)
    paths = {name: folder / file for name, file in {"metrics": METRICS_FILE, **run_files()}.items()}
    exported = export_folder(cfg.trainer.export_path, step)
    # A Path would damage the address of an object store.
    checkpoint = f"checkpoint: {cfg.trainer.ckpt_path}/global_step_{saved_step}"
    return [
        *([f"score: {score}"] if scores else []),
        *(f"{name}: {path}" for name, path in paths.items() if path.exists()),
        *([checkpoint] if saved_step is not None else []),
        *([f"exported model: {exported}"] if exported.exists() else []),
    ]
