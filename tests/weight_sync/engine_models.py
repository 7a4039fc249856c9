"""Workers of engines of any layout, one after the other in one process: vLLM's models with their real loaders, in
process groups that nothing travels in. What each needs is recorded; what its loaders make of a folder lies beside it.

    python -m tests.weight_sync.engine_models JOB

JOB is a pickle of (HF folder, metadata of the tensors that travel, engines); in its place comes {engine: its workers}.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from skyrl_megatron.weight_sync.slices import TargetMap

ENGINES: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "ep2": dict(tp=2, ep=2),
    "dp2": dict(dp=2, ep=2),
    "tp2·pp2": dict(tp=2, pp=2),
    "tp2·dp2": dict(tp=2, dp=2, ep=4),
}
"""Layouts by name. dp2 shares the experts out (ep): without, its workers are those of tp1 twice."""


@dataclass
class WorkerModel:
    """One worker: its target map as it is sent, and each of its targets as the loaders leave it, unpacked."""

    target_map: tuple[Any, bytes] | str
    """Or why there is none."""
    loaded: list[Any]
    """[elements] each, a torch tensor."""
    untold: list[str]
    """Parameters that loaders fill and the target map does not."""
    unlike: list[str]
    """Tensors that the kernels compute with which are not, bit for bit, what a reload by the loaders makes of them."""


@contextlib.contextmanager
def groups(rank: int, *, tp: int = 1, pp: int = 1, dp: int = 1, **_: int) -> Iterator[None]:
    """vLLM's groups of a worker of a layout, of torch's process groups for one process that plays any rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state

    def quiet(*arguments: Any, **options: Any) -> Any:
        # those of tp and pp would ask the others for shared memory
        apart = options.get("group_name") not in ("tp", "pp")
        return make(*arguments, **options | dict(use_message_queue_broadcaster=False, use_device_communicator=apart))

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp * dp)
    make, new_group = parallel_state.init_model_parallel_group, dist.new_group
    changed: Any = dist, parallel_state
    changed[0].new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    changed[1].init_model_parallel_group = quiet
    same_node, changed[1].in_the_same_node_as = parallel_state.in_the_same_node_as, _all_here
    try:
        parallel_state.init_distributed_environment(tp * pp, rank % (tp * pp), "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(tp, pp)
        yield
    finally:
        changed[0].new_group = new_group
        changed[1].init_model_parallel_group, changed[1].in_the_same_node_as = make, same_node
        parallel_state.destroy_model_parallel()
        parallel_state._WORLD = None
        dist.destroy_process_group()


def _all_here(group: Any, source_rank: int = 0) -> list[bool]:
    return [True] * int(group.size())


def worker_model(
    folder: Path, tensors: dict[str, Any], metadata: list[Any], engine: dict[str, int], rank: int
) -> WorkerModel:
    """The worker ``rank`` of an engine on ``folder``, for tensors that travel as ``tensors``."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import utils

    from skyrl_megatron.weight_sync.slices import ReshardUnsupported
    from skyrl_megatron.weight_sync.vllm_backend import name_loaders
    from skyrl_megatron.weight_sync.vllm_reshard import record_targets
    from tests.weight_sync.reshard_extension import without_packing

    dp = engine.get("dp", 1)
    config = EngineArgs(
        model=str(folder),
        tensor_parallel_size=engine.get("tp", 1),
        pipeline_parallel_size=engine.get("pp", 1),
        enable_expert_parallel=engine.get("ep", 1) > 1,
        dtype="float32",
        max_model_len=512,
        load_format="dummy",
        enforce_eager=True,
        distributed_executor_backend="mp" if engine else None,
    ).create_engine_config()
    per_engine = engine.get("tp", 1) * engine.get("pp", 1)
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank = dp, rank // per_engine
    parallel.data_parallel_index, parallel.rank = rank // per_engine, rank % per_engine
    device = torch.device("cpu")
    utils._model_to_pp_missing_layer_names.clear()  # by id(model), of models that are gone
    with set_current_vllm_config(config), groups(rank, **engine):
        model = get_model(vllm_config=config)
        name_loaders(model)
        loaded = without_packing(model, tensors, device)
        try:
            target_map = record_targets(model, metadata, device)
        except ReshardUnsupported as error:
            return WorkerModel(str(error), [], [], [])
        state = dict(model.state_dict(keep_vars=True))
        routed = reloaded(model, config.model_config, lambda: fill_by(model, target_map, tensors))
        usual = reloaded(model, config.model_config, lambda: model.load_weights(iter(tensors.items())))
        unlike = [name for name, tensor in usual.items() if not torch.equal(tensor, routed[name])]
    parts: list[Any] = []
    told = set()
    for path, name, _, size, part in target_map.targets:
        whole = loaded.get(f"{path}.{name}", state.get(f"{path}.{name}"))
        assert whole is not None, (path, name)
        told.add(f"{path}.{name}")
        flat = whole.detach().flatten()
        parts.append((flat if part < 0 else flat[part * size : (part + 1) * size]).clone())
    untold = [name for name, tensor in loaded.items() if name not in told and tensor.any()]
    return WorkerModel(target_map.wire, parts, untold, unlike)


def reloaded(model: torch.nn.Module, config: Any, fill: Callable[[], object]) -> dict[str, torch.Tensor]:
    """The bits of a model's tensors after an update that ``fill`` brings."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    fill()
    finalize_layerwise_reload(model, config)
    return {
        name: t.detach().contiguous().view(torch.uint8).clone() for name, t in model.state_dict().items() if t.dim()
    }


def fill_by(model: torch.nn.Module, target_map: TargetMap, tensors: dict[str, torch.Tensor]) -> None:
    """Make the copies of a target map, target by target."""
    from skyrl_megatron.weight_sync.tensors import as_rows
    from skyrl_megatron.weight_sync.vllm_reshard import ModelTargets

    targets, named = ModelTargets(model, target_map), list(tensors.items())
    for number in range(len(target_map.targets)):
        memory = targets.memory(number)
        for tensor, _, row, rows, column, columns, *place in target_map.copies[
            target_map.copies[:, 1] == number
        ].tolist():
            part = as_rows(*named[tensor])[row : row + rows, column : column + columns]
            memory.as_strided((rows, columns), place[1:], place[0]).copy_(part)
        targets.complete(number)


def main(job: str) -> None:
    import torch
    from safetensors.torch import load_file

    from benchmarks.load_only import experts_fused
    from skyrl_megatron.inference.vllm import compat  # noqa: F401  (what our engines change in vLLM)

    torch.set_num_threads(1)
    folder, metadata, engines = pickle.loads(Path(job).read_bytes())
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    if any(meta.name not in tensors for meta in metadata):
        tensors = experts_fused(tensors)
    tensors = {meta.name: tensors[meta.name] for meta in metadata}
    assert [tuple(t.shape) for t in tensors.values()] == [meta.shape for meta in metadata]
    found = {
        name: [
            worker_model(folder, tensors, metadata, engine, rank)
            for rank in range(engine.get("tp", 1) * engine.get("pp", 1) * engine.get("dp", 1))
        ]
        for name, engine in ENGINES.items()
        if name in engines
    }
    Path(job).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    # under its own name, for what is pickled
    from tests.weight_sync import engine_models

    engine_models.main(sys.argv[1])
