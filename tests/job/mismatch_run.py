"""A run whose record of each step is wrong in another way, and engines that are wrong themselves."""

FAULTS = """
def convert_to_training_input(self, generator_output, uids):
    if self.global_step == 0:
        routes = [(each + 1) % 8 for each in generator_output["rollout_expert_indices"]]
        generator_output["rollout_expert_indices"] = routes
    if self.global_step == 1:
        generator_output["rollout_support"] = None
    return RayPPOTrainer.convert_to_training_input(self, generator_output, uids)
def sync_weights(self):
    if self.global_step != 2:
        RayPPOTrainer.sync_weights(self)
Trainer.convert_to_training_input, Trainer.sync_weights = convert_to_training_input, sync_weights
"""
"""Step 1: experts of others. Step 2: what tokens were sampled from is lost. Step 3: sampled with version 1."""

RUN = {
    "trainer__policy__megatron_config__moe_enable_routing_replay": "true",
    "generator__inference_engine__enable_return_routed_experts": "true",
    "generator__sampling_params__top_p": 0.9,
    "trainer__dump_data_batch": "true",
    "trainer__ckpt_interval": 1,
    "trainer__max_training_steps": 4,
}

ALTERED = "model.layers.1.self_attn.v_proj.weight"
FAULTY = f"""
from skyrl_megatron.inference.vllm.compat import WorkerExtension


class Altered(WorkerExtension):
    '''A loader that makes another tensor of one that arrived whole.'''

    def skyrl_record_targets(self, tensors):
        '''The loader changes before its route is recorded; what it does then has no route.'''
        model = self.weight_transfer_engine.model
        load = type(model).load_weights
        model.load_weights = lambda weights: load(model, map(altered, weights))
        return super().skyrl_record_targets(tensors)


def altered(named):
    name, tensor = named
    return name, tensor * 1.5 if name == "{ALTERED}" else tensor
"""


PLANTED = """
import sys
from dataclasses import replace

from skyrl_megatron.cli import main
from skyrl_megatron_tools.logprob_mismatch import replay

worker, *arguments = sys.argv[1:]
plain = replay.engine_settings


def planted(*given, **changes):
    settings = plain(*given, **changes)
    return replace(settings, extra={**settings.extra, "worker_extension_cls": f"faulty.{worker}"})


if __name__ == "__main__":
    replay.engine_settings = planted
    sys.exit(main(arguments))
"""
"""A command whose engines have a worker of ``faulty.py``: no setting gives them one."""


def planted(folder, worker):
    """The beginning of a command with this worker, and a folder with the configuration of the run."""
    (folder / "planted.py").write_text(PLANTED)
    return [str(folder / "planted.py"), worker], other_config(folder, worker, "", "")


def other_config(folder, name, old, new):
    """A folder with the configuration of the run in it, one line changed."""
    text = (folder / "logs/skyrl/run/config.yaml").read_text()
    assert not old or text.count(old) == 1, text
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(text.replace(old, new))
    return folder / name
