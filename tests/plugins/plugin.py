"""One of each kind but the family, as a user would write them. Tests copy the two files into a package of their own.

Everything that is used says so, with its process, by ``mark``.
"""

from mine.family import mark

from skyrl_megatron.algorithms import register_advantage_estimator, register_policy_loss
from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
from skyrl_megatron.plugins import register_engine, register_generator, register_transport
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.weight_sync.transport import GlooTransport


@register_policy_loss("my_loss")
def my_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    mark("loss")
    return -advantages * log_probs, {"my_ratio": 0.5}


@register_advantage_estimator("my_estimator")
def my_estimator(token_level_rewards, response_mask, index, **kwargs):
    mark("estimator")
    scores = (token_level_rewards * response_mask).sum(dim=-1, keepdim=True)
    advantages = (scores - scores.mean()) * response_mask
    return advantages, advantages.clone()


class MyEnv(BaseTextEnv):
    def step(self, action):
        mark("environment")
        reward = sum(character.isdigit() for character in action) / 6
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


register("my_env", MyEnv)


@register_generator("my_generator")
class MyGenerator(SkyRLGymGenerator):
    async def generate(self, input_batch, disable_tqdm=False):
        mark("generator")
        return await super().generate(input_batch, disable_tqdm)


@register_engine("my_engine")
class MyEngine(VLLMEngine):
    async def start(self):
        mark("engine")
        await super().start()


@register_transport("my_transport")
class MyTransport(GlooTransport):
    def new_group(self, store, host, rank, world_size):
        mark("transport")
        return super().new_group(store, host, rank, world_size)
