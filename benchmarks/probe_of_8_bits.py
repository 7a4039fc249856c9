"""How far log-probs move when matrices are kept in 8 bits, and with planted faults on top: the probe's limit for such
engines.

    python benchmarks/probe_of_8_bits.py [--probes 12]

A model scores the probe's tokens (``weight_sync/probe.py``) with its weights, and with what is left of them in 8 bits,
by transformers in fp32: no kernel of vLLM computes with 8 bits on a CPU without AMX. Activations are kept as they are;
engines that round those too are further away, by about as much again in quadrature. "Rounding" is how far embeddings
that change by half a unit of 8 bits move the scores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridges.quantisation import EngineForm
from bridges.quantized import matrix_of_blocks, quantise
from skyrl_megatron.weight_sync.probe import EPSILON, QUANTISED, limit_of, logprob_diff, probe_tokens
from tests.support.engines import reference_logprobs
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_model

LARGER: dict[str, Any] = dict(hidden_size=512, num_hidden_layers=8, num_experts=16, moe_intermediate_size=256)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, hidden 512, 8 layers, 16 experts": ("qwen3_moe", LARGER),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3": ("qwen3", {}),
}
FORMS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp8": {"quant_method": "mxfp8"},
}
type Tensors = dict[str, Tensor]


def in_8_bits(tensors: Tensors, form: EngineForm) -> Tensors:
    """What is left of linear maps."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            values, scales = quantise(form, tensor)
            scales = torch.exp2(scales.float() - 127) if form.method == "mxfp8" else scales
            found[name] = matrix_of_blocks(values, scales, form.block).dequantized(tensor.dtype)
    return found


def experts_swapped(tensors: Tensors) -> Tensors:
    """Two experts of a layer exchanged."""
    one, other = ".layers.2.mlp.experts.1.", ".layers.2.mlp.experts.2."
    if not any(one in name for name in tensors):
        return {}
    back = {other: one, one: other}
    return {
        name.replace(key, back[key]) if (key := next((k for k in back if k in name), "")) else name: tensor
        for name, tensor in tensors.items()
    }


def stale(what: str) -> Callable[[Tensors], Tensors]:
    """Other numbers in the place of a tensor."""

    def change(tensors: Tensors) -> Tensors:
        torch.manual_seed(1)
        name = next(name for name in tensors if what in name)
        return tensors | {name: torch.randn_like(tensors[name]) * tensors[name].std()}

    return change


def embeddings_moved(tensors: Tensors) -> Tensors:
    """Half a unit up or down."""
    torch.manual_seed(2)
    name = next(name for name in tensors if "embed_tokens" in name)
    signs = torch.randint(0, 2, tensors[name].shape) * 2 - 1
    return tensors | {name: tensors[name] * (1 + signs * EPSILON[QUANTISED])}


def scores(root: Path, plain: Path, tensors: Tensors, tokens: list[list[int]]) -> list[list[float]]:
    """Log-probs of each probe."""
    folder = root / "changed"
    shutil.copytree(plain, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = [reference_logprobs(folder, ids) for ids in tokens]
    shutil.rmtree(folder)
    return found


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=12)
    args = parse(parser, probes=1)
    tokens = [probe_tokens(VOCAB_SIZE, seed) for seed in range(args.probes)]
    faults: dict[str, Callable[[Tensors], Tensors]] = {
        "equal weights": dict,
        "two experts swapped": experts_swapped,
        "a layer's attention stale": stale("layers.1.self_attn.o_proj"),
        "output layer stale": stale("lm_head"),
    }
    print("nats, smallest to largest of all probes")
    for name, (family, sizes) in MODELS.items():
        for method, config in FORMS.items():
            with tempfile.TemporaryDirectory() as directory:
                root = Path(directory)
                plain = write_tiny_model(family, root / "model", **sizes)
                form = EngineForm.of({"quantization_config": config}, "config.json")
                assert form is not None
                tensors = load_file(plain / "model.safetensors")
                own = scores(root, plain, tensors, tokens)
                moved = scores(root, plain, embeddings_moved(tensors), tokens)
                rounding = [logprob_diff(*pair) for pair in zip(own, moved, strict=True)]
                print(f"{name}, {method}")
                for fault, change in faults.items():
                    if not (changed := change(in_8_bits(tensors, form))):
                        continue
                    theirs = scores(root, plain, changed, tokens)
                    apart = [logprob_diff(*pair) for pair in zip(own, theirs, strict=True)]
                    times = [a.mean / r.mean for a, r in zip(apart, rounding, strict=True)]
                    within = [a.within(limit_of(QUANTISED, r)) for a, r in zip(apart, rounding, strict=True)]
                    print(
                        f"  {fault:25s} apart {min(a.mean for a in apart):.2g} … {max(a.mean for a in apart):.2g}   "
                        f"rounding {min(r.mean for r in rounding):.2g} … {max(r.mean for r in rounding):.2g}   "
                        f"times {min(times):.1f} … {max(times):.1f}   within the limit {sum(within)} of {len(within)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
