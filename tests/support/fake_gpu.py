"""A GPU that is not there: every tensor says that it is on one, but for those that ``.cpu()`` made."""

from __future__ import annotations

from typing import Any

_ON_HOST = "_made_by_cpu"


def fake_gpu() -> Any:
    """Return a context for code that tells its tensors apart by ``is_cuda``, as Megatron's HybridDeviceOptimizer."""
    import torch
    from torch.overrides import TorchFunctionMode

    class FakeGpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            given = [argument for argument in args if isinstance(argument, torch.Tensor)]
            if func == torch.Tensor.is_cuda.__get__:
                return not hasattr(given[0], _ON_HOST)
            result = given[0].clone() if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))
            from_host = func is torch.Tensor.cpu or (given and hasattr(given[0], _ON_HOST))
            if from_host and isinstance(result, torch.Tensor):
                setattr(result, _ON_HOST, True)
            return result

    return FakeGpu()
