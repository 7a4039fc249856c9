"""Memory is not predicted for numbers of devices that are a mistake of their own."""

import pytest

from skyrl_megatron.config.hardware import Hardware
from tests.config.test_placement import MISTAKES, E, model, of

__all__ = ["model"]  # a fixture


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_memory_is_counted_on_devices_that_cannot_be(model, mistake):
    from skyrl_megatron.checks import PlannedRun
    from skyrl_megatron.config.derive import derive
    from skyrl_megatron_observe.preflight.machine_checks import memory

    cfg = of(model, *MISTAKES[mistake][0], f"{E}run_engines_locally=true")
    derive(cfg)
    assert list(memory(PlannedRun(cfg, Hardware(8, 4, elsewhere=True, gpu_bytes=80 << 30, host_bytes=1 << 40)))) == []
