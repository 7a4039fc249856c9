"""Training step of a slice of Qwen3-30B-A3B on one GPU: tokens/s, MFU, peak memory.

    python benchmarks/gpu_train.py [--layers 4] [--sequences 16] [--length 4096] [key=value …]

bf16, random weights, Megatron's distributed Adam with fp32 masters. ``key=value`` are settings of the run, e.g.
``trainer.fused_lm_head_logprob=true``. Needs megatron-core beside torch and transformers; no Ray, vLLM or
Transformer Engine. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.types import TrainingBatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# config.json of Qwen3-30B-A3B, but for the number of layers.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()

    from skyrl_megatron import device

    if not device.driver_gpu_count():
        print("no GPU: nothing measured")
        return

    import torch
    import torch.distributed as dist

    device.set_local_device(0)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group(device.collective_backend(), store=store, rank=0, world_size=1)

    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    with tempfile.TemporaryDirectory() as root:
        folder = write_model(Path(root), args.layers)
        cfg = SkyRLTrainConfig.from_cli_overrides(
            [
                f"trainer.policy.model.path={folder}",
                "trainer.bf16=true",
                "trainer.algorithm.use_kl_loss=false",
                "trainer.gradient_checkpointing=false",
                f"trainer.max_tokens_per_microbatch={args.tokens_per_microbatch}",
                *args.overrides,
            ]
        )
        started = time.perf_counter()
        engine = MegatronEngine(cfg, total_steps=args.steps + 1)
        print(f"load: {time.perf_counter() - started:.1f} s")
    batch = make_batch(args.sequences, args.length)
    tokens, flops = int(batch.lengths.sum()), engine.flops.training(batch.lengths)
    times: dict[str, list[float]] = {"forward_backward": [], "optim_step": [], "logprobs": []}
    for step in range(args.steps + 1):
        for name, call in (
            ("logprobs", lambda: engine.compute_logprobs(batch)),
            ("forward_backward", lambda: engine.forward_backward(batch)),
            ("optim_step", engine.optim_step),
        ):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if step:  # the first warms up
                times[name].append(time.perf_counter() - started)
    from skyrl_megatron.runtime.flops import peak_flops

    best = {name: min(values) for name, values in times.items()}
    peak, seconds = peak_flops(), best["forward_backward"] + best["optim_step"]
    parameters = sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.parameters())
    report = {
        "gpu": torch.cuda.get_device_name(),
        "parameters": parameters,
        "tokens": tokens,
        "ms": {name: round(value * 1e3, 1) for name, value in best.items()},
        "tokens_per_s": round(tokens / seconds),
        "tflops_per_s": round(flops / best["forward_backward"] / 1e12, 1),
        "mfu_forward_backward": round(flops / best["forward_backward"] / peak, 4) if peak else None,
        "mfu_step": round(flops / seconds / peak, 4) if peak else None,
        "peak_memory_GiB": round(device.peak_memory_bytes() / 2**30, 1),
    }
    print(json.dumps(report, indent=2))


def write_model(root: Path, layers: int) -> Path:
    """A HF folder of random weights, a layer's experts at a time."""
    import torch
    from safetensors.torch import save_file

    from bridges.plan import Plan

    config = QWEN3_30B_A3B | {"num_hidden_layers": layers}
    (root / "config.json").write_text(json.dumps(config))
    shapes = Plan.of(config).hf
    generator = torch.Generator("cuda").manual_seed(0)
    index: dict[str, Any] = {}
    names = list(shapes)
    for number, start in enumerate(range(0, len(names), 500)):
        tensors = {}
        for name in names[start : start + 500]:
            tensor = torch.randn(tuple(shapes[name]), generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
            tensors[name] = (tensor + 1.0 if "norm" in name else tensor).cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, root / file)
        index |= dict.fromkeys(tensors, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return root


def make_batch(sequences: int, length: int) -> TrainingBatch:
    """Sequences of a quarter prompt and three quarters response, with random advantages."""
    import torch

    from skyrl_megatron.data.batch import collate

    g = torch.Generator().manual_seed(0)
    prompt = length // 4
    batch = collate(
        torch.randint(0, 150_000, (sequences, prompt), generator=g).tolist(),
        torch.randint(0, 150_000, (sequences, length - prompt), generator=g).tolist(),
        uids=[str(row) for row in range(sequences)],
        rewards=[0.0] * sequences,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -11.0 * batch.response_mask
    return batch


if __name__ == "__main__":
    main()
