"""Comparing a Megatron model in a layout with transformers: logits and the gradient of every parameter.

The loss is a fixed random weighting of all logits of all tokens, so that no entry of any gradient is small by
construction. The reference is computed once per model; each rank compares its own slice of the logits, and the
gradients come back through the exporter under their HF names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (41, 24, 63, 7)
VOCAB = 1003
LOGITS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5  # of the largest entry of the parameter's gradient


@dataclass(frozen=True)
class Comparison:
    """Errors of one rank."""

    logits: float | None
    """Largest absolute difference; None on ranks without logits."""
    gradients: dict[str, float]
    """HF name → largest difference over the largest entry of the reference, for the tensors this rank put together."""


def data() -> dict[str, Any]:
    """Sequences [b, S] padded at the left, their mask, and the loss weights [sum of lengths, VOCAB]."""
    import torch

    generator = torch.Generator().manual_seed(7)
    longest = max(LENGTHS)
    sequences = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        sequences[row, -length:] = torch.randint(VOCAB, (length,), generator=generator)
        mask[row, -length:] = True
    sequences[-1, -1] = 0  # the token of padding, as a sample may have it
    weights = torch.randn(sum(LENGTHS), VOCAB, generator=generator) / VOCAB
    return {"sequences": sequences, "mask": mask, "weights": weights}


def reference(folder: Path, out: Path, *, dtype: str = "float32") -> Path:
    """Logits and gradients of the model in ``folder`` by transformers' autograd, saved to ``out``."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    batch = data()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None  # transformers does not train the row of padding; Megatron does
    logits = logits_of(model, batch)
    assert logits.max() > 5 and logits.min() < -5, "the model's logits are too small to show anything"
    (logits * batch["weights"]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(out.parent / "gradients")  # transformers' own names and shapes on disk
    torch.save(
        {"logits": logits.detach(), "gradients": load_file(out.parent / "gradients" / "model.safetensors")}, out
    )
    return out


def logits_of(model: Any, batch: dict[str, Any]) -> Any:
    """The transformers model's logits of every token, [sum of lengths, VOCAB]; sequences go in one by one."""
    import torch

    rows = [batch["sequences"][row : row + 1, -length:] for row, length in enumerate(LENGTHS)]
    return torch.cat([model(row, use_cache=False).logits[0] for row in rows])


def compare(
    folder: Path,
    reference_file: Path,
    layout: dict[str, Any],
    *,
    padded: bool = False,
    fault: str | None = None,
    **build,
) -> Comparison:
    """Body of a multi-process test: this rank's errors of the model in ``layout`` (degrees of ``ParallelConfig``)."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.hf_weights import load_hf
    from skyrl_megatron.runtime.model.build import build_model
    from tests.runtime.faults import FAULTS

    groups = parallel_state.initialize(ParallelConfig(dist.get_world_size(), **layout), timeout_s=120)
    model = build_model(folder, groups, dtype=torch.float32, **build)
    load_hf(model, folder, groups)
    if fault in FAULTS:
        FAULTS[fault](model)
    expected = torch.load(reference_file)
    logits_error = forward_backward(model, groups, expected["logits"], padded, fault)
    return Comparison(logits_error, _gradient_errors(model, groups, expected["gradients"]))


def forward_backward(model, groups, expected, padded: bool, fault: str | None, rounding=None) -> float | None:
    """The replica's sequences, in two micro-batches where it has two, through Megatron's schedule and finalization.

    Returns the largest error of the logits, None on ranks without logits. ``rounding`` [sum of lengths]: what is taken
    off the error of each token.
    """
    import numpy as np
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from skyrl_megatron.runtime import loss_scale
    from skyrl_megatron.runtime.forward_step import run_schedule
    from skyrl_megatron.runtime.model.attention import local_positions
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import PaddedBatch

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    loss_scale.sum_gradients(model.config, settings)
    chunks = [
        DistributedDataParallel(model.config, settings, chunk, pg_collection=groups.collection)
        for chunk in model.chunks
    ]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    batch = data()
    ones = torch.ones(len(LENGTHS), 1)
    everything = PaddedBatch(batch["sequences"], batch["mask"], ones, ones).flat()
    mine = np.split(np.arange(len(LENGTHS)), groups.dp.size())[groups.dp.rank()]
    rows = np.split(mine, min(2, len(mine)))
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    width = model.padded_vocab_size // groups.tp.size()
    first = groups.tp.rank() * width
    columns = slice(first, min(first + width, VOCAB))
    errors: list[float] = []

    def forward_step(micro_batches, chunk):
        picked = next(micro_batches)
        packed = pack(everything.select(picked).padded(), groups, torch.device("cpu"), padded=padded)
        kept, source = _real_tokens(packed.padded_lengths, picked, starts)
        mine = local_positions(packed.padded_lengths, groups.cp.size(), groups.cp.rank())
        wanted = torch.zeros(sum(packed.padded_lengths), VOCAB)
        weights = torch.zeros_like(wanted)
        wanted[kept], weights[kept] = expected[source], batch["weights"][source]
        excused = torch.zeros(len(wanted))
        if rounding is not None:
            excused[kept] = rounding[source]
        here = torch.zeros(len(wanted), dtype=torch.bool)
        here[kept] = True

        def on_last_stage(logits):
            logits = logits.flatten(0, 1)[:, : columns.stop - columns.start]
            error = (logits.detach() - wanted[mine][:, columns]).abs().amax(-1) - excused[mine]
            errors.append(float(error[here[mine]].max()))
            loss = (logits * weights[mine][:, columns]).sum()
            if fault == "averaged vocabulary shard":
                loss = loss * VOCAB / (columns.stop - columns.start)
            return loss_scale.loss_for_schedule(loss, {})

        return chunk(**packed.model_arguments()), on_last_stage

    run_schedule(forward_step, rows, chunks, groups, forward_only=False)
    finalize_model_grads(chunks, None, pg_collection=groups.collection)
    return max(errors) if errors else None


def _real_tokens(padded_lengths, picked, starts):
    """(positions in the pack that are not padding, the same tokens' rows of the reference)."""
    import torch

    kept, source, start = [], [], 0
    for padded, row in zip(padded_lengths, picked, strict=True):
        kept.append(torch.arange(start, start + LENGTHS[row]))
        source.append(torch.arange(starts[row], starts[row] + LENGTHS[row]))
        start += padded
    return torch.cat(kept), torch.cat(source)


def _gradient_errors(model, groups, expected) -> dict[str, float]:
    from skyrl_megatron.runtime.hf_weights import stream_hf

    errors = {}
    for piece in stream_hf(model, groups, of=lambda parameter: parameter.main_grad):
        wanted = expected[piece.name]
        assert piece.tensor.shape == wanted.shape, piece.name
        errors[piece.name] = float((piece.tensor - wanted).abs().max() / wanted.abs().max())
    return errors


def check(results: list[Comparison], reference_file: Path) -> None:
    """Asserts that logits and the gradient of every parameter are those of transformers."""
    import torch

    logits = [result.logits for result in results if result.logits is not None]
    assert logits, "no rank computed logits"
    worst = max((error, name) for result in results for name, error in result.gradients.items())
    print(f"largest error: logits {max(logits):.1e}, gradients {worst[0]:.1e} ({worst[1]})")  # shown by pytest -rP
    assert max(logits) <= LOGITS_TOLERANCE, f"logits differ by {max(logits):.2e}"
    errors = {name: error for result in results for name, error in result.gradients.items()}
    assert sum(len(result.gradients) for result in results) == len(errors), "a tensor came from two ranks"
    missing = set(torch.load(reference_file)["gradients"]) - set(errors)
    assert not missing, f"no gradient of {sorted(missing)[:5]}"
    wrong = {name: error for name, error in errors.items() if not error <= GRADIENT_TOLERANCE}
    assert not wrong, f"{len(wrong)} gradients differ, e.g. {dict(list(wrong.items())[:5])}"
