"""The driver's cost of carrying a step's batch: ours, 062ad5f4's dense tensors, and verl 0.9.1's ``DataProto``.

    python benchmarks/run.py control_plane [--rivals-python RIVALS/bin/python] [--rows 512] [--limit 32768] …

One batch (log-normal answers, one at the limit), a step with a reference and mini-batches, a real object store, and an
actor that fetches as each rank in turn. Each side and size has a process of its own, with a Ray of its own. Measured
of the driver: peak of its own memory (anonymous pages, sampled from outside, above those at the step's start, where
it holds the sampled rows), processor seconds of all its threads, bytes put into the store by all processes, bytes
fetched by ranks, and "loop held", the longest time for which an event loop beside the step, as a run has one, could
not go on (and the most that the driver's thread computed in such a time). Sums over the trained tokens, which the
ranks return, must agree between sides; nothing else is asserted.
``--growth SIDES``: also at twice the limit with equal tokens, and at twice the rows. ``--curve``: also over rows,
limit and replicas.

The figures of the issue::

    python benchmarks/run.py control_plane --limit 131072 --mean 8000 --routes 48x8 --rivals-python RIVALS/bin/python
    python benchmarks/run.py control_plane --rows 8192 --limit 131072 --mean 8000 --sides ours --growth ''

verl has an environment of its own, which shares this one's packages (the last line makes it so)::

    python -m venv RIVALS
    RIVALS/bin/python -m pip install --no-deps verl==0.9.1 tensordict pyvers cloudpathlib orjson codetiming
    echo $PWD/.venv/lib/python3.12/site-packages > RIVALS/lib/python3.12/site-packages/project.pth

``verl`` puts chunks of the ``DataProto``; ``verl_unpadded`` does as its trainer: a ``DataProto`` in the driver, for
each pass a ``TensorDict`` with unpadded ids. Both put the batch of an update once, and ranks iterate over it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from plane_sides import DENSE_BYTES, SIDES, Engine, Inputs, Plane, Rank, Shape, Transfers, created_bytes

HERE = Path(__file__).resolve().parent
GIB, MIB = 1 << 30, 1 << 20
SAMPLED_S = 0.003
CURVES: dict[str, tuple[int, ...]] = {
    "rows": (512, 1024, 2048, 4096, 8192),
    "limit": (8_192, 16_384, 32_768, 65_536, 131_072),
    "replicas": (8, 16, 32, 64, 128),
}
ABSENT = "verl not installed: pip install --no-deps verl==0.9.1 in an environment of its own (--help says how)"
Result = dict[str, Any]


# ---------------------------------------------------------------------- one side, in its own process
def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes by the names of /proc/PID/status."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[0] in ("VmHWM:", "VmRSS:", "RssAnon:")}


@contextlib.contextmanager
def loop_watched() -> Iterator[list[float]]:
    """An event loop in a thread, as a run's; the list has the longest time for which it was held, in seconds, and the
    most that this thread computed in such a time: the rest is that of other processes, which take the cores."""
    longest, ended = [0.0, 0.0], threading.Event()
    clock = time.pthread_getcpuclockid(threading.get_ident())

    async def watch() -> None:
        while not ended.is_set():
            asked, spent = time.monotonic(), time.clock_gettime(clock)
            await asyncio.sleep(0.002)
            held = time.monotonic() - asked - 0.002
            longest[:] = max(longest[0], held), max(longest[1], min(held, time.clock_gettime(clock) - spent))

    thread = threading.Thread(target=asyncio.run, args=(watch(),))
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


def measure(side: str, shape: Shape, store: int, enough_s: float) -> Result:
    """The figures of a side, in this process."""
    import ray

    from skyrl_megatron.workers.ray_setup import local_ray

    with local_ray(4, object_store_bytes=store):
        transfers, carried = Transfers(), SIDES[side]()
        rank = ray.remote(num_cpus=1)(Rank).remote(side)
        engine = ray.remote(num_cpus=1)(Engine).remote(shape) if shape.layers else None
        tiny = replace(shape, rows=32, limit=64, mean=20.0, prompt=8, layers=0, topk=0, replicas=4, mini_batches=2)
        first = Plane(tiny, rank, engine)
        for actor in (rank, engine) if shape.layers else (rank,):
            first.watch(actor)
        carried.step(Inputs.of(tiny), first)  # imports, and the first use of each function
        first.transferred()
        gc.collect()
        gc.freeze()  # as a run does once it has started: Ray collects garbage now and then, which holds the GIL
        inputs = Inputs.of(shape)
        gc.collect()
        seconds: list[float] = []
        figures: Result = {}
        while not figures or (len(seconds) < 5 and sum(seconds) < enough_s):
            transfers.taken()
            created, plane = created_bytes(), Plane(shape, rank, engine, first.watched)
            if not figures:
                Path("/proc/self/clear_refs").write_text("5")
            before, began, spent = memory(), time.monotonic(), time.process_time()
            with loop_watched() as held:
                answer = carried.step(inputs, plane)
            seconds.append(time.process_time() - spent)
            ended, after = time.monotonic(), memory()
            if not figures:  # memory of later steps would hide in what the first one left to the allocator
                got, put, sizes = transfers.taken()
                remote = plane.transferred()
                of_all = [amount for _, by_object, _ in remote for amount in by_object.values()]
                amounts = remote[0][2] | put  # of an object that the driver did not put: as the rank saw it
                for _, by_object, _ in remote:
                    amounts |= by_object
                figures = {
                    "began": began,
                    "ended": ended,
                    "anonymous": before["RssAnon"],
                    "mapped": after["VmHWM"] - before["VmRSS"],
                    "driver_put": sum(put.values()),
                    "driver_got": sum(sizes[reference] for reference in got),
                    "put": sum(put.values()) + sum(of_all),
                    "fetched": sum(amounts[reference] for reference in remote[0][0]),
                    "created": created_bytes() - created,
                    "wall": ended - began,
                    "held": held[0],
                    "busy": held[1],
                    "phases": plane.seconds,
                    "sums": [float(value) for value in answer],
                }
        return figures | {"seconds": min(seconds), "rounds": len(seconds)}


def one(text: str) -> int:
    """Run the side that the coordinator asks for, and print its figures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever packages print goes to stderr
    asked = json.loads(text)
    if asked["side"].startswith("verl") and not importlib.util.find_spec("verl"):
        result: Result = {"refused": ABSENT}
    else:
        result = measure(asked["side"], Shape(**asked["shape"]), asked["store"], asked["enough_s"])
        if asked["side"].startswith("verl"):
            result["version"] = importlib.metadata.version("verl")
    print(json.dumps(result), file=answers, flush=True)
    return 0


# ---------------------------------------------------------------------- the coordinator
class Runs:
    """Starts a process for each side and size, and watches its memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.store = int(options.store_gib * GIB)
        self.results: list[Result] = []

    def budget(self) -> int:
        """Bytes that a driver may use."""
        free = int(psutil.virtual_memory().available) - self.store - GIB
        return free if self.options.memory_gib is None else min(free, int(self.options.memory_gib * GIB))

    def refusal(self, side: str, shape: Shape) -> str | None:
        """Why a size is not tried on a dense side."""
        if side not in DENSE_BYTES:
            return None
        if side.startswith("verl"):
            if self.options.rivals_python is None:
                return f"{ABSENT}; --rivals-python names its interpreter"
            if shape.layers:
                return "routes are dense there too, and not measured"
            if shape.rows % shape.replicas:
                return f"{shape.rows} rows: a DataProto is cut into equal chunks only, here {shape.replicas}"
        needed, budget = DENSE_BYTES[side] * shape.positions + 2 * shape.route_bytes(), self.budget()
        if needed > budget:
            return f"needs about {needed / GIB:.1f} GiB of the driver, {budget / GIB:.1f} GiB are free: not tried"
        return None

    def run(self, side: str, shape: Shape) -> Result:
        """The figures of a side at a size, or {"refused": why}. Prints a line of them."""
        refused = self.refusal(side, shape)
        result: Result = {"refused": refused} if refused else self._measured(side, shape)
        result |= {"side": side, "shape": asdict(shape)}
        self.results.append(result)
        if "refused" in result:
            print(f"  {side:<14}{result['refused']}", flush=True)
            return result
        payload = shape.payload()
        print(
            f"  {side:<14}{result['peak'] / MIB:9.1f} MiB{result['seconds']:9.3f} s{result['put'] / MIB:10.1f} MiB"
            f"{result['fetched'] / MIB:10.1f} MiB{result['put'] / payload:8.2f}x{result['wall']:8.1f} s"
            f"{result['held'] * 1e3:9.0f} ms ({result['busy'] * 1e3:.0f})",
            flush=True,
        )
        return result

    def _measured(self, side: str, shape: Shape) -> Result:
        enough = self.options.enough_s
        asked = json.dumps({"side": side, "shape": asdict(shape), "store": self.store, "enough_s": enough})
        python = self.options.rivals_python if side.startswith("verl") else sys.executable
        path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        command = [python, str(HERE / "control_plane.py"), "--one", asked]
        budget, stopped = self.budget(), ""
        samples: list[tuple[float, int]] = []
        deadline = time.monotonic() + self.options.timeout_s
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
            while process.poll() is None:
                try:
                    samples.append((time.monotonic(), memory(process.pid)["RssAnon"]))
                except (OSError, KeyError):  # it has just ended
                    continue
                if samples[-1][1] > budget:
                    stopped = f"stopped at {samples[-1][1] / GIB:.1f} GiB of the driver: no more is free"
                elif samples[-1][0] > deadline:
                    stopped = f"stopped after {self.options.timeout_s:g} s: --timeout-s allows more"
                if stopped:
                    end(process)
                time.sleep(SAMPLED_S)
            assert process.stdout is not None
            answer = process.stdout.read().decode()
            process.stdout.close()
            if stopped:
                return {"refused": stopped}
            if process.returncode:
                errors.seek(0)
                raise SystemExit(f"{side} failed:\n{errors.read().decode()[-4000:]}")
        result: Result = json.loads(answer)
        if "refused" not in result:
            within = [size for when, size in samples if result["began"] <= when <= result["ended"]]
            result["peak"] = max([*within, result["anonymous"]]) - result["anonymous"]
        return result


def end(process: subprocess.Popen[bytes]) -> None:
    """End a side and the Ray that it started."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in children:
        if child.is_running():
            child.kill()


def agree(results: Sequence[Result]) -> bool:
    """Whether all sides trained the same tokens with the same values."""
    sums = [result["sums"][:4] for result in results if "sums" in result]
    return all(abs(a - b) <= 1e-5 * max(abs(a), 1.0) for given in sums for a, b in zip(sums[0], given, strict=True))


def ratio(a: Result, b: Result, figure: str) -> float | None:
    """A figure of ``a`` over that of ``b``; None where one was not measured."""
    return a[figure] / b[figure] if figure in a and b.get(figure) else None


def verdict(name: str, value: float | None, bound: float, *, least: bool = False, unit: str = "x") -> None:
    """Print a figure of the issue and whether it is met."""
    if value is None:
        print(f"  {name:<66}not measured")
        return
    met = value >= bound if least else value <= bound
    said = "pass" if met else "fall short"
    print(f"  {name:<66}{value:9.3f}{unit}  wanted {'≥' if least else '≤'} {bound:g}{unit}  {said}")


def header(shape: Shape) -> None:
    routes = f", routes {shape.layers}x{shape.topk} ({shape.route_bytes() / MIB:.0f} MiB)" if shape.layers else ""
    answers = shape.answers()
    print(
        f"\n{shape.rows} rows, limit {shape.limit}, {answers.sum() + shape.rows * shape.prompt} tokens"
        f" (answers: mean {answers.mean():.0f}, median {sorted(answers)[len(answers) // 2]}), "
        f"dp {shape.replicas}, {shape.mini_batches} mini-batches{', reference' if shape.reference else ''}{routes};"
        f" payload {shape.payload() / MIB:.1f} MiB, in the types of 062ad5f4 {shape.dense_payload() / MIB:.1f} MiB"
    )
    columns = f"{'driver peak':>13}{'processor':>11}{'put':>14}{'fetched':>14}{'/payload':>9}{'wall':>10}"
    print(f"  {'side':<14}{columns}{'loop held':>12}")


def curve_shapes(shape: Shape) -> Iterator[tuple[str, Shape]]:
    for name, values in CURVES.items():
        for value in values:
            yield name, replace(shape, **{name: value})


def main() -> int:
    from smoke import parse

    if sys.argv[1:2] == ["--one"]:
        return one(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--limit", type=int, default=32_768, help="tokens of the longest answer")
    parser.add_argument("--mean", type=float, default=4_000.0, help="mean tokens of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="rows of a prompt")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--reference", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--routes", default="8x8", help="layers x top-k of the sizes with routes; 0x0: none")
    parser.add_argument("--sides", default="today,ours,verl", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--growth", default="ours", help="sides to measure at twice the limit and twice the rows")
    parser.add_argument("--curve", action="store_true", help="over rows, limit and replicas")
    parser.add_argument("--rivals-python", help="interpreter of verl's environment")
    parser.add_argument("--memory-gib", type=float, help="what a driver may use; default: what is free")
    parser.add_argument("--store-gib", type=float, default=1.0, help="size of the object store, which spills to disk")
    parser.add_argument("--enough-s", type=float, default=2.0, help="repeat a step up to 5 times below these seconds")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one side at one size")
    parser.add_argument("--json", help="file for all figures")
    tiny = {"rows": 64, "limit": 256, "mean": 64.0, "prompt": 16, "replicas": 4, "store_gib": 0.125, "growth": ""}
    options = parse(parser, **tiny, enough_s=0.0)
    sides = options.sides.split(",")
    options.growth = [side for side in options.growth.split(",") if side]
    if unknown := {*sides, *options.growth} - set(SIDES):
        parser.error(f"--sides, --growth: no {', '.join(sorted(unknown))}; choose of {', '.join(SIDES)}")
    if options.mean > options.limit or options.rows < max(options.replicas, 2):
        parser.error("--mean is at most --limit, and --rows at least --replicas")
    names = ("rows", "limit", "mean", "sigma", "prompt", "replicas", "mini_batches", "reference", "samples")
    shape = Shape(**{name: getattr(options, name) for name in names}, layers=0, topk=0)
    runs = Runs(options)
    same = compared(runs, shape, sides)
    if options.curve:
        curves(runs, shape, sides)
    if options.json:
        Path(options.json).write_text(json.dumps(runs.results, indent=1))
    if not same:
        print("the sides trained on different values", file=sys.stderr)
    return 0 if same else 1


def compared(runs: Runs, shape: Shape, sides: Sequence[str]) -> bool:
    """Print the sides at one size, how the first two grow, and the figures of the issue. Returns :func:`agree`."""
    header(shape)
    base = {side: runs.run(side, shape) for side in sides}
    same = agree(list(base.values()))
    grown: dict[str, dict[str, Result]] = {}
    growing = [side for side in runs.options.growth if side in sides]
    for name in ("limit", "rows") if growing else ():
        larger = replace(shape, **{name: 2 * getattr(shape, name)})
        header(larger)
        grown[name] = {side: runs.run(side, larger) for side in growing}
    layers, topk = map(int, runs.options.routes.split("x"))
    with_routes = replace(shape, layers=layers, topk=topk)
    routed: dict[str, Result] = {}
    if layers:
        header(with_routes)
        routed = {side: runs.run(side, with_routes) for side in sides if not side.startswith("verl")}
        same &= agree(list(routed.values()))
        same &= len({result["sums"][4] for result in routed.values() if "sums" in result}) <= 1
    nothing: Result = {}
    ours, today = base.get("ours", nothing), base.get("today", nothing)
    verl = base.get("verl", nothing)
    print("\nfigures of the issue")
    payload = shape.payload()
    verdict("bytes put for a step / payload", ours["put"] / payload if "put" in ours else None, 1.2)
    if "put" in ours:
        print(f"    {ours['put'] / shape.dense_payload():.2f}x of the payload in the types of 062ad5f4")
    verdict("driver's peak memory, ours / today", ratio(ours, today, "peak"), 0.1)
    verdict("driver's processor seconds, ours / today", ratio(ours, today, "seconds"), 0.1)
    if layers:
        bytes_of = {
            side: 100 * (through(routed[side]) - through(base[side])) / with_routes.route_bytes()
            for side in routed
            if "put" in routed[side] and "put" in base[side]
        }
        verdict("routes through the driver / their bytes", bytes_of.get("ours"), 1.0, unit=" %")
        print(f"    today {bytes_of['today']:.0f} %" if "today" in bytes_of else "    today not measured")
    for side in growing:
        for name, bound, words in (("limit", 1.05, "twice the limit, equal tokens"), ("rows", 2.1, "twice the rows")):
            for figure, unit in (("seconds", "processor"), ("peak", "memory")):
                value = ratio(grown[name][side], base[side], figure) if name in grown else None
                verdict(f"{words}, {unit}, {side}", value, bound)
    for name in (side for side in sides if side.startswith("verl")):
        verdict(f"driver's peak memory, {name} / ours", ratio(base.get(name, nothing), ours, "peak"), 10, least=True)
    for what, figure in {"memory": "peak", "processor": "seconds", "put": "put", "fetched": "fetched"}.items():
        against = {"today": today, "verl": verl, "verl_unpadded": base.get("verl_unpadded", nothing)}
        values = {name: ratio(ours, other, figure) for name, other in against.items()}
        print(f"  ours / {what:<12}" + "".join(f"{k} {v:.3f}x   " for k, v in values.items() if v is not None))
    if "peak" in ours:
        verdict("driver's peak memory, ours, at this size", ours["peak"] / GIB, 4.0, unit=" GiB")
    return same


def through(result: Result) -> int:
    """Bytes that passed through the driver: put by it, or fetched by it."""
    return int(result["driver_put"] + result["driver_got"])


def curves(runs: Runs, shape: Shape, sides: Sequence[str]) -> None:
    """Print the sides over rows, limit and replicas."""
    for name, larger in curve_shapes(shape):
        if larger.rows >= larger.replicas and larger.mean <= larger.limit:
            print(f"\ncurve over {name}: {getattr(larger, name)}", end="")
            header(larger)
            for side in sides:
                runs.run(side, larger)


if __name__ == "__main__":
    sys.exit(main())
