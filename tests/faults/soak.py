"""A small run under random faults: ``launch/soak.sh MINUTES SEED``.

Each life of the run continues from the one before and meets a fault that the seed chose; in half of them lost ranks
are replaced. After each are checked: one message and an exit code where it ended, no process or shared memory left,
the newest checkpoint whole, every step logged once, every version that was served proven by its probe, and that nobody
waited for a process that was dead. Exit code 0: all held; 1: not all.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.lives import Life, Lives
from tests.faults.words import DEATHS

WHO = ("driver", "policy 0", "policy 1", "engine core", "engine worker", "gcs_server", "raylet")
WHAT = ("SIGKILL", "SIGSEGV", "slow")
PHASES = ("generate", "fwd_logprobs_values_reward", "policy_train", "save_checkpoints", "sync_weights")
SHARED_MEMORY = "/dev/shm"
PROBE = "trainer/weight_sync_probe_max_abs_diff"


def chosen(rng: random.Random) -> tuple[str, str, str, float]:
    """(who, what, phase, seconds after its begin)."""
    if rng.random() < 0.15:
        return "policy 0", "full disk", "save_checkpoints", 0.0
    who, what = rng.choice([(who, what) for who in WHO for what in WHAT if (who, what) != ("driver", "slow")])
    return who, what, rng.choice(PHASES), rng.choice((0.01, 0.1, 0.5))


def problems(lives: Lives, life: Life, what: str, shared: set[str]) -> list[str]:
    """List what does not hold after a life that met ``what``, besides what :meth:`Lives.live` checks itself."""
    found = []
    if life.run.returncode > 0 and (not life.message or "Traceback" in life.message):
        found.append(f"it did not end with one message: {life.message[-2000:]!r}")
    steps = [int(line["step"]) for line in lives.lines] if life.saved else []
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"steps that were logged: {steps}")
    if len(steps) < life.saved - 1:
        found.append(f"saved is step {life.saved}, logged are {len(steps)}")
    if unproven := [line["step"] for line in lives.lines if line.get(PROBE) is None] if life.saved else []:
        found.append(f"versions without a probe: of steps {unproven}")
    if what in DEATHS and life.waited:
        found.append(f"it waited for what was dead: {life.waited}")
    if left := set(os.listdir(SHARED_MEMORY)) - shared:
        found.append(f"shared memory is left: {sorted(left)}")
    return found


def soak(minutes: float, seed: int, folder: Path) -> int:
    """Return the exit code."""
    rng, end, lives, number = random.Random(seed), time.monotonic() + 60 * minutes, Lives(folder), 0
    shared = set(os.listdir(SHARED_MEMORY))
    while time.monotonic() < end:
        number += 1
        who, what, phase, delay_s = chosen(rng)
        heals = rng.random() < 0.5
        fault = f"{who!r}, {what!r}, {phase!r}, {lives.saved + rng.choice((0, 1))}, delay_s={delay_s}, lasts_s=20"
        began, line = time.monotonic(), f"life {number}: {who} · {what} · {phase}{' · heals' if heals else ''}"
        try:
            keys = {"trainer__max_training_steps": lives.saved + 3, "trainer__healing__enabled": str(heals).lower()}
            life = lives.live(fault, **keys)
            wrong = problems(lives, life, what, shared)
        except AssertionError as error:
            wrong = [str(error)]
        if wrong:
            print(f"{line}: FAILED, seed {seed}, files in {folder}", *wrong, sep="\n  ", flush=True)
            return 1
        how = "continued" if life.run.returncode == 0 else f"ended with {life.run.returncode}"
        print(f"{line}: {how}, step {life.saved} saved, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{number} lives, {len(lives.faults)} faults, {lives.saved} steps, seed {seed}: everything held")
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="launch/soak.sh", description=__doc__)
    parser.add_argument("minutes", type=float, metavar="MINUTES")
    parser.add_argument("seed", type=int, metavar="SEED")
    args = parser.parse_args()
    return soak(args.minutes, args.seed, Path(tempfile.mkdtemp(prefix="soak-")))


if __name__ == "__main__":
    sys.exit(main())
