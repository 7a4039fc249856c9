"""A function registered before Ray is there, found by a remote entry point; and the actor that keeps it."""

import ray
from omegaconf import DictConfig, OmegaConf

from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry, RegistryActor, sync_registries


def of_the_driver(**kwargs):
    return "the driver's"


AdvantageEstimatorRegistry.register("of_the_driver", of_the_driver)

ray.init()
sync_registries()


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    from skyrl_megatron.utils.ppo_utils import AdvantageEstimatorRegistry

    names = AdvantageEstimatorRegistry.list_available()
    return names, AdvantageEstimatorRegistry.get(cfg.trainer.algorithm.advantage_estimator)()


cfg = OmegaConf.create({"trainer": {"algorithm": {"advantage_estimator": "of_the_driver"}}})
names, answer = ray.get(skyrl_entrypoint.remote(cfg))

AdvantageEstimatorRegistry.sync_with_actor()
actor = ray.get_actor(AdvantageEstimatorRegistry._actor_name)
held = ray.get(actor.list_available.remote())

shared = RegistryActor.options(name="of_my_own", get_if_exists=True).remote()
ray.get(shared.register.remote("f", b"bytes"))
stored = ray.get(shared.get.remote("f"))
taken = ray.get(shared.unregister.remote("f"))
left = ray.get(shared.list_available.remote())
