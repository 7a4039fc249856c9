"""Traces of a training step: which ranks write them, and where."""

import pytest

from tests.training import bodies

PROFILER = f"{bodies.MEGATRON}torch_profiler_config."


def one_step(folder, batch, overrides):
    from skyrl_megatron.data.splitting import split_for_dp
    from skyrl_megatron.runtime.engine import MegatronEngine

    engine = MegatronEngine(bodies.config(folder, overrides=overrides, world=2))
    rows = split_for_dp(engine.flops.forward(batch.lengths), engine.dp_size)[engine.dp_rank]
    engine.forward_backward(batch.select(rows))
    engine.optim_step()


@pytest.mark.parametrize("chosen", [(), (1,)], ids=["no ranks named", "rank 1"])
def test_all_ranks_or_those_named_write_into_the_log_folder(ranks, folder, batch, tmp_path, chosen):
    overrides = {
        "trainer.log_path": str(tmp_path),
        "trainer.project_name": "project",
        "trainer.run_name": "run",
        f"{PROFILER}enable": True,
        f"{PROFILER}ranks": list(chosen),
    }
    ranks(2, one_step, folder, batch, overrides)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json.gz")}
    assert written == {
        f"project/run/profile/{part}_0_rank{rank}.json.gz"
        for part in ("forward_backward", "optim_step")
        for rank in chosen or (0, 1)
    }


def test_a_folder_of_its_own(tmp_path):
    from skyrl_megatron.config import MegatronTorchProfilerConfig
    from skyrl_megatron_parts.profiling import profiled

    settings = MegatronTorchProfilerConfig(enable=True, save_path=str(tmp_path / "traces"))
    with profiled(settings, tmp_path / "logs", "nothing", rank=3):
        pass
    assert [path.name for path in tmp_path.rglob("*.json.gz")] == ["nothing_rank3.json.gz"]
    assert (tmp_path / "traces").is_dir() and not (tmp_path / "logs").exists()
