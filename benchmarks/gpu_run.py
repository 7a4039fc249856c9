"""Whole colocated steps of a slice of Qwen3-30B-A3B on one GPU: seconds by phase, tokens/s, sync GB/s.

    python benchmarks/run.py gpu_run [--layers 4] [--steps 4] [--folder DIR] [--recipe olmoe-1b-7b] [key=value …]

Random weights with the released widths, 128 experts and the released vocabulary; GRPO with a KL reference, 32 prompts
with 8 answers of 512 tokens each; trainer, reference and engine take turns on the GPU. What is printed is of the last
step, as ``metrics.jsonl`` has it. Needs Ray; without vLLM an engine over transformers samples. Without a GPU it says
so and ends; ``--smoke`` is a small model and few tokens, which runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROGRAM = """\
import sys
from skyrl_megatron.entrypoints import main_base
from skyrl_megatron.entrypoints.experiment import BasePPOExp
from skyrl_megatron.envs import BaseTextEnv, register
from skyrl_megatron.trainer import RayPPOTrainer


class LengthOfText(BaseTextEnv):
    def step(self, action):
        return {"observations": [], "reward": (len(action) % 17) / 17, "done": True, "metadata": {}}


class Trainer(RayPPOTrainer):
    def save_checkpoints(self):
        pass  # tens of GB that nothing here measures


class Exp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return Trainer(*args, **kwargs)


register("length", LengthOfText)
if __name__ == "__main__":
    sys.exit(main_base.main(sys.argv[1:], experiment=Exp))
"""


OF_RECIPE = (
    *("trainer.policy.optimizer_config", "trainer.train_batch_size", "trainer.policy_mini_batch_size"),
    *("trainer.max_tokens_per_microbatch", "trainer.max_prompt_length", "generator."),
)
"""Beginnings of keys that a recipe has with its own values."""


def main() -> int:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recipe", choices=["olmoe-1b-7b"], help="its shape and keys in place of those here")
    parser.add_argument("--folder", type=Path, help="where model and run are kept; default: a temporary folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parse(parser, layers=2, steps=2)

    from skyrl_megatron import device

    if not args.smoke and not device.driver_gpu_count():
        print("no GPU: nothing measured (--smoke runs anywhere)")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return measure(args, args.folder or Path(temporary))


def measure(args: argparse.Namespace, folder: Path) -> int:
    """Write model and data, run, and print the last step."""
    from benchmarks.gpu_train import QWEN3_30B_A3B, TINY, write_model
    from skyrl_megatron.entrypoints.main_base import config_dir
    from tests.gpu import installed
    from tests.support.released_models import OLMOE_1B_7B

    released = OLMOE_1B_7B if args.recipe else QWEN3_30B_A3B
    config = released | (TINY if args.smoke else {}) | {"num_hidden_layers": args.layers}
    if args.recipe and args.smoke:
        config |= {"head_dim": 32, "num_attention_heads": 2}
    config |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    prompts, answers, length = (4, 2, 8) if args.smoke else (64, 8, 1024) if args.recipe else (32, 8, 512)
    model = folder / "model"
    if not (model / "model.safetensors.index.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        write_model(model, config)
        write_tokenizer(model, int(str(config["vocab_size"])))
    data = folder / "prompts.jsonl"
    with data.open("w") as file:
        for number in range(prompts * (args.steps + 1)):
            text = " ".join(f"w{(number * 7919 + i * 104729) % 500}" for i in range(64))
            row = {"data_source": "words", "prompt": [{"role": "user", "content": text}], "env_class": "length"}
            file.write(json.dumps(row | {"reward_spec": {"method": "rule", "ground_truth": ""}}) + "\n")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    keys: dict[str, Any] = {
        "trainer.policy.model.path": model,
        "data.train_data": f"['{data}']",
        "data.val_data": f"['{data}']",
        "trainer.logger": "console",
        "trainer.project_name": "gpu_run",
        "trainer.run_name": "run",
        "trainer.log_path": folder / "logs",
        "trainer.ckpt_path": folder / "ckpts",
        "trainer.export_path": folder / "exports",
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.placement.ref_num_gpus_per_node": 1,
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.policy.optimizer_config.offload_after_step": "true",
        "trainer.fused_lm_head_logprob": "true",
        "trainer.train_batch_size": prompts,
        "trainer.policy_mini_batch_size": prompts,
        "trainer.max_tokens_per_microbatch": 256 if args.smoke else 16384,
        "trainer.max_training_steps": args.steps,
        "trainer.max_prompt_length": 128,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": 0,
        "trainer.ckpt_interval": 0,
        "trainer.phase_timeout_s": 300,
        "generator.n_samples_per_prompt": answers,
        "generator.sampling_params.max_generate_length": length,
        "generator.inference_engine.num_engines": 1,
        "generator.inference_engine.gpu_memory_utilization": 0.6,
        "generator.inference_engine.max_num_seqs": 256,
        "generator.inference_engine.enforce_eager": "false",
        **installed.run_settings(),
    }
    if args.recipe:  # which has sizes, optimizer and engines of its own
        recipe = [f"--config={config_dir}/{args.recipe}.yaml", *(["trainer.flash_attn=false"] if args.smoke else [])]
        kept = () if args.smoke else OF_RECIPE
        keys = {key: value for key, value in keys.items() if not key.startswith(kept)}
        args.overrides = [*args.overrides, "trainer.hf_save_interval=0", "environment.env_class=length"]
    else:
        recipe = []
    arguments = recipe + [f"{key}={value}" for key, value in keys.items()] + args.overrides
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run([sys.executable, str(program), *arguments], env=environment, check=False)
    lines = [json.loads(line) for line in (folder / "logs/gpu_run/run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step")]
    if ended.returncode or not steps:
        return ended.returncode or 1
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    last = steps[-1]
    chosen = {name: value for name, value in last.items() if name.startswith(("timing/", "perf/", "memory/"))}
    gaps = {name: value for name, value in last.items() if "logprobs_abs_diff" in name}
    transfer = last.get("timing/sync_weights_only_transfer")
    report = {
        "steps": len(steps),
        "weights_GB": round(weights / 1e9, 2),
        "sync_GB_per_s": round(weights / 1e9 / transfer, 2) if transfer else None,
        "sampled_tokens": prompts * answers * length,
        "rollout_tokens_per_s": round(prompts * answers * length / last["timing/generate"]),
        **gaps,
        **chosen,
    }
    print(json.dumps(report, indent=2))
    return 0


def write_tokenizer(folder: Path, size: int) -> None:
    """One word for each id, so that whatever a random model samples can be decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", *(f"w{number}" for number in range(size - 4))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="w0",
        additional_special_tokens=words[2:4],
    )
    fast.chat_template = (
        "{% for message in messages %}<|user|> {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
