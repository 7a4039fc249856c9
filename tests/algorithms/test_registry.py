"""Registries: names, duplicates, and agreement of all processes of a Ray cluster."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def losses():
    """The registry of policy losses, as it was afterwards."""
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    before = {name: PolicyLossRegistry.get(name) for name in PolicyLossRegistry.list_available()}
    yield PolicyLossRegistry
    PolicyLossRegistry.repopulate()
    for name in before.keys() - set(PolicyLossRegistry.list_available()):
        PolicyLossRegistry.register(name, before[name])


@pytest.fixture
def built_in(losses):
    """The registry with built-in functions alone."""
    losses.repopulate()
    return losses


def test_a_built_in_function_keeps_the_row_that_it_brought():
    """As a loss whose row is in its decorator: removing it and restoring it does not import its module again."""
    from skyrl_megatron.algorithms.registry import REGISTRIES, BaseFunctionRegistry
    from skyrl_megatron.config.table import LossRow, ObjectiveTable

    class WithRows(BaseFunctionRegistry):
        _function_type = "function of a test"
        _rows = ObjectiveTable("trainer.algorithm.policy_loss_type", "losses", {})

    try:
        for name in ("brought", "custom"):
            WithRows._rows.add(name, LossRow(meaning=name))
        WithRows.add_builtins(["brought"], {"brought": sorted})
        WithRows.register("custom", reversed)
        WithRows.unregister("brought")
        WithRows.repopulate()
    finally:
        REGISTRIES.pop(WithRows._actor_name)
    assert [*WithRows._rows.rows] == ["brought"] and WithRows.list_available() == ["brought"]


def test_names_without_ray(built_in):
    from skyrl_megatron.algorithms.losses import BUILT_IN, PolicyLossType, register_policy_loss, regular

    assert built_in.get("regular") is built_in.get(PolicyLossType.REGULAR) is regular
    assert {*built_in.list_available()} == {*BUILT_IN} >= {*PolicyLossType}

    @register_policy_loss("mine")
    def mine():
        pass

    assert built_in.get("mine") is mine and "mine" in built_in.list_available()
    with pytest.raises(ValueError, match=r"policy loss 'mine' is already registered\. Registered: cispo, .*mine"):
        built_in.register("mine", mine)
    with pytest.raises(ValueError, match="'regular' is already registered"):
        built_in.register(PolicyLossType.REGULAR, mine)
    with pytest.raises(ValueError, match=r"policy loss 'nine' is not registered\. Registered: cispo, .*mine"):
        built_in.get("nine")
    with pytest.raises(ValueError, match="'nine' is not registered"):
        built_in.unregister("nine")
    with pytest.raises(ValueError, match="'text' must be callable, got str"):
        built_in.register("text", "mine")
    built_in.unregister("mine")
    with pytest.raises(ValueError, match="not registered"):
        built_in.get("mine")


def test_built_in_names_can_be_replaced_and_come_back(built_in):
    from skyrl_megatron.algorithms.losses import regular
    from skyrl_megatron.algorithms.registry import repopulate_all_registries

    built_in.unregister("regular")
    built_in.register("regular", len)
    built_in.register("mine", max)
    repopulate_all_registries()
    assert built_in.get("regular") is len, "what is there stays"
    built_in.reset()
    assert built_in.list_available() == []
    built_in.repopulate_registry()
    assert built_in.get("regular") is regular and "mine" not in built_in.list_available()
    built_in.register("mine", max)
    built_in.repopulate()
    assert built_in.get("regular") is regular and "mine" not in built_in.list_available()


def test_registries_are_apart(built_in):
    from skyrl_megatron.algorithms.registry import BaseFunctionRegistry

    class OtherRegistry(BaseFunctionRegistry):
        _function_type = "other"

    OtherRegistry.register("regular", len)
    assert OtherRegistry.get("regular") is len and built_in.get("regular") is not len
    assert OtherRegistry.list_available() == ["regular"]
    OtherRegistry.reset()


# With Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registered_before() -> Iterator[None]:
    """Functions that are there when Ray is joined: a lambda, and one that lives in ``__main__``."""
    from skyrl_megatron.algorithms.losses import PolicyLossRegistry

    main = sys.modules["__main__"].__dict__
    exec("def of_main(*args):\n    return offset_of_main + 1\noffset_of_main = 41", main)
    PolicyLossRegistry.register("lambda", lambda: "a lambda")
    PolicyLossRegistry.register("of main", main["of_main"])
    assert main["of_main"].__module__ == "__main__"
    yield
    PolicyLossRegistry.repopulate()


@pytest.fixture(scope="module")
def ray(registered_before, session_ray):
    with session_ray.joined() as ray:
        yield ray


@pytest.fixture(scope="module")
def workers(ray):
    """Two live actors."""

    class Worker:
        def call(self, name, version=None):
            from skyrl_megatron.algorithms.losses import PolicyLossRegistry
            from skyrl_megatron.algorithms.registry import ensure_registry_versions

            if version is not None:
                ensure_registry_versions(version)
            return PolicyLossRegistry.get(name)()

        def register(self, name, result):
            from skyrl_megatron.algorithms.losses import PolicyLossRegistry

            PolicyLossRegistry.register(name, lambda: result)

        def names(self):
            from skyrl_megatron.algorithms.losses import PolicyLossRegistry

            return PolicyLossRegistry.list_available()

    actor = ray.remote(num_cpus=0)(Worker)
    return [actor.remote(), actor.remote()]


def test_functions_reach_every_actor(ray, workers, losses):
    from skyrl_megatron.algorithms.registry import registry_versions, sync_registries

    sync_registries()
    for worker in workers:  # registered before Ray started, without and with a version that travels
        assert ray.get(worker.call.remote("lambda")) == "a lambda"
        assert ray.get(worker.call.remote("of main", registry_versions())) == 42
    losses.register("later", lambda: "later")
    assert ray.get([worker.call.remote("later") for worker in workers]) == ["later"] * 2
    ray.get(workers[0].register.remote("of a worker", "worker 0"))
    assert losses.get("of a worker")() == "worker 0"
    assert ray.get(workers[1].call.remote("of a worker")) == "worker 0"
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], "the registry takes no CPU"


def test_a_name_registered_anew_is_seen_at_the_next_call(ray, workers, losses):
    from skyrl_megatron.algorithms.registry import registry_versions

    losses.register("changing", lambda: "first")
    version = registry_versions()
    assert ray.get([worker.call.remote("changing", version) for worker in workers]) == ["first"] * 2
    losses.unregister("changing")
    losses.register("changing", lambda: "second")
    assert ray.get([worker.call.remote("changing", version) for worker in workers]) == ["first"] * 2, "none asked"
    version = registry_versions()
    assert ray.get([worker.call.remote("changing", version) for worker in workers]) == ["second"] * 2
    losses.unregister("changing")
    for worker in workers:
        with pytest.raises(ValueError, match="'changing' is not registered"):
            ray.get(worker.call.remote("changing", registry_versions()))
    # Changed by a worker, dispatched by the driver, run by another worker.
    ray.get(workers[0].register.remote("changing", "third"))
    assert ray.get(workers[1].call.remote("changing", registry_versions())) == "third"


def test_built_in_names_change_everywhere(ray, workers, losses):
    from skyrl_megatron.algorithms.registry import registry_versions

    losses.unregister("regular")
    losses.register("regular", lambda: "mine")
    assert ray.get([worker.call.remote("regular", registry_versions()) for worker in workers]) == ["mine"] * 2
    losses.repopulate()
    with pytest.raises(
        TypeError, match="missing 4 required positional arguments"
    ):  # the built-in one, called without arguments
        ray.get(workers[0].call.remote("regular", registry_versions()))


def test_two_processes_cannot_share_a_name(ray, workers, losses):
    ray.get(workers[0].register.remote("taken", "by worker 0"))
    with pytest.raises(ValueError, match=r"another process has already registered another function as .*'taken'"):
        losses.register("taken", lambda: "by the driver")
    assert losses.get("taken")() == "by worker 0"
    with pytest.raises(ValueError, match=r"'nowhere' is not registered\. Registered: .*taken"):
        ray.get(workers[0].call.remote("nowhere"))


def test_the_actor_itself_answers(ray, workers, losses):
    """Each registry has a named actor with the members that scripts written for SkyRL ask."""
    import cloudpickle

    from skyrl_megatron.algorithms.registry import registry_versions
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, RegistryActor

    losses.register("held", lambda: "held")
    ray.get(workers[0].call.remote("held"))
    assert losses._actor_name == "policy_loss_registry"
    actor = RegistryActor.options(name=losses._actor_name, get_if_exists=True).remote()
    assert cloudpickle.loads(ray.get(actor.get.remote("held")))() == "held"
    assert "held" in ray.get(actor.list_available.remote()) and ray.get(actor.get.remote("nothing")) is None
    AdvantageEstimatorRegistry.sync_with_actor()
    estimators = ray.get_actor(AdvantageEstimatorRegistry._actor_name)
    assert "held" not in ray.get(estimators.list_available.remote())
    # what is changed there is what processes find: a new name when they ask, an old one at the next dispatched call
    ray.get(actor.register.remote("given", cloudpickle.dumps(lambda: "given")))
    assert losses.get("given")() == ray.get(workers[1].call.remote("given")) == "given"
    ray.get(actor.register.remote("held", cloudpickle.dumps(lambda: "replaced")))
    assert losses.get("held")() == "held", "none asked"
    assert ray.get(workers[0].call.remote("held", registry_versions())) == "replaced" == losses.get("held")()
    assert cloudpickle.loads(ray.get(actor.unregister.remote("held")))() == "replaced"
    assert "held" not in losses.list_available() and ray.get(actor.unregister.remote("held")) is None


def test_an_actor_of_ones_own_is_a_plain_store():
    import cloudpickle

    from skyrl_megatron.algorithms.registry import RegistryActor

    actor = RegistryActor()
    actor.register("f", cloudpickle.dumps(len))
    assert actor.registry == {"f": cloudpickle.dumps(len)} and actor.list_available() == ["f"]
    actor.unregister("f")
    assert actor.registry == {}


def test_a_known_name_sends_no_message(ray, losses, monkeypatch):
    from skyrl_megatron.algorithms.registry import RegistryClient

    losses.register("known", len)

    def refuse(*arguments):
        raise AssertionError("asked the actor")

    monkeypatch.setattr(RegistryClient, "_ask", refuse)
    assert losses.get("known") is len
    with pytest.raises(AssertionError, match="asked the actor"):
        losses.get("unknown")
    monkeypatch.undo()


def test_a_lost_registry_is_replaced(ray, workers, losses):
    from skyrl_megatron.algorithms.registry import registry_versions

    losses.register("survivor", lambda: "alive")
    losses.register("replaced", lambda: "old")
    before = registry_versions()
    ray.get([worker.call.remote("replaced", before) for worker in workers])
    losses.unregister("replaced")
    losses.register("replaced", lambda: "new")
    ray.kill(ray.get_actor("policy_loss_registry"))
    assert "replaced" in ray.get(workers[0].names.remote()), "its new registry is told of the old function first"
    after = registry_versions()
    assert after["policy_loss_registry"].actor != before["policy_loss_registry"].actor
    assert losses.get("replaced")() == "new"
    for worker in workers:
        assert ray.get(worker.call.remote("replaced", after)) == "new"
        assert ray.get(worker.call.remote("survivor", after)) == "alive"
