"""Whose layers a model gets: a GPU run never takes slower ones unless it is told to or nothing else expresses the
model. Of the GPU only the answer of ``device.has_cuda`` is made up; Transformer Engine is really missing or broken."""

import importlib.util
import sys

import pytest

from tests.bridges.tiny_models import tiny_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed: see tests/te"
)


@pytest.fixture
def gpu(monkeypatch):
    from skyrl_megatron import device

    monkeypatch.setattr(device, "has_cuda", lambda: True)


def choice(model_type="qwen3_moe", asked=None, **options):
    from skyrl_megatron.runtime.model.description import read_hf_model, use_transformer_engine

    return use_transformer_engine(read_hf_model(tiny_config(model_type)), asked, **options)


def refused(*arguments, **options):
    from skyrl_megatron.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        choice(*arguments, **options)
    return str(caught.value)


def test_without_a_gpu_layers_are_ours_and_theirs_are_refused():
    assert choice() is False
    message = refused(asked="transformer_engine", prefix="trainer.policy.megatron_config.")
    assert "trainer.policy.megatron_config.transformer_config_kwargs.transformer_impl=transformer_engine" in message
    assert "needs a GPU" in message


def test_a_gpu_run_without_transformer_engine_ends(gpu):
    message = refused()
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in message
    assert "launch/setup.sh gpu" in message and "set local" in message


def test_a_gpu_run_with_a_broken_transformer_engine_says_why(gpu, tmp_path, monkeypatch):
    """As after a build against another torch."""
    broken = tmp_path / "transformer_engine"
    (broken / "pytorch").mkdir(parents=True)
    (broken / "__init__.py").touch()
    (broken / "pytorch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c105ErrorC2')")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert "undefined symbol: _ZN3c105ErrorC2" in refused()
    finally:
        sys.modules.pop("transformer_engine", None)


def test_local_layers_are_taken_where_they_are_asked_for(gpu):
    assert choice(asked="local") is False


def test_a_model_that_theirs_cannot_express_gets_ours_with_the_reason(gpu):
    from skyrl_megatron.runtime.model.description import describe, read_hf_model

    assert choice("olmoe") is False
    assert "q and k norms over all heads" in refused("olmoe", "transformer_engine")
    named = describe(read_hf_model(tiny_config("gpt_oss")), False)
    assert named.endswith("does not support experts with biases)")


def test_another_value_is_refused():
    assert "must be transformer_engine or local" in refused(asked="flash")


@pytest.mark.process
def test_the_key_reaches_the_layers(ranks):
    """A rank that is told there is a GPU: refused before a layer is made, and built with ``local``."""
    assert ranks(1, build_as_on_a_gpu) == [("No module named 'transformer_engine'", "skyrl_megatron's own")]


def build_as_on_a_gpu():
    import re

    import torch

    from skyrl_megatron import device
    from skyrl_megatron.config.layout import ParallelConfig
    from skyrl_megatron.errors import ConfigError
    from skyrl_megatron.runtime import cpu_patches as megatron_patches
    from skyrl_megatron.runtime import parallel_state
    from skyrl_megatron.runtime.model.build import build_model

    megatron_patches.install()
    groups = parallel_state.initialize(ParallelConfig(1), seed=0, timeout_s=60)
    options = dict(dtype=torch.float32, device=torch.device("cpu"))
    real = device.has_cuda
    device.has_cuda = lambda: True
    try:
        build_model(tiny_config("qwen3_moe"), groups, **options)
        message = "built"
    except ConfigError as error:
        message = re.search(r"No module named '\w+'", str(error))[0]
    finally:
        device.has_cuda = real
    local = build_model(
        tiny_config("qwen3_moe"), groups, transformer_config_kwargs={"transformer_impl": "local"}, **options
    )
    return message, local.layer_kind
