"""What Muon costs over AdamW: time of a training step and of its optimizer step.

    python benchmarks/run.py muon [--rounds 5]

Model, batch and process are those of ``benchmarks/lora.py``: a Qwen3-MoE of hidden size 1024 with 32 experts top-4
(2 layers, 124 million parameters) in fp32, 8 sequences of 1024 tokens, one thread. Both sides train all weights.
Rounds alternate; the fewest processor seconds of each side are compared. The last line is what Newton-Schulz takes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SMALL = dict(hidden_size=64, moe_intermediate_size=32, num_experts=4, vocab_size=256)
"""Sizes of ``--smoke``."""


def main() -> None:
    import lora
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parse(parser, rounds=1)
    if args.smoke:
        lora.MODEL |= SMALL
        lora.SEQUENCES, lora.TOKENS = 2, 128
    lora.one_process()
    from skyrl_megatron_parts import muon

    inside = [0.0]
    plain = muon.newton_schulz

    def counted(*arguments: Any) -> Any:
        began = time.process_time()
        found = plain(*arguments)
        inside[0] += time.process_time() - began
        return found

    muon.newton_schulz = counted  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        model = lora.write_model(Path(folder) / "model")
        key = "trainer__policy__optimizer_config__optimizer"
        sides = {name: partial(lora.build, "full", model, 0, **{key: name}) for name in ("adam", "muon")}
        best = lora.race(lora.built(sides), dict.fromkeys(sides, lora.make_batch()), args.rounds)
    print(f"step: {best['muon'][1] / best['adam'][1]:.3f} of adam (wanted: at most 1.15)")
    print(f"Newton-Schulz: {inside[0] / (args.rounds + 1):.2f} s a step")


if __name__ == "__main__":
    main()
