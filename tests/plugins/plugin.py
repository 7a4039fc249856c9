"""One of each kind but the family, as a user would write them. Tests copy the two files into a package of their own.

Everything that is used says so, with its process, by ``mark``.
"""

import os
from pathlib import Path

from mine.family import mark

from skyrl_megatron.algorithms import register_advantage_estimator, register_policy_loss
from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.inference.vllm.vllm_engine import VLLMEngine
from skyrl_megatron.plugins import register_engine, register_generator, register_recorder, register_transport
from skyrl_megatron.rollout.gym_generator import SkyRLGymGenerator
from skyrl_megatron.trainer.recorders import RunRecorder
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


@register_recorder
class MyRecorder(RunRecorder):
    """Writes down what happens, a line for each event."""

    def note(self, *words):
        with Path(os.environ["SKYRL_TEST_MARKS"]).with_name("events").open("a") as file:
            print(*words, file=file)

    def on_load(self, resumed_from):
        self.note("load", resumed_from)

    def on_start(self, step, roles):
        self.note("start", step, *roles)

    def on_rollouts(self, output):
        self.note("rollouts", len(output["response_ids"]))

    def on_batch(self, step, batch, output):
        self.note("batch", step, len(batch))

    def before_update(self, step, batch, score):
        self.note("update", step, batch.advantages is not None)

    def step_metrics(self, lengths, metrics, device_type):
        self.note("metrics", len(lengths), device_type())
        return {"mine/longest": float(lengths.max())}

    def on_step_end(self, step, roles):
        self.note("end of step", step)

    def on_end(self):
        self.note("end")


@register_recorder
class Broken(RunRecorder):
    """No run ends because of it."""

    def on_batch(self, step, batch, output):
        raise KeyError("no such column")
