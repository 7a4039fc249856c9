"""Ten mistakes of placement: each is one line that names the number to type. And hardware that a run leaves idle."""

import pytest

from skyrl_megatron.config import SkyRLTrainConfig
from skyrl_megatron.config.hardware import Hardware
from skyrl_megatron.config.rules.placement_rules import idle_gpus
from skyrl_megatron.config.validate import find_problems
from tests.bridges.tiny_models import tiny_config
from tests.support.whole_folder import write_whole_folder

P, E, M = "trainer.placement.", "generator.inference_engine.", "trainer.policy.megatron_config."
EIGHT = [f"{P}policy_num_gpus_per_node=8"]
APART = [*EIGHT, f"{P}colocate_all=false"]
FOUR_NODES = Hardware(8, 4, elsewhere=True)
SIZES = dict(num_experts=32, num_attention_heads=48, num_key_value_heads=48, num_hidden_layers=6)
MISTAKES = {
    "engines that were not scaled": (
        [*EIGHT, f"{P}policy_num_nodes=4", f"{E}tensor_parallel_size=2", f"{E}num_engines=4"],
        f"{E}num_engines=4",
        "set it to 16, or remove this key",
    ),
    "more engines than GPUs": ([*EIGHT, f"{E}num_engines=9"], f"{E}num_engines=9", "set it to 8, or remove this key"),
    "more nodes than there are": (
        [*EIGHT, f"{P}policy_num_nodes=8"],
        f"{P}policy_num_nodes=8",
        "the run takes 64 (policy) = 64 GPUs, but there are 32: set it to 4",
    ),
    "more GPUs than a node has": (
        [f"{P}policy_num_gpus_per_node=16"],
        f"{P}policy_num_gpus_per_node=16",
        f"a node has 8 GPUs: set it to 8 and {P}policy_num_nodes=2",
    ),
    "no room beside the policy": (
        [*APART, f"{P}policy_num_nodes=2", f"{E}tensor_parallel_size=4", f"{E}num_engines=6"],
        f"{E}num_engines=6",
        "16 (policy) + 24 (engines) = 40 GPUs, but there are 32: set it to 4",
    ),
    "a policy that leaves no room for the engines": (
        [*APART, f"{P}policy_num_nodes=4", f"{E}tensor_parallel_size=2", f"{E}num_engines=4"],
        f"{P}policy_num_nodes=4",
        "32 (policy) + 8 (engines) = 40 GPUs, but there are 32: set it to 3",
    ),
    "more GPUs than a node has, on all nodes": (
        [f"{P}policy_num_gpus_per_node=16", f"{P}policy_num_nodes=4"],
        f"{P}policy_num_gpus_per_node=16",
        "a node has 8 GPUs: set it to 8",
    ),
    "stages that leave no ranks for experts": (
        [*EIGHT, f"{M}pipeline_model_parallel_size=3", f"{M}expert_model_parallel_size=8"],
        f"{M}pipeline_model_parallel_size=3",
        "tp·pp·cp = 1·3·1 = 3 must divide the 8 ranks: set it to 2",
    ),
    "an engine across parts of nodes": (
        [f"{P}policy_num_gpus_per_node=6", f"{P}policy_num_nodes=2", f"{E}tensor_parallel_size=4"],
        f"{E}tensor_parallel_size=4",
        "set it to 3",
    ),
    "an engine larger than the policy's share": (
        [*EIGHT, f"{E}tensor_parallel_size=16"],
        f"{E}tensor_parallel_size=16",
        "set it to 8",
    ),
    "a reference of another size": (
        [*EIGHT, f"{P}policy_num_nodes=4", f"{P}ref_num_nodes=1"],
        f"{P}ref_num_nodes=1",
        "set it to policy_num_nodes=4",
    ),
    "experts over more ranks than there are": (
        [*EIGHT, f"{M}expert_model_parallel_size=16"],
        f"{M}expert_model_parallel_size=16",
        "pp·etp·ep = 1·1·16 = 16 must divide the 8 ranks: set it to 8, or use a multiple of 16 ranks",
    ),
    "stages that do not divide the ranks": (
        [*EIGHT, f"{M}tensor_model_parallel_size=2", f"{M}pipeline_model_parallel_size=3"],
        f"{M}pipeline_model_parallel_size=3",
        "tp·pp·cp = 2·3·1 = 6 must divide the 8 ranks: set it to 2, or use a multiple of 6 ranks",
    ),
    "an engine over nodes without Ray": (
        [*EIGHT, f"{P}policy_num_nodes=2", f"{E}tensor_parallel_size=16", f"{E}distributed_executor_backend=mp"],
        f"{E}distributed_executor_backend=mp",
        "an engine of tp · pp · dp = 16 GPUs spans several nodes of 8: set it to ray",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_whole_folder(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe", **SIZES))


def of(model, *keys):
    given = [f"trainer.policy.model.path={model}", "trainer.train_batch_size=512", "data.train_data=[a.parquet]"]
    return SkyRLTrainConfig.from_cli_overrides(
        [*given, "trainer.policy_mini_batch_size=512", "trainer.logger=console", *keys]
    )


def said(cfg, hardware):
    return [str(problem) for problem in find_problems(cfg, hardware) if str(problem).startswith((P, E, M))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_number_to_type(model, mistake):
    keys, named, number = MISTAKES[mistake]
    (line,) = said(of(model, *keys), FOUR_NODES)
    assert line.startswith(f"{named}: ") and number in line and "\n" not in line, line


@pytest.mark.filterwarnings("ignore")
def test_a_smaller_machine_than_the_recipe_is_for(model):
    (line,) = said(of(model, *EIGHT), Hardware(4, 1, elsewhere=True))
    assert line == f"{P}policy_num_gpus_per_node=8: a node has 4 GPUs: set it to 4"
    (line,) = said(of(model, *EIGHT), Hardware(4, 2, elsewhere=True))
    assert line.endswith(f"set it to 4 and {P}policy_num_nodes=2")


@pytest.mark.filterwarnings("ignore")
def test_nodes_of_different_sizes(model):
    cfg = of(model, *EIGHT, f"{P}policy_num_nodes=2")
    (line,) = said(cfg, Hardware(8, 3, elsewhere=True, uneven=(8, 4, 4)))
    assert line.startswith(f"{P}policy_num_nodes=2: nodes have 8, 4, 4 GPUs, so 1 have 8: set it to 1, or "), line
    assert said(of(model, *EIGHT), Hardware(8, 3, elsewhere=True, uneven=(8, 4, 4))) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("nodes", "tp", "engines"), [(1, 1, 8), (1, 2, 4), (4, 2, 16), (4, 16, 2)])
def test_engines_follow_the_gpus_of_the_policy(model, nodes, tp, engines):
    cfg = of(model, *EIGHT, f"{P}policy_num_nodes={nodes}", f"{E}tensor_parallel_size={tp}")
    assert said(cfg, FOUR_NODES) == [] and cfg.generator.inference_engine.num_engines == engines
    cfg.trainer.placement.policy_num_nodes = 2  # as a script changes it
    assert said(cfg, FOUR_NODES) == [] and cfg.generator.inference_engine.num_engines == 16 // tp


@pytest.mark.filterwarnings("ignore")
def test_engines_apart_are_as_many_as_were_asked_for(model):
    assert of(model, *APART).generator.inference_engine.num_engines == 1
    assert of(model, *EIGHT, f"{E}run_engines_locally=false").generator.inference_engine.num_engines == 8


@pytest.mark.parametrize(
    ("keys", "nodes", "text"),
    [
        (EIGHT, [8] * 4, f"24 of 32 GPUs stay idle: {P}policy_num_nodes=4 uses them"),
        ([f"{P}policy_num_gpus_per_node=4"], [8], f"4 of 8 GPUs stay idle: {P}policy_num_gpus_per_node=8 uses them"),
        ([*APART, f"{E}tensor_parallel_size=2"], [8, 8], f"6 of 16 GPUs stay idle: {E}num_engines=4 uses them"),
        ([*APART, f"{E}tensor_parallel_size=8"], [8, 8, 4], "4 of 20 GPUs stay idle"),
        ([*EIGHT, f"{P}policy_num_nodes=4"], [8] * 4, None),
        ([], [], None),
    ],
)
def test_idle_gpus_are_said_with_the_key_that_uses_them(model, keys, nodes, text):
    assert idle_gpus(of(model, *keys), nodes) == text


@pytest.mark.parametrize("hardware", [Hardware(0, 1), Hardware(0, 2, elsewhere=True)])
def test_no_gpu_for_a_recipe_that_wants_them(model, hardware):
    """The only line: what a CPU run could not do is no help."""
    offload = f"{M}optimizer_config_kwargs.optimizer_cpu_offload=true"
    (problem,) = find_problems(of(model, *EIGHT, "trainer.flash_attn=true", offload), hardware)
    assert problem.key == "trainer.flash_attn" and "no GPU is visible on " in problem.fix
    assert "this configuration wants 8: " in problem.fix and "--check=1x8" in problem.fix
