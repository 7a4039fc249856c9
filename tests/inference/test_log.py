"""What of an engine's output its error quotes."""

from __future__ import annotations

from pathlib import Path

from skyrl_megatron.inference.vllm.processes import child_output, last_errors

DEATH = "Worker proc VllmWorker-0 died unexpectedly (exit code: 255), shutting down executor."
AT = "(EngineCore pid=7) ERROR 11-25 18:54:27 [core.py:1702]"
CONSEQUENCES = [
    f"{AT} RuntimeError: Executor failed.",
    f"{AT} Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace "
    "for root cause.",
]


def test_a_cause_without_what_came_of_it(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("\n".join([f"{AT} {DEATH}", "INFO 11-25 18:54:27 [core.py:9] going on", *CONSEQUENCES * 2]))
    assert last_errors(log) == [DEATH]


def test_what_came_of_it_where_no_cause_was_printed(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("\n".join(CONSEQUENCES))
    assert last_errors(log) == [each.removeprefix(f"{AT} ") for each in CONSEQUENCES]
    assert last_errors(tmp_path / "none") == []


def test_a_log_that_cannot_be_written_is_the_error():
    (said,) = last_errors(Path("/proc/engine.log"))  # nobody can make a file there
    assert said.startswith("its output cannot be written to /proc/engine.log: ")


def test_the_folder_of_a_log_is_made_by_who_writes_it(tmp_path):
    """Engines of colocated and evaluation-only runs start before any rank."""
    import os

    log = tmp_path / "workers/engine_0.log"
    with child_output(log):
        os.write(1, b"of a child\n")
    assert log.read_text() == "of a child\n"


def test_a_share_of_the_gpu_is_asked_for_beside_a_size_of_the_cache():
    """With the size alone vLLM refuses to start unless 92 % of the GPU are free."""
    from skyrl_megatron.inference.vllm.settings import EngineSettings

    settings = EngineSettings(model="m", dtype="float32", kv_cache_bytes=1 << 20, gpu_memory_utilization=0.3)
    found = settings.arguments()
    assert (found["kv_cache_memory_bytes"], found["gpu_memory_utilization"]) == (1 << 20, 0.3)
