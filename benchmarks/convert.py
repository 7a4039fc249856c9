"""Conversion speed and memory against ``cp`` and transformers, on random qwen3_moe folders.

    python benchmarks/run.py convert [--sizes 1 4] [--rounds 5] [--dir DIR]

One round runs, one after the other: ``cp --reflink=never -r`` + ``sync``, import, export, and ``from_pretrained`` +
``save_pretrained`` of transformers; each ends with ``sync``. The rounds alternate, medians are compared. Python start
and imports are outside the timed part of all Python rivals. Memory is the peak of RssAnon + RssShmem of the process,
sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# One operation in a process of its own: imports first, then the clock, then one JSON line.
CHILD = """
import json, os, sys, time
from pathlib import Path
kind, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if kind == "transformers":
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe
else:
    from bridges.convert import export_megatron, import_hf
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
start = time.perf_counter()
if kind == "import":
    import_hf(source, target, workers=2)
elif kind == "export":
    export_megatron(source, target, workers=2, max_shard_size=10**9)  # files of the size of the original's
else:
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(target)
os.sync()
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def make_folder(folder: Path, gigabytes: float) -> int:
    """A qwen3_moe folder of random bf16 weights with about ``gigabytes`` of data. Returns the bytes."""
    import torch
    from transformers import AutoConfig

    from bridges.hf_io import HfWriter
    from bridges.plan import Plan

    hidden = 2048 if gigabytes >= 1 else 256  # else one layer has more than is asked for
    per_layer = 32 * 3 * 768 * hidden * 2 + (hidden * 4096 * 2 + hidden * 512 * 2) * 2
    layers = max(1, round((gigabytes * 1e9 - 2 * 32000 * hidden * 2) / per_layer))
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=32000, hidden_size=hidden, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=32,
        num_experts_per_tok=8, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir()
    config.save_pretrained(folder)
    plan = Plan.of(json.loads((folder / "config.json").read_text()))
    writer = HfWriter(folder, {name: (shape, torch.bfloat16) for name, shape in plan.hf.items()}, 10**9)
    generator = torch.Generator().manual_seed(0)
    total = 0
    for name, shape in plan.hf.items():
        total += writer.write(name, torch.randint(-(2**14), 2**14, shape, generator=generator, dtype=torch.int16).view(
            torch.bfloat16))  # fmt: skip
    writer.finish()
    os.sync()
    return total


def measure(kind: str, source: Path, target: Path) -> tuple[float, float]:
    """(seconds, peak RssAnon + RssShmem in GiB) of one operation; the target is removed before."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    if kind == "cp":
        start = time.perf_counter()
        subprocess.run(["cp", "--reflink=never", "-r", str(source), str(target)], check=True)
        subprocess.run(["sync"], check=True)
        return time.perf_counter() - start, 0.0
    command = [sys.executable, "-c", CHILD, kind, str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        peak = max(peak, sum(int(fields.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem")))
        time.sleep(0.01)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{kind} failed with exit code {process.returncode}")
    return float(json.loads(out.splitlines()[-1])["seconds"]), peak / 2**20


def name_resolution(layers: int) -> float:
    """Microseconds from a module's parameter name to its entry, in a plan of so many layers of 128 experts."""
    from transformers import AutoConfig

    from bridges.plan import Plan
    from bridges.rules import module_name
    from bridges.tensor_names import canonical

    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=layers, num_experts=128).to_dict()
    plan = Plan.of(config)
    names = [module_name(entry, "te") for entry in plan.entries]
    best = min(_time_names(plan, names, canonical) for _ in range(5))
    return best / len(names) * 1e6


def _time_names(plan: Any, names: Any, canonical: Any) -> float:
    start = time.perf_counter()
    for name in names:
        plan.by_name[canonical(name)]
    return time.perf_counter() - start


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 4.0], help="GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to work; default: a temporary folder")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--layers", type=int, default=94, help="of the plan that names are looked up in")
    args = parse(parser, sizes=[0.05], rounds=1, skip_transformers=True, layers=1)
    print(f"name resolution: {name_resolution(args.layers):.2f} us per tensor (limit 2)")
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        for size in args.sizes:
            run(Path(work), size, args)


def run(work: Path, size: float, args: argparse.Namespace) -> None:
    rounds = args.rounds
    hf, megatron, target = work / "hf", work / "megatron", work / "target"
    total = make_folder(hf, size)
    measure("import", hf, megatron)
    steps = {"cp": hf, "import": hf, "export": megatron, "transformers": hf}
    if args.skip_transformers:
        del steps["transformers"]
    if args.smoke:
        del steps["import"]  # once is enough
    taken: dict[str, list[float]] = {kind: [] for kind in steps}
    peak: dict[str, float] = dict.fromkeys(steps, 0.0)
    for number in range(rounds):
        for kind, source in steps.items():
            seconds, memory = measure(kind, source, target)
            taken[kind].append(seconds)
            peak[kind] = max(peak[kind], memory)
        print(f"  round {number + 1}: " + ", ".join(f"{kind} {taken[kind][-1]:.2f} s" for kind in steps), flush=True)
    middle = {kind: statistics.median(values) for kind, values in taken.items()}
    print(f"{total / 1e9:.2f} GB, medians of {rounds} rounds:")
    for kind in steps:
        ratios = f"{middle['cp'] / middle[kind]:.2f} x cp"
        if "transformers" in middle and kind != "transformers":
            ratios += f", {middle['transformers'] / middle[kind]:.1f} x transformers"
        print(f"  {kind:<13} {middle[kind]:6.2f} s  {total / 1e9 / middle[kind]:5.2f} GB/s  {ratios}"
              f"  peak RssAnon+RssShmem {peak[kind]:.2f} GiB")  # fmt: skip
    for folder in (hf, megatron, target):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
