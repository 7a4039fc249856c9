"""A second command on the folder of a run that is at work."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

HOLD = """
import sys, time
from skyrl_megatron.data.folder_lock import FolderLock
FolderLock(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_command_is_refused_until_the_first_is_gone(tmp_path):
    """Before Ray is started; what a killed command leaves keeps nobody out."""
    from skyrl_megatron.config import SkyRLTrainConfig
    from skyrl_megatron.config.resolve import run_folder
    from skyrl_megatron.entrypoints.experiment import _locked_run_folder, run_experiment
    from skyrl_megatron.errors import CheckpointError

    cfg = SkyRLTrainConfig()
    cfg.trainer.log_path = str(tmp_path)
    folder = run_folder(cfg)
    with _locked_run_folder(folder):
        pass
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError) as refused:
            run_experiment(cfg)
    finally:
        first.kill()
        first.wait()
    said = f"{folder} is being written by process {first.pid} on "
    assert str(refused.value).startswith(said) and "another trainer.run_name" in str(refused.value)
    with _locked_run_folder(folder):
        pass
