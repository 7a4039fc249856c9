"""A run whose engines come and go: one joins in its middle and leaves again, and the numbers stay what they were.

In deterministic mode tokens depend on seeds alone. The log-probs of an engine depend, by rounding, on what it batches,
so that what is computed of them is compared within that.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.job import runs

pytestmark = [pytest.mark.vllm, pytest.mark.full_matrix, pytest.mark.timeout(1800)]
ENGINE = "generator__inference_engine__"
STEPS = 6
DETERMINISTIC = {
    "trainer__deterministic": "true",
    "trainer__max_training_steps": STEPS,
    "trainer__ckpt_interval": 0,
}
REGISTRY = {f"{ENGINE}enable_registry": "true", f"{ENGINE}registry_port": 0}
MACHINE = re.compile(
    r"^(timing|memory|estimate)/|trajectory_time|_per_second|peak_memory_bytes|weight_sync_probe|_slowest_rank|_stragglers"
)
OF_ENGINES = re.compile(r"rollout_train_logprobs")

WAITS_FOR_ENGINES = """
import time
ENGINES = {engines}
def collect_experience(self):
    wanted, pool = ENGINES.get(self.global_step), self.inference_engine_client.pool
    while wanted and [slot.state.value for slot in pool.slots] != ["serving"] * wanted:
        time.sleep(0.1)
    answered = [slot.answered for slot in pool.slots]
    batch = RayPPOTrainer.collect_experience(self)
    if wanted:
        busy = sum(slot.answered > before for slot, before in zip(pool.slots, answered))
        print("step", self.global_step + 1, "by", busy, flush=True)
    return batch
Trainer.collect_experience = collect_experience
"""


def serve(folder, line, log):
    """The command that starts an engine for a run which said ``line``."""
    url, token = re.fullmatch(r"registry: (\S+), token in (\S+)", line).groups()
    command = [sys.executable, "-m", "skyrl_megatron_tools.remote.serve_engine", f"--model={folder}/model"]
    command += [f"--registry={url}", f"--token-file={token}", "--max-num-seqs=16", f"--log-file={log}"]
    return subprocess.Popen(command, env=runs.environment(folder), stdout=log.with_suffix(".out").open("w"))


def until_line(process, text, lines):
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(text):
            return line.rstrip()
    raise AssertionError(f"the run ended without {text!r}: {lines[-20:]} {process.stderr.read()[-4000:]}")


def metrics(folder, ignored):
    run = runs.Run(0, "", "", folder)
    return [{k: v for k, v in line.items() if not (MACHINE.search(k) or ignored.search(k))} for line in run.lines]


def test_an_engine_that_joins_and_leaves_changes_no_number(tmp_path):
    plain, elastic = (runs.prepare(tmp_path / name) for name in ("plain", "elastic") if not (tmp_path / name).mkdir())
    runs.run(plain, **DETERMINISTIC).check()
    body = WAITS_FOR_ENGINES.replace("{engines}", "{1: 2, 2: 2, 3: 2, 4: 1, 5: 1}")
    run, engine, lines = runs.start(elastic, body, **DETERMINISTIC, **REGISTRY), None, []
    try:
        engine = serve(elastic, until_line(run, "registry: ", lines), elastic / "engine.log")
        until_line(run, "step 4/6", lines)
        engine.terminate()
        assert engine.wait(120) == 0
        out, err = run.communicate(timeout=runs.TIMEOUT_S)
    finally:
        run.kill()
        if engine is not None:
            engine.kill()
    assert run.returncode == 0, err[-4000:]
    lines += out.splitlines()
    by = [line for line in lines if re.match(r"step \d by", line)]
    assert by == ["step 2 by 2", "step 3 by 2", "step 4 by 2", "step 5 by 1", "step 6 by 1"]
    joined = [line for line in lines if line.startswith("engine 1 (http://127.0.0.1:")]
    assert [line.rpartition(") ")[2] for line in joined] == [
        "joining",
        "serving with version 1",
        "left, 0 requests moved to others",
    ]
    assert metrics(elastic, OF_ENGINES) == metrics(plain, OF_ENGINES)
    for line in runs.Run(0, "", "", elastic).lines:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4
    assert (elastic / "engine.out").read_text().splitlines()[-1].startswith("engine-1: left after ")


def test_a_run_on_engines_elsewhere_alone_that_lose_one(tmp_path):
    """No engine of its own: two join before it starts, one of them is killed while it samples."""
    folder = runs.prepare(tmp_path)
    keys = REGISTRY | {f"{ENGINE}run_engines_locally": "false", f"{ENGINE}registry_min_engines": 2}
    keys |= {"trainer__phase_timeout_s": 900}  # two servers start at the same time as the ranks
    run, lines, engines = runs.start(folder, trainer__max_training_steps=STEPS, **keys), [], []
    try:
        line = until_line(run, "registry: ", lines)
        engines = [serve(folder, line, folder / f"engine_{number}.log") for number in range(2)]
        until_line(run, "step 2/6", lines)
        kill_all(engines[1])
        out, err = run.communicate(timeout=runs.TIMEOUT_S)
        assert run.returncode == 0, err[-4000:]
    finally:
        run.kill()
        for engine in engines:
            engine.terminate()
        ended = [engine.wait(120) for engine in engines]
    assert ended[0] == 0
    lines += out.splitlines()
    assert any(line.startswith("engines: 2 ready") for line in lines)
    assert any(re.match(r"engine \d \(http://\S+\) lost: ", line) for line in lines), lines
    done = runs.Run(0, "", "", folder).lines
    assert [line["step"] for line in done] == list(range(1, STEPS + 1))
    for line in done:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] <= 1e-4


def kill_all(engine):
    """Kill an engine's command and all that it started, as when its host goes down."""
    import psutil

    for process in [*psutil.Process(engine.pid).children(recursive=True), psutil.Process(engine.pid)]:
        process.kill()
