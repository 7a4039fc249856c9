"""Seconds that importing the configuration takes, beside importing OmegaConf alone: fresh processes, alternating.

python benchmarks/run.py config_import [--rounds 11]
"""

import argparse
import statistics
import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parse(parser, rounds=1).rounds
    modules = ("skyrl_megatron.config", "skyrl_megatron.config.validate", "omegaconf")
    times: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(rounds):
        for module in modules:
            times[module].append(seconds(module))
    rival = statistics.median(times["omegaconf"])
    for module in modules:
        median, worst = statistics.median(times[module]), max(times[module])
        print(
            f"{module:32} median {median * 1e3:6.1f} ms, worst {worst * 1e3:6.1f} ms, {median / rival:.2f}x omegaconf"
        )


if __name__ == "__main__":
    main()
