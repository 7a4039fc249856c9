"""Workers of engines that hold weights in 8 bits, one after the other in one process: vLLM's models with their real
parameters, loaders and reload, which are given what a trainer sent.

    python -m tests.weight_sync.quantised_engines JOB

JOB is a pickle of (folder that engines start on, file of the tensors that were sent, their names in order, folder that
they are to be, engines); in its place comes {engine: what is wrong in each worker}.

vLLM's kernels for FP8 on CPU ask for AMX, and for MXFP8 there are none, so that on this machine no such engine would
even be built. Here the model is told that it has AMX, and takes vLLM's own emulation for MXFP8: its parameters, their
loaders and the packing for AMX are the real ones, which run anywhere, and nothing is computed with what they leave.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.weight_sync.engine_models import ENGINES, groups

if TYPE_CHECKING:
    from torch import Tensor

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


def vllm_config(folder: Path, engine: dict[str, int], rank: int, load_format: str) -> Any:
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
        load_format=load_format,
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


def worker(folder: Path, sent: list[tuple[str, Tensor]], like: Path, engine: dict[str, int], rank: int) -> list[str]:
    """What is wrong in a worker; nothing, if all is as it should be."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from skyrl_megatron.weight_sync.vllm_backend import name_loaders
    from tests.weight_sync.engine_models import reloaded

    wrong: list[str] = []
    disk = load_file(like / "model.safetensors")
    config = vllm_config(folder, engine, rank, "auto")
    with set_current_vllm_config(config), groups(rank, **engine):
        with set_default_torch_dtype(torch.bfloat16):
            model: Any = initialize_model(config)
            found, expected = loaded(model, sent, BEFORE[0]), loaded(model, disk.items(), BEFORE[1])
        wrong += [f"{name} is not loaded, or as something else" for name in unlike(found, expected)]
        if not engine:  # one worker has all
            values = sum(each.numel() for _, each in sent if each.dtype == torch.float8_e4m3fn)
            held = sum(each.numel() for each in model.parameters() if each.dtype == torch.float8_e4m3fn)
            wrong += [f"{values} values of 8 bits were sent, the model has {held}"] if values != held else []
    config = vllm_config(folder, engine, rank, "auto")
    with set_current_vllm_config(config), groups(rank, **engine):
        model = get_model(vllm_config=config)
        name_loaders(model)
        served = reloaded(model, config.model_config, lambda: model.load_weights(iter(sent)))
    config = vllm_config(like, engine, rank, "auto")
    with set_current_vllm_config(config), groups(rank, **engine):
        fresh = {name: as_bytes(t) for name, t in get_model(vllm_config=config).state_dict().items() if t.dim()}
    served = {name: as_bytes(each) for name, each in served.items()}
    return wrong + [f"{name} is not that of a fresh engine after the reload" for name in unlike(served, fresh)]


def main(job: str) -> None:
    import torch
    from safetensors.torch import load_file

    from skyrl_megatron.inference.vllm import compat  # noqa: F401  (what our engines change in vLLM)

    torch.set_num_threads(1)
    without_amx()
    folder, file, names, like, engines = pickle.loads(Path(job).read_bytes())
    tensors = load_file(file)
    sent = [(name, tensors[name]) for name in names]
    found = {
        name: [
            worker(folder, sent, like, ENGINES[name], rank)
            for rank in range(ENGINES[name].get("tp", 1) * ENGINES[name].get("pp", 1))
        ]
        for name in engines
    }
    Path(job).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
