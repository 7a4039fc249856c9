"""Megatron's HybridDeviceOptimizer (``optimizer_cpu_offload``): it leaves and comes back, and is saved and resumed.

It tells host from GPU by ``is_cuda``, which a stand-in answers; all arithmetic is real.
"""

import pytest

from tests.checkpoint import training
from tests.checkpoint.test_variants import bf16_state, set_gradients

OPTIONS = {
    "all on the host": {"optimizer_offload_fraction": 1.0},
    "half": {"optimizer_offload_fraction": 0.5},
    "half, overlapped": {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True},
    "half, precision-aware": {"optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True},
}
STEPS = (1, 2, 3, 4)


def body(folder, root, options, way):
    """State after four steps, how many parameters the optimizer updates on the host, and the sum of the weights. By
    ``way``: a plain run; one in which everything leaves and comes back around each step; one saved after two steps;
    the one that goes on from there."""
    import types
    import warnings

    import torch

    from skyrl_megatron.runtime.checkpoint.rank_state import inner_optimizers
    from skyrl_megatron.runtime.offload import Offload, optimizer_tensors
    from skyrl_megatron.types import PARTS
    from tests.checkpoint.ranks import RankCheckpointer
    from tests.support.fake_gpu import fake_gpu

    mixed = dict(options, optimizer_cpu_offload=True)

    def take(state, numbers):
        memory = Offload(state.model_chunks, [state.optimizer])
        state.optimizer.config.clip_grad = 0.0
        for number in numbers:
            if way == "offloaded":
                memory.offload(PARTS)
                emptied = [t for t in optimizer_tensors(state.optimizer) if t.numel()]
                assert emptied and not any(t.untyped_storage().nbytes() for t in emptied)
                memory.onload(PARTS)
                memory.wait(*PARTS)
            set_gradients(state, number)
            state.optimizer.prepare_grads()
            state.optimizer.step_with_ready_grads()

    with fake_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = bf16_state(folder, {}, 2 if way == "resumed" else 1, mixed)
        checkpoint = RankCheckpointer(root, state, seed=0)
        if way == "resumed":
            checkpoint.load()
        take(state, {"saved": STEPS[:2], "resumed": STEPS[2:]}.get(way, STEPS))
        if way == "saved":
            checkpoint.save(2)
        checkpoint.close()
        engine = types.SimpleNamespace(chunks=state.model_chunks, groups=state.groups, optimizer=state.optimizer)
        moved = [p for part in inner_optimizers(state.optimizer) for p in part.optimizer.gpu_params_map_cpu_copy]
        return (
            training.global_digests(engine),
            len(moved),
            torch.stack([p.detach().double().sum() for chunk in state.model_chunks for p in chunk.parameters()])
            .sum()
            .item(),
        )


@pytest.mark.process
@pytest.mark.parametrize(
    "option",
    [
        name if name == "half, precision-aware" else pytest.param(name, marks=pytest.mark.full_matrix)
        for name in OPTIONS
    ],
)
def test_offloaded_and_resumed(ranks, tmp_path, option):
    folder, options = training.save_model(tmp_path / "model"), OPTIONS[option]
    plain, moved, total = ranks(1, body, folder, str(tmp_path / "a"), options, "plain")[0]
    assert moved > 10 and len(plain) == 48
    ranks(1, body, folder, str(tmp_path / "run"), options, "saved")
    for way in ("offloaded", "resumed"):
        state, _, same = ranks(1, body, folder, str(tmp_path / "run"), options, way)[0]
        assert same == total and state == plain, way
