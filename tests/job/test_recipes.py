"""Each recipe of a large model, as it is typed, on a tiny model of its family: trainer and engines take turns as they
do on GPUs. Overridden are sizes, and what :data:`CANNOT` names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_megatron.config.parse import RECIPES
from tests.job import runs
from tests.support.tiny_models import write_tiny_model
from tests.support.whole_folder import write_sums

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = "trainer.policy.megatron_config."
ENGINE = "generator.inference_engine."
SIZES = {
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 2,
    f"{MEGATRON}tensor_model_parallel_size": 1,
    f"{MEGATRON}pipeline_model_parallel_size": 1,
    f"{MEGATRON}expert_model_parallel_size": 2,
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 2,
    "trainer.max_tokens_per_microbatch": 512,
    "trainer.max_prompt_length": 64,
    "trainer.eval_batch_size": 4,
    "trainer.max_training_steps": 2,
    "generator.n_samples_per_prompt": 2,
    "generator.sampling_params.max_generate_length": 8,
    f"{ENGINE}num_engines": 2,
    f"{ENGINE}tensor_parallel_size": 1,
    f"{ENGINE}pipeline_parallel_size": 1,
    f"{ENGINE}max_num_seqs": 16,
    f"{ENGINE}engine_init_kwargs": "{max_model_len: 128, kv_cache_memory_bytes: 33554432}",
}
STAGES = {
    f"{MEGATRON}expert_model_parallel_size": 1,
    f"{MEGATRON}pipeline_model_parallel_size": 2,
    f"{ENGINE}num_engines": 1,
    f"{ENGINE}tensor_parallel_size": 2,
}
"""Of those recipes that split layers over stages."""
UNEVEN = STAGES | {
    f"{MEGATRON}num_layers_in_first_pipeline_stage": 1,
    f"{MEGATRON}num_layers_in_last_pipeline_stage": 1,
}
CANNOT = {
    f"{MEGATRON}optimizer_config_kwargs": "{}",  # Megatron updates no fp32 weights on the host, and CPU runs are fp32
    "trainer.flash_attn": "false",  # says that the recipe wants GPUs
}
FAMILIES = {
    "qwen3-30b-a3b": ("qwen3_moe", {}),
    "qwen3-30b-a3b-2x8": ("qwen3_moe", {}),
    "qwen3-30b-a3b-lora": ("qwen3_moe", {}),
    "qwen3-235b-a22b": ("qwen3_moe", STAGES),
    "qwen3-235b-a22b-lora": ("qwen3_moe", STAGES),
    "glm-4.5-air": ("glm4_moe", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "deepseek-v3": ("deepseek_v3", UNEVEN),
    "kimi-k2": ("deepseek_v3", UNEVEN),
    "olmoe-1b-7b": ("olmoe", {}),
}

SUPERVISED = ("qwen3-30b-a3b-sft", "qwen3-30b-a3b-sft-lora")
PAIRS = ("qwen3-30b-a3b-dpo-lora",)


def test_every_recipe_of_a_large_model_is_run():
    small = {"tiny-moe-cpu", "ppo_base_config"}
    names = {path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("embedded")}
    assert names - small == {*FAMILIES, *SUPERVISED, *PAIRS}


def run(tmp_path, recipe, family, rows, keys, command=(ROOT / "launch" / "run_moe.sh",)):
    """Start a recipe as it is typed, and return the lines of its metrics."""
    model = write_tiny_model(family, tmp_path / "model", num_hidden_layers=2)
    words = ["--recipe", recipe, f"model={model}", f"data.train_data=['{rows}']", f"data.val_data=['{rows}']"]
    words += [f"trainer.{name}_path={tmp_path}/{name}" for name in ("ckpt", "export", "log")]
    words += [f"{key}={value}" for key, value in (keys | CANNOT).items()]
    done = subprocess.run(
        [*command, *words, "trainer.logger=console"],
        env=runs.environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    return lines


@pytest.mark.vllm
@pytest.mark.full_matrix
@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_recipe_runs_as_typed(tmp_path, recipe):
    family, layout = FAMILIES[recipe]
    rows = write_sums(tmp_path / "rows.parquet", 16)
    lines = run(tmp_path, recipe, family, rows, SIZES | layout | {"environment.env_class": "gsm8k"})
    assert all(line[runs.GAP] <= runs.AGREE for line in lines[1:])


@pytest.mark.full_matrix
@pytest.mark.parametrize("recipe", SUPERVISED)
def test_a_supervised_recipe_runs_as_typed(tmp_path, recipe):
    talk = {"messages": [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(talk) + "\n") * 16)
    own = {key: value for key, value in SIZES.items() if key.startswith("trainer.") and "prompt" not in key}
    own |= {"sft.max_length": 64, "trainer.policy.optimizer_config.num_warmup_steps": 0}
    lines = run(tmp_path, recipe, "qwen3_moe", tmp_path / "rows.jsonl", own)
    assert lines[2]["sft/loss"] < lines[1]["sft/loss"], "the rows are all equal"
    assert (tmp_path / "ckpt/global_step_2/MANIFEST.json").exists()


@pytest.mark.full_matrix
@pytest.mark.parametrize("recipe", PAIRS)
def test_a_recipe_of_pairs_runs_as_typed(tmp_path, recipe):
    answers = {kind: [{"role": "assistant", "content": text}] for kind, text in (("chosen", "2"), ("rejected", "3"))}
    pair = {"prompt": [{"role": "user", "content": "1+1=?"}], **answers}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 16)
    own = {key: value for key, value in SIZES.items() if key.startswith("trainer.") and "prompt" not in key}
    own |= {"dpo.max_length": 64, "trainer.policy.optimizer_config.num_warmup_steps": 0}
    command = (sys.executable, "-m", "skyrl_megatron.cli", "dpo")
    lines = run(tmp_path, recipe, "qwen3_moe", tmp_path / "pairs.jsonl", own, command)
    assert lines[2]["dpo/loss"] < lines[1]["dpo/loss"], "the pairs are all equal"
