"""A HF folder with an adapter added to its weights, written as a stream: one tensor at a time per worker."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from bridges.assets import copy_assets, output_config
from bridges.convert import Report
from bridges.errors import BridgeError
from bridges.hf_write import HfWriter
from bridges.peft_folder import PeftFolder
from bridges.plan import Plan
from bridges.rows import Shape
from bridges.source import open_hf
from bridges.staging import staged
from bridges.workers import Progress, in_threads, shares

EMBEDDING = "model.embed_tokens"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight + scale · B·A in fp32, rounded once to the weight's dtype."""
    return (weight.float() + (b.float() @ a.float()) * scale).to(weight.dtype)


def merge_adapter(
    hf: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    workers: int = 2,
    drop_mtp: bool = False,
    stream: TextIO | None = None,
) -> Report:
    """Write the HF folder ``hf`` with the PEFT folder ``adapter`` added to its weights to ``out``.

    Quantised folders are dequantised. Tensors without an adapter keep their bytes. An adapter of an embedding that is
    the output layer, too, unties them, with a warning: it is added to the embedding alone. Raises
    :class:`BridgeError`; ``out`` then does not exist.
    """
    source = open_hf(hf)
    plan = Plan.of(source.config)
    shapes = source.shapes()
    plan.check(shapes, str(hf))
    factors = PeftFolder(adapter, plan)
    left = set(factors.modules)
    config = output_config(source.config, dtype, drop_mtp)
    tensors: dict[str, tuple[Shape, torch.dtype]] = {
        name: (shape, source.dtype(name) if dtype is None or name not in plan.hf else dtype)
        for name, shape in shapes.items()
        if not (drop_mtp and plan.is_passthrough(name))
    }
    if untied := f"{EMBEDDING}.weight" in plan.copies.values() and EMBEDDING in left:
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"]
        config["tie_word_embeddings"] = False
        warnings.warn(
            f"{adapter} adapts {EMBEDDING}, which is the output layer of {hf}, too, and PEFT adds an adapter to the "
            "embedding alone: the merged model has an output layer of its own (tie_word_embeddings: false, "
            "lm_head.weight)",
            stacklevel=2,
        )
    stacked = [name for name in plan.stacked if any(m.startswith(name.removesuffix(".weight")) for m in left)]
    if stacked:
        raise BridgeError(f"{hf}: {stacked[0]} holds all experts in one tensor, to which no adapter can be added")
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())
    progress = Progress(total, "merge", stream)
    with staged(out, total) as folder:
        writer = HfWriter(folder, tensors, max_shard_size)

        def convert(worker: int, name: str) -> None:
            module = name.removesuffix(".weight")
            tensor = source.read(f"{EMBEDDING}.weight" if untied and module == "lm_head" else name)
            if module in left:
                a, b = (factors.factor(module, letter) for letter in "AB")
                tensor = merged(tensor, a, b, factors.config.scale)
            progress.add(writer.write(name, tensor))

        try:
            in_threads(shares(list(tensors), lambda name: math.prod(tensors[name][0]), max(1, workers)), convert)
            copy_assets(hf, folder, config)
            writer.finish()
        finally:
            writer.close()
    progress.finish()
    return Report(str(out), plan.family.model_type, len(tensors), progress.done, progress.seconds)
