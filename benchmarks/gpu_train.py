"""Training step of a slice of Qwen3-30B-A3B on one GPU: tokens/s, MFU, peak memory.

    python benchmarks/run.py gpu_train [--layers 2] [--sequences 16] [--length 4096] [key=value …]

bf16, random weights, Megatron's distributed Adam with fp32 masters. ``key=value`` are settings of the run, e.g.
``trainer.fused_lm_head_logprob=true``. Needs megatron-core beside torch and transformers; no Ray, no vLLM, and
with ``trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl=local`` no Transformer Engine. Where
there is no GPU it says so and ends. It says what memory it needs before it starts: two layers fit a GPU of 80 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine
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


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "vocab_size": 512,
}


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parse(parser, layers=2, sequences=4, length=64, tokens_per_microbatch=256)

    from skyrl_megatron import device

    if not args.smoke and not device.driver_gpu_count():
        print("no GPU: nothing measured (--smoke runs anywhere)")
        return

    import torch

    join_group()
    engine = load_engine(args.layers, args.steps + 1, overrides(args), smoke=args.smoke)
    batch = make_batch(args.sequences, args.length, engine.model.vocab_size)
    seconds = time_steps(engine, batch, args.steps)
    parameters = sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.parameters())
    report = {
        "device": torch.cuda.get_device_name() if device.has_cuda() else "CPU",
        "layers": engine.model.config.transformer_impl,
        "parameters": parameters,
        "tokens": int(batch.lengths.sum()),
        "ms": {name: round(value * 1e3, 1) for name, value in seconds.items()},
        "step_ms": round((seconds["forward_backward"] + seconds["optim_step"]) * 1e3, 1),
        "tokens_per_s": round(int(batch.lengths.sum()) / (seconds["forward_backward"] + seconds["optim_step"])),
        **rates(engine, batch, seconds, time_components(engine, batch)),
        "peak_memory_GiB": round(device.peak_memory_bytes() / 2**30, 1),
        "peak_reserved_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 1) if device.has_cuda() else None,
    }
    print(json.dumps(report, indent=2))


def join_group(rank: int = 0, ranks: int = 1, port: int = 0) -> None:
    """Make this process one of ``ranks`` on this machine. ``port``: of rank 0's store; 0: any, for a rank alone."""
    import torch.distributed as dist

    from skyrl_megatron import device

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    device.set_local_device(rank)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group(device.collective_backend(), store=store, rank=rank, world_size=ranks)


def overrides(args: argparse.Namespace) -> list[str]:
    """Settings of the command line."""
    return [f"trainer.max_tokens_per_microbatch={args.tokens_per_microbatch}", *args.overrides]


def load_engine(layers: int, steps: int, overrides: Sequence[str], *, smoke: bool) -> MegatronEngine:
    """Load a slice of the model, or with ``smoke`` of a tiny one, for ``steps`` steps. Random weights."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.runtime.engine import MegatronEngine

    with tempfile.TemporaryDirectory() as root:
        config = QWEN3_30B_A3B | (TINY if smoke else {}) | {"num_hidden_layers": layers}
        usual = ("trainer.bf16=true", "trainer.algorithm.use_kl_loss=false", "trainer.gradient_checkpointing=false")
        cfg = SkyRLTrainConfig.from_cli_overrides(
            [f"trainer.policy.model.path={write_model(Path(root), config)}", *usual, *overrides]
        )
        print(f"needs about {needed_bytes(cfg) / 1e9:.0f} GB of the device's memory; --layers makes it more or less")
        started = time.perf_counter()
        engine = MegatronEngine(cfg, total_steps=steps)
        print(f"load: {time.perf_counter() - started:.1f} s")
    return engine


def needed_bytes(cfg: SkyRLTrainConfig) -> int:
    """Bytes of the fullest moment, as ``--check`` counts them: the state, and the larger of the activations and what
    torch's AdamW makes beside them where it is the optimizer, as without Transformer Engine: fp32 of every weight."""
    from skyrl_megatron_observe.estimate.memory_budget import parameter_tables
    from skyrl_megatron_observe.estimate.memory_phases import CONTEXT_BYTES, FRAGMENTATION, LIBRARY_BYTES, RoleModel

    model = RoleModel.of(cfg, "policy", parameter_tables(cfg)["policy"])
    work = max(round(model.training(0) * (1 + FRAGMENTATION)), 4 * model.parameters(0).parameters)
    return model.state(0).device + work + CONTEXT_BYTES + LIBRARY_BYTES


def best_of(calls: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    from skyrl_megatron import device

    seconds = []
    for _ in range(calls + 1):
        device.synchronize()
        started = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def time_steps(engine: MegatronEngine, batch: TrainingBatch, steps: int) -> dict[str, float]:
    """Seconds of each part of a step."""
    found: dict[str, list[float]] = {"logprobs": [], "forward_backward": [], "optim_step": []}
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.compute_logprobs(batch),
        lambda: engine.forward_backward(batch),
        lambda: engine.optim_step(),
    )
    from skyrl_megatron import device

    for step in range(steps + 1):
        for name, call in zip(found, calls, strict=True):
            device.synchronize()
            started = time.perf_counter()
            call()
            device.synchronize()
            if step:  # the first warms up
                found[name].append(time.perf_counter() - started)
    return {name: min(values) for name, values in found.items()}


def time_components(engine: MegatronEngine, batch: TrainingBatch) -> dict[str, float]:
    """Seconds of forward and backward of a layer's attention and MLP alone, on the inputs they get in a step, times
    layers and micro-batches."""
    layer = engine.model.chunks[0].decoder.layers[-1]
    found = {}
    for name, module in (("attention", layer.self_attention), ("mlp", layer.mlp)):
        inputs: list[tuple[Any, Any]] = []
        hook = module.register_forward_pre_hook(
            lambda _, args, kwargs, inputs=inputs: inputs.append((args, kwargs)), with_kwargs=True
        )
        engine.forward_backward(batch)
        hook.remove()
        engine.clear_gradients()
        found[name] = best_of(3, partial(run_alone, module, inputs)) * engine.model.config.num_layers
    engine.clear_gradients()
    return found


def run_alone(module: Any, inputs: list[tuple[Any, Any]]) -> None:
    """Forward and backward of a module on every micro-batch."""
    import torch

    for args, kwargs in inputs:
        hidden, *rest = (x.detach().requires_grad_() if torch.is_floating_point(x) else x for x in args)
        out = module(hidden, *rest, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))


def rates(
    engine: MegatronEngine, batch: TrainingBatch, seconds: dict[str, float], alone: dict[str, float]
) -> dict[str, Any]:
    """TFLOP/s of forward and backward, whole and by component, and the share of the device's peak where that is
    published. ``head`` has what attention and MLP leave: embedding, LM head, log-probs, loss, norms."""
    from skyrl_megatron.runtime.flops import component_flops, peak_flops

    parts = component_flops(engine.model.config, engine.model.vocab_size)
    times = alone | {"head": max(seconds["forward_backward"] - sum(alone.values()), 1e-9)}
    flops = {name: part.training(batch.lengths) for name, part in parts.items()}
    times["forward_backward"], flops["forward_backward"] = seconds["forward_backward"], sum(flops.values())
    times["step"], flops["step"] = seconds["forward_backward"] + seconds["optim_step"], flops["forward_backward"]
    peak = peak_flops()
    return {
        "component_ms": {name: round(value * 1e3, 1) for name, value in alone.items()},
        "tflops_per_s": {name: round(flops[name] / times[name] / 1e12, 2) for name in times},
        "mfu": {name: round(flops[name] / times[name] / peak, 4) for name in times} if peak else None,
    }


def write_model(root: Path, config: dict[str, Any]) -> Path:
    """A HF folder of random weights, a layer's experts at a time."""
    import torch
    from safetensors.torch import save_file

    from bridges.plan import Plan
    from skyrl_megatron import device

    (root / "config.json").write_text(json.dumps(config))
    shapes = Plan.of(config).hf
    place = device.device()
    generator = torch.Generator(place).manual_seed(0)
    index: dict[str, Any] = {}
    names = list(shapes)
    for number, start in enumerate(range(0, len(names), 500)):
        tensors = {}
        for name in names[start : start + 500]:
            tensor = torch.randn(tuple(shapes[name]), generator=generator, device=place, dtype=torch.bfloat16) * 0.02
            tensors[name] = (tensor + 1.0 if "norm" in name else tensor).cpu()
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, root / file)
        index |= dict.fromkeys(tensors, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return root


def make_batch(sequences: int, length: int, vocabulary: int) -> TrainingBatch:
    """Sequences of a quarter prompt and three quarters response, with random advantages."""
    import torch

    from skyrl_megatron.data.batch import collate

    g = torch.Generator().manual_seed(0)
    prompt = length // 4
    batch = collate(
        torch.randint(0, vocabulary, (sequences, prompt), generator=g).tolist(),
        torch.randint(0, vocabulary, (sequences, length - prompt), generator=g).tolist(),
        uids=[str(row) for row in range(sequences)],
        rewards=[0.0] * sequences,
    )
    batch.advantages = torch.randn(batch.response_mask.shape, generator=g) * batch.response_mask
    batch.old_logprobs = -11.0 * batch.response_mask
    return batch


if __name__ == "__main__":
    main()
