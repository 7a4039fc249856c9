"""A version of weights as what changed since the one before, against all of them: bytes, and seconds in a folder.

    python benchmarks/run.py weight_versions [--millions 200] [--rounds 3]

bfloat16 weights in matrices of 2,048 columns, of which a step changes one element in 1,000, one in 100, one in 20 or
one in 5 (drawn at random). In one run: publishing the change, taking it on in a reader, and writing all weights with
``safetensors``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=200, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, millions=9, rounds=1)
    import torch
    from safetensors.torch import save_file

    from skyrl_megatron_tools.weight_versions import VersionReader, VersionWriter

    torch.set_num_threads(1)
    tensors = {f"layers.{n}.weight": torch.randn(2048, 2048).bfloat16() for n in range(args.millions * 10**6 >> 22)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        writer, reader = VersionWriter(f"{root}/store", base_every=10**6), VersionReader(f"{root}/store")
        writer.publish("first", tensors.items())
        reader.update()
        for number in range(args.rounds):
            began = time.perf_counter()
            save_file(tensors, f"{root}/whole.safetensors")
            found["write all"].append(time.perf_counter() - began)
            for part in (1000, 100, 20, 5):
                for tensor in tensors.values():
                    tensor.view(torch.int16)[torch.rand(tensor.shape) < 1 / part] ^= 1
                began = time.perf_counter()
                done = writer.publish(f"{number} {part}", tensors.items())
                found[f"publish {part}"].append(time.perf_counter() - began)
                began = time.perf_counter()
                reader.update()
                found[f"read {part}"].append(time.perf_counter() - began)
                found[f"bytes {part}"] = [done.nbytes]
        assert all(torch.equal(tensor, reader.tensors[name]) for name, tensor in tensors.items())
    median = {name: statistics.median(values) for name, values in found.items()}
    print(f"{nbytes / 1e6:.0f} MB of bfloat16; all of it is written in {median['write all']:.2f} s")
    for part in (1000, 100, 20, 5):
        share = median[f"bytes {part}"] / nbytes
        print(
            f"1 in {part:4d} changed: {share:7.2%} of the bytes, {share * part * 2:.2f} bytes each; "
            f"published {median[f'publish {part}']:.2f} s, taken on {median[f'read {part}']:.2f} s"
        )


if __name__ == "__main__":
    main()
