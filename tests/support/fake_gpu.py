"""A GPU that is not there: every tensor says that it is on one, except those that ``.cpu()`` made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

_ON_HOST = "_made_by_cpu"


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Run code that tells its tensors apart by ``is_cuda``, as Megatron's HybridDeviceOptimizer; it is not refused."""
    import torch
    from torch.overrides import TorchFunctionMode

    from skyrl_megatron.runtime import optimizer

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

    with mock.patch.object(optimizer, "_require_hardware", lambda fields, key: None), FakeGpu():
        yield
