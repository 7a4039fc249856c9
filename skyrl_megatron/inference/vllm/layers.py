"""What the layers of a vLLM model give, and the tensors that they hold: the worker's end of a comparison with the
trainer's. Of eager engines: a compiled or captured model calls no hooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

type Packed = list[tuple[str, list[int], bytes]]
"""(name, shape, float32 values): what vLLM passes between its processes."""

ATTENTION = ("self_attn", "attention", "attn", "linear_attn")
MLP = ("mlp", "block_sparse_moe", "feed_forward", "moe")
"""Names of a layer's two parts, of which each model has one."""


class LayerWatch:
    """Keeps what the layers of ``model`` give until :meth:`taken`, by the names of ``runtime/recording.py``."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[str, list[Tensor]] = {}
        for path, module in model.named_modules():
            if (number := layer_number(path)) is not None and path.endswith(f"layers.{number}"):
                self._watch(number, module)
            elif path.count(".") <= 1 and path.rpartition(".")[2] == "norm":
                self._hooks.append(module.register_forward_hook(partial(self._see, "norm", 1)))

    def taken(self) -> Packed:
        """Return [tokens, H] of everything, and watch no more."""
        for hook in self._hooks:
            hook.remove()
        return [packed(name, torch.cat(pieces)) for name, pieces in self._seen.items()]

    def _watch(self, number: int, layer: nn.Module) -> None:
        children = dict(layer.named_children())
        attention = next((children[name] for name in ATTENTION if name in children), None)
        mlp = next((children[name] for name in MLP if name in children), None)
        for part, module in (("attention", attention), ("mlp", mlp), ("output", layer)):
            if module is not None:
                self._hooks.append(module.register_forward_hook(partial(self._see, f"{number}.{part}", 2)))
        if number == 0:
            self._hooks.append(layer.register_forward_pre_hook(self._see_input, with_kwargs=True))

    def _see_input(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._see("embedding", 1, None, None, (*arguments, *keywords.values()))

    def _see(self, name: str, parts: int, _: Any, arguments: Any, output: Any) -> None:
        """Keep the sum of the first ``parts`` of an output: a layer's comes apart from the residual stream, and norms
        that come next change both in place."""
        hidden = [x for x in (output if isinstance(output, tuple) else (output,)) if is_hidden(x)][:parts]
        value = sum(x.float().cpu() for x in hidden)
        assert isinstance(value, Tensor), f"{name} gives nothing of [tokens, H]"
        self._seen.setdefault(name, []).append(value)


class LayerExtension:
    """Methods of a worker; ``compat.WorkerExtension`` mixes them in."""

    model_runner: Any
    skyrl_watch: LayerWatch

    def skyrl_watch_layers(self) -> None:
        """Keep what the layers give from now on."""
        self.skyrl_watch = LayerWatch(self.model_runner.get_model())

    def skyrl_layer_outputs(self) -> Packed:
        """Return what the layers gave since then, and watch no more."""
        return self.skyrl_watch.taken()

    def skyrl_layer_weights(self, layer: int | None) -> Packed:
        """Return the tensors of a layer; None: those of no layer."""
        return layer_weights(self.model_runner.get_model(), layer)


def layer_weights(model: torch.nn.Module, layer: int | None) -> Packed:
    """Return the tensors of a layer of a model, None: those of no layer. A weight that a kernel keeps in a form of its
    own is what the map makes of the identity: exactly its rows, as everything else in a sum is 0."""
    found: Packed = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False) if layer_number(path) == layer else ():
            if parameter.numel():
                found.append(packed(f"{path}.{name}", parameter))
            elif name == "weight" and hasattr(module, "quant_method"):
                inputs = getattr(module, "input_size_per_partition", None) or module.input_size
                ones = torch.eye(int(inputs), dtype=parameter.dtype, device=parameter.device)
                found.append(packed(f"{path}.{name}", module.quant_method.apply(module, ones, None).t()))
    return found


def layer_number(path: str) -> int | None:
    """Return the layer that a module is in, by its name; None: it is in none."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None


def is_hidden(value: Any) -> bool:
    """Return whether something may be [tokens, H]."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2


def packed(name: str, tensor: Tensor) -> tuple[str, list[int], bytes]:
    """Make what travels of a tensor."""
    values = tensor.detach().float().cpu().contiguous().numpy()
    return name, list(values.shape), values.tobytes()


def unpacked(travelled: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    """Return float32 arrays by name."""
    return {name: np.frombuffer(data, np.float32).reshape(shape) for name, shape, data in travelled}
