"""What a run in a joined cluster prints, and how it is asked to end: its actor, without a cluster."""

import os
import threading
import time
import warnings


class Stepping:
    """An experiment whose trainer takes steps until it is asked to stop."""

    def __init__(self, cfg):
        from skyrl_megatron.trainer.stopping import StopSignal

        class Trainer:
            stop = StopSignal()

        self.trainer = Trainer()

    def run(self):
        from skyrl_megatron.errors import SkyRLMegatronWarning

        warnings.warn("what a user should know", SkyRLMegatronWarning, stacklevel=1)
        with self.trainer.stop:
            for step in range(1000):
                print("step", step)
                os.write(2, b"a library says something\n")
                time.sleep(0.05)
                self.trainer.stop.check()


def test_lines_come_in_order_while_it_runs_and_noise_stays_in_the_log(tmp_path):
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.resolve import run_folder
    from skyrl_megatron.entrypoints.joined_run import RunActor

    cfg = SkyRLTrainConfig.from_cli_overrides({"trainer.log_path": str(tmp_path)})
    holder, stopped, texts = RunActor(), [], {False: "", True: ""}
    run = threading.Thread(target=lambda: stopped.append(holder.run(cfg, Stepping, "")))
    run.start()
    while (printed := holder.printed()) is not None:
        for error, text in printed:
            texts[error] += text
        if "step 3\n" in texts[False] and run.is_alive():
            holder.stop()
    run.join()
    assert stopped == [True]
    lines = texts[False].splitlines()
    assert 4 <= len(lines) < 1000 and lines == [f"step {number}" for number in range(len(lines))]
    assert texts[True] == "warning: what a user should know\n"
    assert (run_folder(cfg) / "console.log").read_text() == "a library says something\n" * len(lines)
