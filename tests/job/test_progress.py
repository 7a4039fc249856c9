"""A run that waits says what for; what is known to fail again is not tried again."""

import time

import pytest

from skyrl_megatron.progress import current_task, heartbeat, note_output


def test_silence_is_broken_with_what_is_under_way():
    said = []
    with heartbeat(said.append, quiet_s=0.1):
        with current_task("generate"), current_task("eval"):
            time.sleep(0.35)
        inside = len(said)
        time.sleep(0.25)
    assert 1 <= inside <= 4 and said[0].startswith("… eval: ") and said[0].endswith(" s so far")
    assert said[-1].startswith("… start: ")
    after = len(said)
    time.sleep(0.25)
    assert len(said) == after, "something is said after the run has ended"


def test_the_innermost_block_says_it():
    """A command speaks on stderr until its run, which has a log and a progress bar, speaks for itself."""
    outer, inner = [], []
    with heartbeat(outer.append, quiet_s=0.1):
        while not outer:
            time.sleep(0.01)
        before = len(outer)
        with heartbeat(inner.append):
            while not inner:
                time.sleep(0.01)
        assert len(outer) == before
        while len(outer) == before:
            time.sleep(0.01)


def test_a_run_that_prints_is_left_alone():
    said = []
    with heartbeat(said.append, quiet_s=1.0):
        for _ in range(15):
            note_output()
            time.sleep(0.1)
    assert said == []


def test_failures_that_differ_in_numbers_alone_are_the_same():
    from skyrl_megatron.inference.engine_pool import same_failure

    one = "the engine on /m died: RuntimeError: head size 16 at 0x7f3a, process 4711"
    assert same_failure(one, one.replace("4711", "4812").replace("0x7f3a", "0x88bc"))
    assert not same_failure(one, one.replace("RuntimeError", "MemoryError"))
    assert not same_failure("", "")


def test_a_failure_noticed_later_is_the_same_with_what_followed():
    from skyrl_megatron.inference.engine_pool import same_failure

    early = "the engine on /m died: Worker proc VllmWorker-0 died unexpectedly\n  RuntimeError: cancelled"
    later = f"{early}\n  RuntimeError: Executor failed."
    assert same_failure(early, later) and same_failure(later, early)
    assert not same_failure(later, f"{early}\n  MemoryError: cannot allocate")


@pytest.mark.around
def test_a_run_without_evaluation_warms_up_on_training_prompts():
    """``eval_interval=-1`` leaves no evaluation data, and the warm-up has to measure itself. The trainer is a shell:
    only which data it would evaluate is asked."""
    from skyrl_megatron_tools.embedded.warmup import WarmedUpTrainer

    class Shell(WarmedUpTrainer):
        def __init__(self):
            self.eval_dataset, self.train_dataset = None, {"eval/all/avg_score": 0.25}

        def eval(self):
            return self.eval_dataset or {}

    trainer = Shell()
    assert trainer.evaluation_score() == 0.25 and trainer.eval_dataset is None
