"""From a typo to its message: seconds of the whole command, for each mistake of ``tests/first_hour/mistakes.py``.

python benchmarks/run.py first_hour [NAME ...]      the rows whose names contain one of the words; without any, all
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.first_hour.mistakes import MISTAKES, Mistake, command_line, write_files

ROOT = Path(__file__).resolve().parents[1]
WANTED_S = 10.0


def seconds(mistake: Mistake, files: Path, folder: Path) -> float:
    """Seconds until the command has ended with the mistake's message: the run as a user starts it, not ``--check``."""
    shutil.copytree(files, folder)
    command = [sys.executable, "-P", "-m", "skyrl_megatron_tools.embedded.run_moe", *command_line(folder, mistake)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "WANDB_API_KEY")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **mistake.environment}
    with mistake.holds():
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        took = time.perf_counter() - began
    if done.returncode != 2 or not all(words in done.stderr for words in mistake.says):
        raise SystemExit(f"{mistake.name}: exit code {done.returncode}\n{done.stderr}")
    return took


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", default=[""], metavar="NAME")
    words = parse(parser, words=["logs below a file"]).words
    chosen = [mistake for mistake in MISTAKES if any(word in mistake.name for word in words)]
    with tempfile.TemporaryDirectory() as temporary:
        files = write_files(Path(temporary) / "files")
        took = {}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for number, mistake in enumerate(chosen):
            took[mistake.name] = seconds(mistake, files, Path(temporary) / str(number))
            print(f"{mistake.name:<36}{took[mistake.name]:6.1f} s", flush=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(took)
    slowest = max(took, key=lambda name: took[name])
    median = statistics.median(took.values())
    print(
        f"from a typo to its message: median {median:.1f} s over {len(took)} mistakes (wanted: below {WANTED_S:g} s), "
        f"slowest {took[slowest]:.1f} s ({slowest}); {processor:.1f} s of processor time each, "
        f"load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
