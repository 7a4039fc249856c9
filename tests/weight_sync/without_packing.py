"""A worker extension without the work-around for experts on CPU, to see that its absence is noticed."""

from skyrl_megatron.weight_sync import vllm_compat
from skyrl_megatron.weight_sync.vllm_compat import WorkerExtension as WorkerExtension

vllm_compat.UnquantizedFusedMoEMethod._setup_kernel = (
    vllm_compat.UnquantizedFusedMoEMethod._setup_kernel.packs_once  # type: ignore[attr-defined]
)
