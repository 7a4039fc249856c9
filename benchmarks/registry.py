"""Lookup of a registered function while Ray is up, against asking the registry's actor, as SkyRL does at each lookup.

python benchmarks/run.py registry
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

from skyrl_megatron.algorithms.losses import PolicyLossRegistry
from skyrl_megatron.algorithms.registry import registry_versions


def fastest(function: Callable[[], object], calls: int, rounds: int = 5) -> float:
    """Seconds a call, in the fastest of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lookups", type=int, default=100_000)
    lookups = parse(parser, lookups=100).lookups
    ray.init(address="local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
    PolicyLossRegistry.register("mine", lambda: None)
    lookup = fastest(lambda: PolicyLossRegistry.get("mine"), lookups)
    builtin = fastest(lambda: PolicyLossRegistry.get("regular"), lookups)
    round_trip = fastest(registry_versions, 200)
    ray.shutdown()
    print(f"get, custom function     {1e6 * lookup:8.3f} µs   (wanted: below 5)")
    print(f"get, built-in function   {1e6 * builtin:8.3f} µs")
    print(f"asking the actor         {1e6 * round_trip:8.1f} µs   {round_trip / lookup:.0f}x a lookup")


if __name__ == "__main__":
    main()
