"""Worker extension: a model's recorded target map against what its loaders do, before anything is packed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_megatron.inference.vllm.compat import WorkerExtension

if TYPE_CHECKING:
    import torch


class RouteExtension(WorkerExtension):
    """Methods that tests ask for by ``collective_rpc``."""

    def route_against_loaders(self, folder: str, fused: bool, fault: str = "") -> list[str]:
        """List what is wrong with the target map of a folder's tensors: parameters that differ from loaded ones,
        that only the loaders fill, or the reason why there is no target_map. ``fault``: of a loader, planted."""
        import torch
        from safetensors.torch import load_file

        from benchmarks.load_only import experts_fused
        from skyrl_megatron.weight_sync.buckets import TensorMeta
        from skyrl_megatron.weight_sync.slices import ReshardUnsupported
        from skyrl_megatron.weight_sync.tensors import as_rows, dtype_name
        from skyrl_megatron.weight_sync.vllm_reshard import record_targets

        worker: Any = self
        model, device = worker.model_runner.model, worker.device
        tensors = {k: v for path in Path(folder).glob("*.safetensors") for k, v in load_file(path).items()}
        tensors = experts_fused(tensors) if fused else tensors
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
        with planted(model, fault), torch.no_grad():
            loaded = without_packing(model, tensors, device)
            try:
                metadata = [TensorMeta(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items()]
                target_map = record_targets(model, metadata, torch.device(device))
            except ReshardUnsupported as error:
                return [str(error)]
        after = model.state_dict()
        wrong = [name for name, (place, old) in before.items() if after[name].data_ptr() != place]
        wrong += [name for name, (_, old) in before.items() if not torch.equal(after[name], old)]
        named = list(tensors.items())
        filled: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for number, (path, parameter, dtype, size, part_of) in enumerate(target_map.targets):
            memory = torch.zeros(size, dtype=getattr(torch, dtype))
            for tensor, _, row, rows, column, columns, *place in target_map.copies[
                target_map.copies[:, 1] == number
            ].tolist():
                part = as_rows(*named[tensor])[row : row + rows, column : column + columns]
                memory.as_strided((rows, columns), place[1:], place[0]).copy_(part)
            filled.setdefault(f"{path}.{parameter}", []).append((part_of, memory))
        for name, parts in filled.items():
            memory = torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])
            # of a tensor that keeps its memory, what the folder has is there already
            expected = loaded.pop(name) if name in loaded else before[name][1]
            if not torch.equal(memory.view(torch.uint8), expected.flatten().view(torch.uint8)):
                wrong.append(name)
        return wrong + [name for name, tensor in loaded.items() if tensor.any()]


def planted(model: torch.nn.Module, fault: str) -> Any:
    """A loader of the first norm that does more than copy."""
    import contextlib

    @contextlib.contextmanager
    def nothing() -> Any:
        yield

    if not fault:
        return nothing()
    layer = next(module for path, module in model.named_modules() if path.endswith("input_layernorm"))

    def adds_one(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        param.data.add_(1)

    def computes(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight * 2)

    @contextlib.contextmanager
    def loader() -> Any:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        kept = get_layerwise_info(layer).restore_metadata[0]["weight"]
        kept.weight_loader = {"adds": adds_one, "computes": computes}[fault]
        try:
            yield
        finally:
            del kept.weight_loader

    return loader()


def without_packing(model: torch.nn.Module, tensors: dict[str, torch.Tensor], device: Any) -> dict[str, torch.Tensor]:
    """What the loaders make of zeros, by parameter; the model is as it was afterwards."""
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    initialize_layerwise_reload(model)
    made: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        new = {name for name, tensor in get_layer_tensors(layer).items() if tensor.is_meta}
        materialize_layer(layer, get_layerwise_info(layer))
        for name, tensor in get_layer_tensors(layer).items():
            if name in new:
                tensor.data.zero_()
                made[f"{path}.{name}"] = tensor
            tensor.weight_loader = _get_original_loader(tensor)
    model.load_weights(iter(tensors.items()))
    loaded = {name: tensor.detach().clone() for name, tensor in made.items()}
    recorder: Any = ShardedRDTWeightTransferEngine
    recorder._restore_after_dry_run(None, model)
    return loaded
