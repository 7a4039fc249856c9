"""Run by the newest transformers: ``python -m tests.bridges.newest_transformers WRITTEN EXPORTED``.

Saves the tiny model of every family to ``WRITTEN``, with its logits, and opens the folders of ``EXPORTED``: what it
reports about each, and logits. All go to ``report.json`` and ``logits.pt`` in the folders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = [(7 * i + 3 * i * i) % 900 + 5 for i in range(40)]


def logits(model: Any) -> Any:
    """The model's logits of :data:`TOKENS`, [40, V]."""
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0]


def open_folder(folder: Path) -> tuple[Any, dict[str, list[str]]]:
    """A model of text, or of text and images, and what is missing, unexpected or mismatched in its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    within = "text_config" in json.loads((folder / "config.json").read_text())
    model, found = (AutoModelForImageTextToText if within else AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model, {key: sorted(map(str, value)) for key, value in found.items() if value}


def main(written: Path, exported: Path) -> None:
    import torch
    import transformers

    from tests.bridges.test_text_and_images import write_model
    from tests.bridges.tiny_models import TINY, save_tiny

    report: dict[str, Any] = {"version": transformers.__version__}
    for family in TINY:
        save_tiny(family, written / family)
    write_model(written / "qwen3_5_moe")
    save_tiny("mimo_v2_flash", written / "mimo", sliding_window_size=17)  # as released
    for root in (written, exported):
        for folder in sorted(path for path in root.iterdir() if path.is_dir()):
            model, problems = open_folder(folder)
            torch.save(logits(model), root / f"{folder.name}.pt")
            report[f"{root.name}/{folder.name}"] = problems
    (written / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
