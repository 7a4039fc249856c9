"""Workers of engines that hold weights in 8 bits, one after the other in one process: vLLM's models with their real
parameters, loaders and reload, which are given what a trainer sent.

    python -m tests.weight_sync.quantised_engines JOB

JOB is a pickle of the name of a function and its arguments; in its place comes {engine: what it finds of each worker}.

vLLM's kernels for FP8 on CPU ask for AMX, and for MXFP8 there are none, so that on this machine no such engine would
even be built. Here the model is told that it has AMX, and takes vLLM's own emulation for MXFP8: its parameters, their
loaders and the packing for AMX are the real ones, which run anywhere, and nothing is computed with what they leave.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.weight_sync.engine_models import ENGINES, groups

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_megatron.weight_sync.buckets import TensorMeta

BEFORE = (0x55, 0xAA)
"""Bytes that parameters are full of before one load and before the other: what is not loaded differs."""

OF_CACHE = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Parameters of the KV cache, which these folders have nothing for."""


def without_amx() -> None:
    """See above."""
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.platforms import PlatformEnum

    torch.cpu._is_amx_tile_supported = lambda: True  # type: ignore[assignment]
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    modelopt.select_mxfp8_moe_backend = lambda config: (Fp8MoeBackend.EMULATION, object)
    modelopt.make_fp8_moe_kernel = lambda **_: None


def vllm_config(folder: Path, engine: dict[str, int], rank: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import utils

    utils._model_to_pp_missing_layer_names.clear()  # by the address of models: those before are gone
    latent = "kv_lora_rank" in (folder / "config.json").read_text()
    config = EngineArgs(
        model=str(folder),
        tensor_parallel_size=engine.get("tp", 1),
        pipeline_parallel_size=engine.get("pp", 1),
        enable_expert_parallel=engine.get("ep", 1) > 1,
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        distributed_executor_backend="mp" if engine else None,
        attention_backend="CPU_MLA" if latent else None,  # that for AMX empties a weight, and cannot be reloaded
    ).create_engine_config()
    config.parallel_config.rank = rank
    return config


def as_bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def loaded(model: Any, tensors: Iterable[tuple[str, Tensor]], before: int) -> dict[str, Tensor]:
    """The bytes of the parameters of a model that was just made, as its loaders leave them before any packing."""
    import torch

    parameters = {name: each for name, each in model.named_parameters() if not name.endswith(OF_CACHE)}
    for each in parameters.values():
        each.data.view(-1).view(torch.uint8).fill_(before)
    model.load_weights(iter(tensors))
    return {name: as_bytes(each).clone() for name, each in parameters.items()}


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same, byte for byte."""
    import torch

    assert found.keys() == expected.keys()
    return [name for name, each in found.items() if not torch.equal(each, expected[name])]


class Delivered:
    """A transport's end, to which buckets of several ranks have come already."""

    def __init__(self, buckets: dict[int, Iterable[Tensor]]) -> None:
        self.left = {rank: iter(each) for rank, each in buckets.items()}

    def receive(self, buffer: Tensor, rank: int) -> Callable[[], object]:
        bucket = next(self.left[rank])
        return lambda: buffer.copy_(bucket)

    def close(self) -> None:
        assert not [rank for rank, each in self.left.items() if next(each, None) is not None]


@contextlib.contextmanager
def started(folder: Path, engine: dict[str, int], rank: int) -> Iterator[tuple[Any, Any]]:
    """A worker's model as an engine has it that starts on a folder, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from skyrl_megatron.weight_sync.vllm_backend import name_loaders

    config = vllm_config(folder, engine, rank)
    with set_current_vllm_config(config), groups(rank, **engine):
        model = get_model(vllm_config=config)
        name_loaders(model)
        yield model, config.model_config


def fresh(folder: Path, engine: dict[str, int], rank: int) -> dict[str, Tensor]:
    """The bytes of the tensors of a worker that starts on a folder."""
    with started(folder, engine, rank) as (model, _):
        return {name: as_bytes(each) for name, each in model.state_dict().items() if each.dim()}


def not_fresh(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    wrong = unlike({name: as_bytes(each) for name, each in found.items()}, expected)
    return [f"{name} is not that of a fresh engine after the reload" for name in wrong]


def loaded_by(folder: Path, file: Path, names: list[str], like: Path, engine: dict[str, int], rank: int) -> list[str]:
    """What is wrong in a worker that was started on ``folder`` and loads tensors of a file, in an order, which should
    make it one of the folder ``like``; nothing, if all is as it should be."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.weight_sync.engine_models import reloaded

    tensors = load_file(file)
    sent = [(name, tensors[name]) for name in names]
    wrong: list[str] = []
    disk = load_file(like / "model.safetensors")
    config = vllm_config(folder, engine, rank)
    with set_current_vllm_config(config), groups(rank, **engine):
        with set_default_torch_dtype(torch.bfloat16):
            model: Any = initialize_model(config)
            found, expected = loaded(model, sent, BEFORE[0]), loaded(model, disk.items(), BEFORE[1])
        wrong += [f"{name} is not loaded, or as something else" for name in unlike(found, expected)]
        if not engine:  # one worker has all
            values = sum(each.numel() for _, each in sent if each.dtype == torch.float8_e4m3fn)
            held = sum(each.numel() for each in model.parameters() if each.dtype == torch.float8_e4m3fn)
            wrong += [f"{values} values of 8 bits were sent, the model has {held}"] if values != held else []
    with started(folder, engine, rank) as (model, config):
        served = reloaded(model, config, lambda: model.load_weights(iter(sent)))
    return wrong + not_fresh(served, fresh(like, engine, rank))


def route_of(folder: Path, tensors: list[TensorMeta], engine: dict[str, int], rank: int) -> Any:
    """A worker's target map, as it is sent."""
    import torch

    from skyrl_megatron.weight_sync.vllm_reshard import record_targets

    with started(folder, engine, rank) as (model, _):
        return record_targets(model, tensors, torch.device("cpu")).wire


def filled_by(
    folder: Path,
    tensors: list[TensorMeta],
    like: Path,
    bucket_bytes: int,
    deliveries: dict[str, list[list[Any]]],
    engine: dict[str, int],
    rank: int,
) -> dict[str, list[str]]:
    """What is wrong in a worker that was started on ``folder`` after each of several syncs by the reshard plan, one
    after the other, which should make it one of the folder ``like``. ``deliveries``: by name, for the workers of the
    engine, transfers as they are sent, and the buckets that came from each rank."""
    import torch

    from skyrl_megatron.weight_sync.point_to_point import SliceReceiver
    from skyrl_megatron.weight_sync.slices import TransferList, check_transfers
    from skyrl_megatron.weight_sync.vllm_reshard import ModelTargets, record_targets
    from tests.weight_sync.engine_models import reloaded

    found, expected = {}, fresh(like, engine, rank)
    with started(folder, engine, rank) as (model, config):
        target_map = record_targets(model, tensors, torch.device("cpu"))
        for name, workers in deliveries.items():
            plain, buckets = workers[rank]
            transfers = TransferList.from_wire(*plain)
            check_transfers(transfers, target_map)
            receiver = SliceReceiver(
                transfers,
                Delivered(buckets),
                {sender: sender for sender in buckets},
                [meta.torch_dtype for meta in tensors],
                bucket_bytes,
                torch.device("cpu"),
            )
            served = reloaded(model, config, lambda: receiver.receive(ModelTargets(model, target_map)))  # noqa: B023
            receiver.close()
            found[name] = not_fresh(served, expected)
            for parameter, each in model.named_parameters():  # what the next sync does not fill is not right by chance
                if not parameter.endswith(OF_CACHE):
                    each.data.copy_(
                        torch.full((each.nbytes,), BEFORE[0], dtype=torch.uint8).view(each.dtype).view(each.shape)
                    )
    return found


def main(job: str) -> None:
    import torch

    from skyrl_megatron.inference.vllm import compat  # noqa: F401  (what our engines change in vLLM)

    torch.set_num_threads(1)
    without_amx()
    function, engines, *arguments = pickle.loads(Path(job).read_bytes())
    found = {
        name: [
            globals()[function](*arguments, ENGINES[name], rank)
            for rank in range(ENGINES[name].get("tp", 1) * ENGINES[name].get("pp", 1))
        ]
        for name in engines
    }
    Path(job).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
