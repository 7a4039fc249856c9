"""Losses of preferences against TRL's on the same rows, models and reference: DPO, IPO, KTO, and the reward model's.

    python benchmarks/run.py preferences --rivals-python RIVALS/bin/python [--smoke]

TRL has an environment of its own, which shares this one's packages (the last line makes it so)::

    uv venv RIVALS --python .venv/bin/python
    uv pip install --python RIVALS/bin/python --no-deps trl==1.16.0
    echo $PWD/.venv/lib/python3.12/site-packages > RIVALS/lib/python3.12/site-packages/project.pth

Each loss is that of the first step of ``skyrl-megatron dpo`` or ``reward`` on two ranks (expert parallel), and that
of ``compute_loss`` of TRL's trainer. Exit code 1 if a difference exceeds 1e-6 of the loss. ``--smoke``: eight rows and
the first loss only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BETA, WEIGHT, TOLERANCE = 0.3, 0.7, 1e-6
LOSSES = {"sigmoid": "pairs", "ipo": "pairs", "kto": "labelled", "reward": "pairs"}


def write_data(folder: Path, rows: int) -> None:
    """Write pairs and labelled answers, the policy, a reference, and a model with a score."""
    from skyrl_megatron.tiny_model import write_embedded_model

    for name, seed in (("model", 1), ("reference", 2)):
        write_embedded_model(folder / name, seed)
    draw = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as pairs, (folder / "labelled.jsonl").open("w") as labelled:
        for number in range(rows):
            first, second = draw.randint(0, 99), draw.randint(0, 99)
            prompt = [{"role": "user", "content": f"What is {first} + {second}?"}]
            right = [{"role": "assistant", "content": f"the answer is {first + second}"}]
            wrong = [{"role": "assistant", "content": f"perhaps {draw.randint(200, 9999)}, perhaps not"}]
            pairs.write(json.dumps({"prompt": prompt, "chosen": right, "rejected": wrong}) + "\n")
            good = number % 3 > 0
            answer = {"prompt": prompt, "completion": right if good else wrong, "label": good}
            labelled.write(json.dumps(answer) + "\n")


def write_scorer(folder: Path) -> None:
    """Write the policy with a score of its own."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    model.config.pad_token_id = next(token for token in tokenizer.all_special_ids if token != end)
    model.save_pretrained(folder / "scorer")
    tokenizer.save_pretrained(folder / "scorer")


def ours(folder: Path, loss: str, rows: int) -> float:
    """Return the loss of the first step of the command."""
    place = folder / loss
    reward = loss == "reward"
    keys = {
        "trainer.policy.model.path": folder / ("scorer" if reward else "model"),
        "data.train_data": f"[{folder / LOSSES[loss]}.jsonl]",
        "data.val_data": "[]",
        "data.sampler": "in_order",
        "trainer.train_batch_size": rows,
        "trainer.max_training_steps": 1,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.bf16": "false",
        "trainer.logger": "console",
        "trainer.log_path": place / "logs",
        "trainer.ckpt_path": place / "ckpt",
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.policy.megatron_config.expert_model_parallel_size": 2,
    }
    if not reward:
        keys |= {
            "trainer.ref.model.path": folder / "reference",
            "dpo.loss": loss,
            "dpo.beta": BETA,
            "dpo.undesirable_weight": WEIGHT,
        }
    verb = "reward" if reward else "dpo"
    keys[f"{verb}.max_length"] = 512
    command = [sys.executable, "-m", "skyrl_megatron", verb, *(f"{key}={value}" for key, value in keys.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (line,) = (place / "logs/skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1:]
    return float(json.loads(line)[f"{verb}/loss"])


def theirs(folder: Path, loss: str) -> float:
    """Return TRL's loss of all rows. Runs in the rivals' environment."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    data = load_dataset("json", data_files=str(folder / f"{LOSSES[loss]}.jsonl"), split="train")
    kind = {"kto": "KTO", "reward": "Reward"}.get(loss, "DPO")
    options: dict[str, Any] = {"output_dir": str(folder / "trl"), "per_device_train_batch_size": len(data)}
    options |= {
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_length": 512,
        "gradient_checkpointing": False,
    }
    options |= {"disable_dropout": True}
    models: dict[str, Any] = {}
    if loss == "reward":
        source = folder / "scorer"
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    else:
        source = folder / "model"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        models["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)
        options |= {"beta": BETA, "router_aux_loss_coef": 0.0}  # else the load-balancing loss is part of the number
        options |= {"undesirable_weight": WEIGHT} if kind == "KTO" else {"loss_type": loss}
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        next(token for token in tokenizer.all_special_ids if tokenizer.convert_ids_to_tokens(token) != "<|end|>")
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=data,
        processing_class=tokenizer,
        **models,
    )
    batch = next(iter(torch.utils.data.DataLoader(trainer.train_dataset, len(data), collate_fn=trainer.data_collator)))
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(batch)))


def main() -> int:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals-python", help="interpreter of the rivals' environment")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "LOSS"), help=argparse.SUPPRESS)
    arguments = parse(parser, rows=8, losses=["sigmoid"])
    if arguments.serve:
        print(json.dumps(theirs(Path(arguments.serve[0]), arguments.serve[1])))
        return 0
    if not arguments.rivals_python:
        parser.error("--rivals-python is needed: see --help for how to make the environment")
    rows, wrong = arguments.rows, 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder, rows)
        write_scorer(folder)
        for loss in arguments.losses:
            command = [arguments.rivals_python, __file__, "--serve", str(folder), loss]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            rival, own = float(done.stdout.splitlines()[-1]), ours(folder, loss, rows)
            difference = abs(own - rival) / abs(rival)
            wrong += difference > TOLERANCE
            print(f"{loss:8} ours {own:.9f}   TRL {rival:.9f}   relative difference {difference:.1e}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
