"""Compare the logits of an HF folder in transformers with those of a Megatron checkpoint in Megatron.

    python -m skyrl_megatron_tools.compare_logits --hf DIR --megatron DIR [--layout tp=2,ep=2] [--seed N]

Both get the same tokens and compute in fp32. The last line of the output is a JSON object: the largest absolute
difference, the sequence that has it, and the range of the reference logits. ``python -m bridges verify --logits`` runs
this program. Megatron's own loader reads the checkpoint, so this also checks that Megatron can load it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

LENGTHS = (96, 37, 64, 5)
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
TIMEOUT_S = 600.0


def parse_layout(text: str) -> dict[str, int]:
    """Parse ``"tp=2,ep=2"`` into parallel sizes by name. Raises ValueError with the part that is wrong."""
    layout: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.strip().partition("=")
        if name not in DEGREES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--layout {part!r}: write e.g. tp=2,ep=2, with sizes of {', '.join(DEGREES)}")
        layout[name] = int(size)
    return layout


def world_size(layout: dict[str, int]) -> int:
    """Return the number of ranks of one model copy: pp · lcm(tp·cp, ep·etp)."""
    pp = layout.get("pp", 1)
    dense = layout.get("tp", 1) * layout.get("cp", 1)
    experts = layout.get("ep", 1) * layout.get("etp", 1)
    size = max(dense, experts)
    while size % dense or size % experts:
        size += 1
    return size * pp


def tokens(vocab_size: int, seed: int) -> list[Any]:
    """Return random token sequences of lengths :data:`LENGTHS`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def reference(folder: Path, seed: int, out: Path) -> None:
    """Compute fp32 logits [sum of lengths, V] of the HF folder in transformers, and save them to ``out``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from skyrl_megatron import device

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = cast(Any, model).to(device.device()).eval()
    with torch.no_grad():
        rows = [
            model(sequence[None].to(model.device), use_cache=False).logits[0].float().cpu()
            for sequence in tokens(config.vocab_size, seed)
        ]
    torch.save(torch.cat(rows), out)


def rank_main(rank: int, port: int, args: argparse.Namespace, layout: dict[str, int], work: str) -> None:
    """Run one rank: compare its slice of the logits, and write the result to ``work/<rank>.json``."""
    import torch
    import torch.distributed as dist

    from skyrl_megatron import device
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.runtime import parallel_state

    count = world_size(layout)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    device.set_local_device(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, count, rank == 0, timeout)
    dist.init_process_group(device.collective_backend(), store=store, rank=rank, world_size=count, timeout=timeout)
    groups = parallel_state.initialize(ParallelConfig(count, **cast(dict[str, Any], layout)), timeout_s=TIMEOUT_S)
    differences = _compare(args, groups, torch.load(Path(work) / "reference.pt", mmap=True))
    (Path(work) / f"{rank}.json").write_text(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


def load_megatron(model: Any, groups: Any, folder: str | Path) -> None:
    """Load the chunks of ``model`` from a ``torch_dist`` folder with Megatron's own loader."""
    from megatron.core import dist_checkpointing

    wanted = {}
    for index, chunk in enumerate(model.chunks):
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        wanted[str(index)] = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    loaded = dist_checkpointing.load(wanted, str(folder))
    for index, chunk in enumerate(model.chunks):
        result = chunk.load_state_dict(loaded[str(index)], strict=False)
        missing = [key for key in result.missing_keys if not key.endswith("_extra_state")]
        assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)


def _compare(args: argparse.Namespace, groups: Any, expected: Any) -> dict[str, Any] | None:
    """Return the largest difference of this rank's logits; None for a rank without logits."""
    import torch

    from skyrl_megatron import device
    from skyrl_megatron.runtime.forward_step import run_schedule
    from skyrl_megatron.runtime.model.attention import local_positions
    from skyrl_megatron.runtime.model.build import build_model
    from skyrl_megatron.runtime.packed_inputs import pack
    from skyrl_megatron.types import rows_without_response

    model = build_model(args.hf, groups, dtype=torch.float32)
    load_megatron(model, groups, args.megatron)
    batch, rows = rows_without_response(tokens(model.vocab_size, args.seed)), len(LENGTHS)
    width = model.padded_vocab_size // groups.tp.size()
    first = groups.tp.rank() * width
    columns = slice(first, min(first + width, model.vocab_size))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()

    def forward_step(micro_batches: Any, chunk: Any) -> tuple[Any, Any]:
        row = next(micro_batches)
        packed = pack(batch.select([row]).padded(), groups, device.device())
        positions = local_positions(packed.padded_lengths, groups.cp.size(), groups.cp.rank())
        real = positions < LENGTHS[row]
        wanted = expected[starts[row] + positions[real], columns]

        def difference(logits: Any) -> tuple[Any, Any, float]:
            ours = logits.flatten(0, 1)[:, : columns.stop - columns.start].float().cpu()[real]
            error = float((ours - wanted).abs().max()) if ours.numel() else 0.0
            return torch.zeros(()), torch.ones((), dtype=torch.int), error

        return chunk(**packed.model_arguments()), difference

    with torch.no_grad():
        returned = run_schedule(forward_step, list(range(rows)), model.chunks, groups, forward_only=True)
    if not returned:
        return None
    worst = max(range(rows), key=returned.__getitem__)
    return {"max_abs_difference": returned[worst], "sequence": worst}


def main(argv: list[str] | None = None) -> int:
    """Run the comparison and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True)
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--layout", default="")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import torch

    layout = parse_layout(args.layout)
    with tempfile.TemporaryDirectory() as work:
        reference(args.hf, args.seed, Path(work) / "reference.pt")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn: Any = torch.multiprocessing.spawn
        spawn(rank_main, (port, args, layout, work), nprocs=world_size(layout))
        results = [json.loads(path.read_text()) for path in sorted(Path(work).glob("*.json"))]
        logits = torch.load(Path(work) / "reference.pt")
        worst = max((result for result in results if result), key=lambda result: result["max_abs_difference"])
        print(json.dumps(worst | {
            "layout": layout or "single",
            "reference_min": float(logits.min()),
            "reference_max": float(logits.max()),
            "sequences": len(LENGTHS),
            "tokens": sum(LENGTHS),
        }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
