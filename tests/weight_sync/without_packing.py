"""A worker extension without the work-around for experts on CPU, to see that its absence is noticed."""

from skyrl_megatron.inference.vllm import compat
from skyrl_megatron.inference.vllm.compat import WorkerExtension as WorkerExtension

compat.UnquantizedFusedMoEMethod._setup_kernel = (
    compat.UnquantizedFusedMoEMethod._setup_kernel.packs_once  # type: ignore[attr-defined]
)
