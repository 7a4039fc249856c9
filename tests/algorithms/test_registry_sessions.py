"""Registries of a process that joins one Ray after another, or none."""

import pytest


@pytest.fixture
def losses():
    """The registry of policy losses, as it was afterwards."""
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    yield PolicyLossRegistry
    PolicyLossRegistry.repopulate()


def test_without_ray_there_is_nothing_to_sync():
    import ray

    from skyrl_megatron.algorithms.registry import ensure_registry_versions, registry_versions, sync_registries

    assert not ray.is_initialized()
    ensure_registry_versions(registry_versions())
    with pytest.raises(ValueError, match="Ray is not initialised"):
        sync_registries()


def test_each_session_gets_what_is_known(session_ray, losses):
    from skyrl_megatron.algorithms.registry import registry_versions

    with session_ray.joined():
        losses.register("across", lambda: "both sessions")
        before = registry_versions()
    losses.register("between", lambda: "sessions")
    with session_ray.joined() as ray:

        @ray.remote(num_cpus=0)
        def call(names, version):
            from skyrl_megatron.algorithms.losses import PolicyLossRegistry
            from skyrl_megatron.algorithms.registry import ensure_registry_versions

            ensure_registry_versions(version)
            return [PolicyLossRegistry.get(name)() for name in names]

        after = registry_versions()
        assert after["policy_loss_registry"].actor != before["policy_loss_registry"].actor
        assert ray.get(call.remote(["across", "between"], after)) == ["both sessions", "sessions"]
