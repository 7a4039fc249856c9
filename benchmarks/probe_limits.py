"""How far trainer and engine are apart, with equal weights and with planted faults: the probe's limits.

    python benchmarks/probe_limits.py [--dtype bfloat16] [--probes 20] [--families qwen3_moe … | --model FOLDER]

For each family, a random model in a vLLM engine and in a Megatron rank scores the probe's tokens
(``weight_sync/probe.py``); or a model of yours. Its mean difference must be within the limit with equal weights, in
every probe, and should not be with a fault: two experts of one layer swapped, one expert stale, the output layer
stale.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from benchmarks.weight_sync import LARGE  # noqa: E402

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, hidden 1024, 32 experts top-4": (
        "qwen3_moe",
        LARGE,
    ),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3": ("qwen3", {}),
}


class Trainer:
    """A folder's model in one Megatron rank."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch

        from skyrl_megatron.config import SkyRLTrainConfig
        from skyrl_megatron.runtime import trained_model
        from skyrl_megatron.runtime.engine import MegatronEngine

        parameter_dtype = getattr(torch, dtype)
        trained_model.parameter_dtype = lambda cfg: parameter_dtype  # type: ignore[attr-defined]  # half: on GPUs only
        self.folder = folder
        cfg = SkyRLTrainConfig.from_cli_overrides({"trainer.ref.model.path": str(folder)})
        self.engine = MegatronEngine(cfg, "ref")

    def score(self, token_ids: list[int], *, perturbation: float = 0.0) -> list[float]:
        """Log-probs of tokens 1 … n−1."""
        from skyrl_megatron.runtime.scoring import score_tokens

        scores = score_tokens(self.engine, token_ids, perturbation=perturbation)
        assert scores is not None
        return scores

    def plant(self, fault: str) -> bool:
        """Change the weights; False where the family has nothing to change."""
        import torch

        from skyrl_megatron.runtime.model.local_weights import local_weights

        weights = {weight.name: weight.tensor for weight in local_weights(self.engine.model, self.engine.groups)}
        with torch.no_grad():
            if fault == "output layer stale":
                weights["output_layer.weight"].normal_(std=float(weights["output_layer.weight"].std()))
                return True
            kinds = [f"decoder.layers.2.mlp.experts.{{}}.linear_fc{number}.weight" for number in (1, 2)]
            if kinds[0].format(1) not in weights:
                return False
            for kind in kinds:
                one, other = weights[kind.format(1)], weights[kind.format(2)]
                if fault == "two experts swapped":
                    swap(one, other)
                else:
                    one.normal_(std=float(one.std()))
        return True

    def restore(self) -> None:
        """The folder's weights again."""
        from skyrl_megatron.runtime.hf_weights import load_hf

        load_hf(self.engine.model, self.folder, self.engine.groups)


def swap(one: Any, other: Any) -> None:
    """Exchange two tensors' contents."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@dataclass(frozen=True)
class Probe:
    """One probe's outcome: mean differences in nats."""

    diff: float
    """Between trainer and engine."""
    rounding: float
    """Between the trainer's own scores and its perturbed ones."""
    passes: bool


async def measure(folder: Path, dtype: str, vocab_size: int, probes: int) -> dict[str, list[Probe]]:
    """Condition → its probes."""
    from megatron.core.parallel_state import destroy_model_parallel

    from skyrl_megatron.inference.vllm.settings import EngineSettings
    from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
    from skyrl_megatron.weight_sync.probe import EPSILON, limit_of, logprob_diff, probe_tokens

    engine = VLLMEngine(EngineSettings(str(folder), dtype=dtype, max_model_len=128, kv_cache_bytes=64 << 20))
    await engine.start()
    tokens = [probe_tokens(vocab_size, seed) for seed in range(probes)]
    engines = [await engine.score(ids) for ids in tokens]
    await engine.shutdown()
    trainer = Trainer(folder, dtype)
    found: dict[str, Any] = {}
    for condition in ("equal weights", "one expert stale", "two experts swapped", "output layer stale"):
        if condition == "equal weights" or trainer.plant(condition):
            found[condition] = []
            for ids, theirs in zip(tokens, engines, strict=True):
                ours = trainer.score(ids)
                perturbed = trainer.score(ids, perturbation=EPSILON[dtype])
                apart, rounding = logprob_diff(ours, theirs), logprob_diff(ours, perturbed)
                found[condition].append(Probe(apart.mean, rounding.mean, apart.within(limit_of(dtype, rounding))))
            trainer.restore()
    destroy_model_parallel()
    return found


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder, not random models")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    args = parse(parser, probes=1, families=["qwen3_moe"])

    import torch.distributed as dist

    from skyrl_megatron.weight_sync.probe import LIMITS, ROUNDINGS
    from tests.support.tiny_models import VOCAB_SIZE, write_tiny_model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"limit for {args.dtype}: {LIMITS[args.dtype]:g}, or {ROUNDINGS:g} times rounding")
    print("nats, smallest to largest of all probes")
    for name in [str(args.model)] if args.model else args.families:
        with tempfile.TemporaryDirectory() as root:
            if args.model:
                folder = args.model.resolve()
                vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
            else:
                family, sizes = FAMILIES[name]
                folder = write_tiny_model(family, Path(root) / "model", dtype=args.dtype, **sizes)
                vocab_size = VOCAB_SIZE
            found = asyncio.run(measure(folder, args.dtype, vocab_size, args.probes))
        print(name)
        for condition, of in found.items():
            diffs, roundings = [probe.diff for probe in of], [probe.rounding for probe in of]
            times = [probe.diff / probe.rounding for probe in of]
            print(
                f"  {condition:20s} apart {min(diffs):.2g} … {max(diffs):.2g}   rounding {min(roundings):.2g} … "
                f"{max(roundings):.2g}   times rounding {min(times):.1f} … {max(times):.1f}   "
                f"within the limit {sum(probe.passes for probe in of)} of {len(of)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
