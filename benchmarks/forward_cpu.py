"""Forward and backward of Megatron-Core on the CPU against transformers: same weights, same sequences, one thread.

    python benchmarks/run.py forward_cpu

Two models of the qwen3_moe family, fp32: ``large`` (hidden 512, 4 layers, 32 experts top-4) on 2048 tokens, and the
``tiny`` one that the tests and the embedded job use. Sequences are of equal length, so that transformers pays for no
padding; ``ragged`` shows what padding costs where they are not. The loss is the mean negative log-prob of the next
token, computed by each side as it does in training: ours from ``vocab_parallel.py``, theirs by cross-entropy.
transformers runs with SDPA, once with grouped experts (its default) and once with eager ones.

Rounds alternate, the ratio is that of the fastest rounds, as noise of other programs only ever adds. The losses are
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.nn import functional as F

MODELS = {
    "large": dict(
        vocab_size=8192,
        hidden_size=512,
        moe_intermediate_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
    ),
    "tiny": dict(
        vocab_size=512,
        hidden_size=64,
        moe_intermediate_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    ),
}
# name → (model, lengths)
CASES = {
    "large, 8 x 256 tokens": ("large", [256] * 8),
    "large, 2 x 1024 tokens": ("large", [1024] * 2),
    "large, ragged": ("large", [128, 160, 192, 224, 256, 288, 384, 416]),
    "tiny, 8 x 64 tokens": ("tiny", [64] * 8),
}


def save_model(name: str, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, tie_word_embeddings=False, **MODELS[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder / name


class Transformers:
    """A padded batch through transformers."""

    def __init__(self, folder: Path, experts: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
        )
        self.model.train()

    def prepare(self, sequences: list[torch.Tensor]) -> None:
        longest = max(map(len, sequences))
        padded = [F.pad(s, (0, longest - len(s))) for s in sequences]
        self.tokens = torch.stack(padded)
        lengths = torch.tensor([len(s) for s in sequences])[:, None]
        self.mask = None if len(set(map(len, sequences))) == 1 else torch.arange(longest)[None] < lengths
        labels = self.tokens.roll(-1, 1)
        labels[torch.arange(longest)[None] >= lengths - 1] = -100
        self.labels = labels

    def step(self) -> float:
        self.model.zero_grad()
        mask = None if self.mask is None else self.mask.long()
        logits = self.model(self.tokens, attention_mask=mask, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=-100)
        loss.backward()
        return loss.item()


class Megatron:
    """The same sequences packed, through Megatron's model."""

    def __init__(self, folder: Path, groups: Any) -> None:
        from skyrl_megatron.runtime.hf_weights import load_hf
        from skyrl_megatron.runtime.model.build import build_model

        self.groups = groups
        self.model = build_model(folder, groups, dtype=torch.float32)
        load_hf(self.model, folder, groups)

    def prepare(self, sequences: list[torch.Tensor]) -> None:
        from skyrl_megatron.runtime.packed_inputs import pack
        from skyrl_megatron.types import PaddedBatch

        longest = max(map(len, sequences))
        tokens = torch.stack([F.pad(s, (longest - len(s), 0)) for s in sequences])
        mask = torch.stack([torch.arange(longest) >= longest - len(s) for s in sequences])
        response = mask[:, 1:].float()
        response[mask[:, 1:] & ~mask[:, :-1]] = 0.0  # a first token has no prediction
        self.packed = pack(PaddedBatch(tokens, mask, response, response), self.groups, torch.device("cpu"))
        self.count = response.sum()

    def step(self) -> float:
        from skyrl_megatron.runtime.logprobs import SoftmaxSettings, logprobs_and_entropy

        chunk = self.model.chunks[0]
        chunk.zero_grad()
        logits = chunk(**self.packed.model_arguments()).flatten(0, 1)
        logprobs, _ = logprobs_and_entropy(
            logits, self.packed.targets, self.groups.tp, SoftmaxSettings(self.model.vocab_size)
        )
        loss = -self.packed.to_responses(logprobs).sum() / self.count
        loss.backward()
        return loss.item()


def seconds(side: Any) -> float:
    start = time.perf_counter()
    side.step()
    return time.perf_counter() - start


def main() -> None:
    from smoke import parse

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--cases", nargs="*", default=list(CASES))
    options = parse(arguments, rounds=1, cases=["tiny, 8 x 64 tokens"])

    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state

    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    groups = parallel_state.initialize(ParallelConfig(1))
    print(f"{'':26}{'ours':>10}{'grouped':>10}{'eager':>10}   tokens/s; ratio to the faster of theirs")
    with tempfile.TemporaryDirectory() as root:
        for case in options.cases:
            name, lengths = CASES[case]
            folder = Path(root) / name
            if not folder.exists():
                save_model(name, Path(root))
            generator = torch.Generator().manual_seed(1)
            sequences = [torch.randint(MODELS[name]["vocab_size"], (n,), generator=generator) for n in lengths]
            sides: list[Any] = [
                Megatron(folder, groups),
                Transformers(folder, "grouped_mm"),
                Transformers(folder, "eager"),
            ]
            for side in sides:
                side.prepare(sequences)
            losses = [side.step() for side in sides]
            assert max(losses) - min(losses) < 1e-4, losses
            repeats = 1 if name == "large" else 20
            best = [float("inf")] * len(sides)
            for _ in range(options.rounds * repeats):
                best = [min(b, seconds(side)) for b, side in zip(best, sides, strict=True)]
            rates = [sum(lengths) / b for b in best]
            print(f"{case:26}" + "".join(f"{rate:10.0f}" for rate in rates) + f"   {rates[0] / max(rates[1:]):.2f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
