"""How long a start takes: on two hosts against one, and with more and more hosts. Hosts are network namespaces: needs
root and what ``launch/setup.sh ci`` installs.

python benchmarks/run.py cluster_start runs [ROUNDS]      from sbatch to a first step on two hosts, against a local one
python benchmarks/run.py cluster_start nodes [2 4 8 16]   real Ray nodes without work, a host each
python benchmarks/run.py cluster_start table [64 256]     what is asked of every host, from a recorded one; no process
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.two_hosts import TwoHosts, why_not

ROOT = Path(__file__).resolve().parents[1]
WANTED_RATIO = 1.3
DEADLINE_S = 1200.0
SMALL_STORE = "--object-store-memory=78643200"
FIRST_STEP = [
    "--recipe=embedded",
    "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16",
    "trainer.update_epochs_per_batch=1",
    "trainer.max_training_steps=1",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.hf_save_interval=0",
    "trainer.algorithm.zero_variance_filter=false",
]
OVER_BOTH = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=1"]
IN_CLUSTER = """
import json, sys, time
from skyrl_megatron.workers.ray_setup import join
from skyrl_megatron.workers.nodes import check_nodes
from ray.util.placement_group import placement_group
import os, ray
marks = [time.time()]
join(os.environ["RAY_ADDRESS"]); marks.append(time.time())
check_nodes(sys.argv[2:]); marks.append(time.time())
ray.get(placement_group([{"CPU": 1}] * int(sys.argv[1]), strategy="STRICT_SPREAD").ready(), timeout=300)
marks.append(time.time())
print(json.dumps(marks))
"""


# ------------------------------------------------------------------ two hosts against one
def runs(rounds: int) -> None:
    from skyrl_megatron.tiny_model import write_embedded_model

    with tempfile.TemporaryDirectory(prefix="s") as temporary:
        folder = Path(temporary)
        model = write_embedded_model(folder / "m", 42)
        hosts = TwoHosts(folder)
        try:
            for number in range(rounds):
                here = _local(folder / f"local{number}", model)
                both = _by_sbatch(hosts, folder / f"both{number}", model)
                for name in dict.fromkeys([*both, *here]):
                    print(f"{name:34}{here.get(name, 0):8.1f} s{both.get(name, 0):8.1f} s")
                name = "timing/to_first_step"
                ratio = both[name] / here[name]
                print(f"two hosts / local: {ratio:.2f} (wanted: {WANTED_RATIO}), load {os.getloadavg()[0]:.1f}\n")
        finally:
            hosts.down()


def _arguments(folder: Path, model: Path) -> list[str]:
    paths = [f"trainer.{name}_path={folder}/{name}" for name in ("ckpt", "export", "log")]
    return [*FIRST_STEP, f"model={model}", *paths]


def _local(folder: Path, model: Path) -> dict[str, float]:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    command = [str(ROOT / "launch" / "run_moe.sh"), *_arguments(folder, model)]
    subprocess.run(command, env=environment, cwd=folder, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    return _start(folder)


def _by_sbatch(hosts: TwoHosts, folder: Path, model: Path) -> dict[str, float]:
    script = ROOT / "launch" / "slurm" / "run_moe.sbatch"
    job = hosts.submit(script, *_arguments(folder, model), *OVER_BOTH, options=("--nodes=2", "--time=60"))
    hosts.await_state(job, "COMPLETED", within_s=DEADLINE_S)
    return _start(folder)


def _start(folder: Path) -> dict[str, float]:
    (file,) = (folder / "log").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (first,) = [line for line in lines if line["step"] == 1]
    return {name: first[name] for name in first if name.startswith(("timing/start/", "timing/to_first_step"))}


# ------------------------------------------------------------------ real nodes without work
def nodes(counts: Sequence[int]) -> None:
    table = {}
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="s") as temporary:
            hosts = TwoHosts(Path(temporary), slurm=False, count=count)
            try:
                table[count] = _members(hosts, count)
            finally:
                hosts.down()
        print(
            f"{count:3} hosts  " + "  ".join(f"{name} {took:.1f} s" for name, took in table[count].items()), flush=True
        )
    _growth(table)


def _members(hosts: TwoHosts, count: int) -> dict[str, float]:
    """Seconds of each part of a cluster's life, with no work in it.

    Hosts are started one after the other: all at once they would share these cores, which real ones do not, and Ray
    gives its agents 15 s.
    """
    from skyrl_megatron_tools.cluster.hosts import ClusterFolder

    cluster, shared = hosts.folder / "c", hosts.folder / "shared"
    cluster.mkdir()
    command = [sys.executable, "-c", IN_CLUSTER, str(count), str(shared)]
    options = [f"--dir={cluster}", "--interface=eth0", f"--of={count}", f"--within={DEADLINE_S}", "--port=24000"]
    options += ["--ray=--num-cpus=1", f"--ray={SMALL_STORE}"]
    environment = hosts.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    members: list[subprocess.Popen[bytes]] = []
    joined = [time.time()]
    for number, host in enumerate(hosts.workers):
        words = [ROOT / "launch" / "ray_cluster.sh", "member", *options, f"--number={number}", "--", *command]
        with (hosts.folder / f"{host}.out").open("w") as out:
            members.append(subprocess.Popen(hosts.command(host, *words), stdout=out, stderr=out, env=environment))
        while len(ClusterFolder(cluster).ready()) <= number and members[-1].poll() is None:
            time.sleep(0.1)
        joined.append(time.time())
    before, busy = _processor_time(members[1:]), 0.0
    while members[0].poll() is None:
        busy = max(busy, (_processor_time(members[1:]) - before) / (time.time() - joined[-1]))
        time.sleep(0.2)
    codes = [member.wait(DEADLINE_S) for member in members]
    ended = time.time()
    print(f"{count:3} hosts  the other hosts' Rays took {busy:.2f} of {os.cpu_count()} cores meanwhile", flush=True)
    said = (hosts.folder / "n1.out").read_text()
    if any(codes):
        raise SystemExit(f"{count} hosts: exit codes {codes}\n{said}")
    marks = json.loads(next(line for line in said.splitlines() if line.startswith("[")))
    names = ("first host", "others", "imports", "join", "nodes compared", "placement", "end")
    times = [*joined[:2], joined[-1], *marks, ended]
    return {name: after - before for name, (before, after) in zip(names, pairwise(times), strict=True)}


def _processor_time(members: Sequence[subprocess.Popen[bytes]]) -> float:
    """Seconds of the processor that hosts' parts and what they started have used."""
    used = 0.0
    for member in members:
        for process in psutil.Process(member.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:2])
    return used


# ------------------------------------------------------------------ many hosts from a recorded one
def table(counts: Sequence[int]) -> None:
    measured = {count: _from_table(count) for count in counts}
    for count, parts in measured.items():
        print(f"{count:3} hosts  " + "  ".join(f"{name} {took * 1e3:.2f} ms" for name, took in parts.items()))
    _growth(measured)


def _from_table(count: int) -> dict[str, float]:
    """Seconds of what the first host does with the records and reports of ``count`` hosts, the best of five."""
    from skyrl_megatron.workers.nodes import differences, report, versions
    from skyrl_megatron_tools.cluster.hosts import ClusterFolder, Member

    here, own = report(), versions()
    reports = {
        f"10.0.{number // 250}.{number % 250}": dataclasses.replace(here, host=f"n{number}") for number in range(count)
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = ClusterFolder.make(Path(temporary) / "c")

        def join() -> None:
            for number, address in enumerate(reports):
                folder.join(Member(number, f"n{number}", address, 1, 0.0, ready=True))

        def compare() -> None:
            assert not [each for address, found in reports.items() for each in differences(address, found, own)]

        def look() -> None:
            assert len(folder.ready()) == count and not folder.failures()

        return {"records written": _best(join), "a look at them": _best(look), "versions compared": _best(compare)}


def _best(work: Callable[[], None]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def _growth(measured: dict[int, dict[str, float]]) -> None:
    """Print by how much each part grows from one number of hosts to the next, against the hosts."""
    for (few, before), (many, after) in pairwise(measured.items()):
        grown = "  ".join(f"{name} {after[name] / max(before[name], 1e-9):.2f}x" for name in after)
        print(f"{few} -> {many} hosts ({many / few:g}x): {grown}")


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("runs", "nodes", "table"), default="table")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    args = parse(parser, numbers=[2, 4])
    kind, given = args.kind, args.numbers
    if kind == "table":
        return table(given or [64, 256])
    os.environ["SKYRL_TWO_HOSTS"] = "1"
    if reason := why_not():
        raise SystemExit(reason)
    return runs(*(given or [1])) if kind == "runs" else nodes(given or [2, 4, 8, 16])


if __name__ == "__main__":
    main()
