"""Supervised training against TRL's SFTTrainer: the same model, rows, fp32 and threads, in one run.

    python benchmarks/run.py sft --rival-path FOLDER [--rounds 3] [--rows 32]

``FOLDER`` is made by ``pip install --target FOLDER --no-deps trl``; without it, only our own speed is printed. The
model is the large one of ``step.py``. A round takes one optimizer step on all rows of each side, in turn: ours, TRL
with its default padding (8 rows a micro-batch, in random order), and TRL with packing (``bfd``, rows of 1024 tokens).
Neither recomputes activations. TRL's collator and its packing are not timed; ours are. Each side is one process with
``--threads`` threads. The figure is the ratio of the fastest rounds, as noise of other programs only ever adds.

Before anything is timed, loss and gradient of the first step are compared with TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from skyrl_megatron.runtime.engine import MegatronEngine
    from skyrl_megatron_supervised.trained_answers import TrainedSequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
PADDED, PACKED = "TRL, padded", "TRL, packed"
PACK_TOKENS = 1024
"""Tokens of a packed row of TRL, its default; ours packs micro-batches of as many."""
MAX_GRAD_NORM = 1.0

Gradients = dict[str, "torch.Tensor"]


def rows(count: int, vocabulary: int) -> list[TrainedSequence]:
    """Return rows of 16 to 64 prompt tokens and 32 to 512 trained tokens, log-normal. None is token 0, which is the
    padding: transformers keeps no gradient of its embedding."""
    rng, made = random.Random(0), []
    for _ in range(count):
        trained = min(max(round(rng.lognormvariate(4.7, 0.7)), 32), 512)
        prompt = [rng.randrange(1, vocabulary) for _ in range(rng.randint(16, 64))]
        made.append((prompt, [rng.randrange(1, vocabulary) for _ in range(trained)], [1] * trained))
    return made


def gradient(parameter: Any) -> torch.Tensor:
    """Return Megatron's gradient of a parameter."""
    found: torch.Tensor = parameter.main_grad
    return found


class Ours:
    """One rank's engine."""

    def __init__(self, model: Path, taught: list[TrainedSequence]) -> None:
        from skyrl_megatron.config.schema.sft import SFTTrainConfig
        from skyrl_megatron.runtime.engine import MegatronEngine
        from skyrl_megatron_supervised.chat_rows import taught_batch

        keys = {
            "trainer.policy.model.path": str(model),
            "trainer.gradient_checkpointing": False,
            "trainer.max_tokens_per_microbatch": PACK_TOKENS,
            "trainer.bf16": False,
            "trainer.policy.optimizer_config.lr": 1e-5,
        }
        self.engine: MegatronEngine = MegatronEngine(SFTTrainConfig.from_cli_overrides(keys))
        self.batch = taught_batch(taught, [str(row) for row in range(len(taught))])

    def gradients(self) -> tuple[float, Gradients]:
        """Return the loss, and HF name → gradient."""
        from skyrl_megatron.runtime.hf_weights import stream_hf

        loss = self.engine.forward_backward(self.batch)["policy_loss"]
        self.engine.reduce_gradients()
        pieces = stream_hf(self.engine.model, self.engine.groups, of=gradient)
        found = {piece.name: piece.tensor.detach().clone() for piece in pieces}
        self.engine.clear_gradients()
        return loss, found

    def step(self) -> float:
        """Take an optimizer step; return its seconds."""
        start = time.perf_counter()
        self.engine.forward_backward(self.batch)
        self.engine.optim_step()
        return time.perf_counter() - start


def serve(folder: Path, name: str, threads: int) -> None:
    """TRL's end of the pipe: a line in, the seconds of a step out. The first step also writes loss and gradient."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print goes to stderr
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    taught = json.loads((folder / "rows.json").read_text())
    data = Dataset.from_list([{"input_ids": [*p, *r], "labels": [*([-100] * len(p)), *r]} for p, r, _ in taught])
    state: dict[str, Any] = {"loss": 0.0, "steps": 0}

    class Trainer(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            state["loss"] += float(loss)
            return loss

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            sys.stdin.readline()
            state["began"] = time.perf_counter()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if not state["steps"]:
                (folder / f"{name}.json").write_text(json.dumps(state["loss"]))
                write_gradients(model, folder / name)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            state["steps"] += 1
            print(time.perf_counter() - state["began"], file=answers, flush=True)

    packs = name == PACKED
    settings: dict[str, Any] = dict(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        max_steps=10**6,
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        packing=packs,
        max_length=PACK_TOKENS,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows_each = 1 if packs else min(8, len(taught))
    whole = Trainer(model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)
    steps = len(whole.train_dataset) // rows_each  # packing leaves fewer rows
    settings |= {"per_device_train_batch_size": rows_each, "gradient_accumulation_steps": steps}
    trainer = Trainer(
        model=model,
        args=SFTConfig(**settings),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


def write_gradients(model: Any, folder: Path) -> None:
    """Write a model's gradients as its weights are written: transformers names tensors on disk differently."""
    import torch
    from transformers import AutoModelForCausalLM

    holder = AutoModelForCausalLM.from_config(model.config).float()
    with torch.no_grad():
        for (_, own), (_, theirs) in zip(holder.named_parameters(), model.named_parameters(), strict=True):
            own.copy_(theirs.grad)
    holder.save_pretrained(folder)


class Rival:
    """TRL in a process of its own, which waits between its steps."""

    def __init__(self, folder: Path, name: str, path: str, threads: int) -> None:
        self.folder, self.name = folder, name
        variables = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
        variables["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, __file__, "--serve", str(folder), "--as", name, "--threads", str(threads)]
        self.log = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def step(self) -> float:
        """Take an optimizer step; return its seconds."""
        questions, answers = self.process.stdin, self.process.stdout
        assert questions and answers
        print("step", file=questions, flush=True)
        if not (line := answers.readline()):
            self.log.seek(0)
            sys.exit(f"{self.name} failed:\n{self.log.read()[-3000:]}")
        return float(line)

    def gradients(self) -> tuple[float, Gradients]:
        """Return the loss, and HF name → gradient, of the first step."""
        from safetensors.torch import load_file

        found: Gradients = {}
        for file in (self.folder / self.name).glob("*.safetensors"):
            found |= load_file(file)
        return json.loads((self.folder / f"{self.name}.json").read_text()), found

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()


def compare(ours: tuple[float, Gradients], theirs: tuple[float, Gradients], name: str) -> None:
    """Print how far loss and gradient are apart. Transformers clips before its callback: ours is clipped likewise."""
    import torch

    assert ours[1].keys() == theirs[1].keys(), ours[1].keys() ^ theirs[1].keys()
    norm = torch.stack([mine.double().square().sum() for mine in ours[1].values()]).sum().sqrt()
    scale = (MAX_GRAD_NORM / (norm + 1e-6)).clamp_max(1.0)
    pairs = [(mine.double() * scale, theirs[1][tensor].double()) for tensor, mine in ours[1].items()]
    off = torch.stack([(mine - other).square().sum() for mine, other in pairs]).sum().sqrt()
    size = torch.stack([other.square().sum() for _, other in pairs]).sum().sqrt()
    loss = abs(ours[0] - theirs[0]) / theirs[0]
    print(f"{name}: loss {theirs[0]:.6f}, ours off by {loss:.1e}; gradient {size:.6f}, off by {off / size:.1e}")
    assert loss <= 1e-6 and off <= 1e-5 * size, "not the same step"


@contextmanager
def one_process() -> Iterator[None]:
    """Initialise torch.distributed for one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    from smoke import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-path", help="folder of TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="of an optimizer step")
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--model", choices=("embedded", "large"), default="large")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    args = parse(parser, rounds=1, rows=8, model="embedded")
    if args.serve:
        return serve(args.serve, args.name, args.threads)
    import torch
    from step import SCENARIOS, large_model

    from skyrl_megatron.tiny_model import VOCAB_SIZE

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as place, one_process():
        folder, rivals = Path(place), []
        large_model(folder / "model", SCENARIOS[args.model].shape or {})
        taught = rows(args.rows, VOCAB_SIZE)
        (folder / "rows.json").write_text(json.dumps(taught))
        ours = Ours(folder / "model", taught)
        sides: dict[str, Callable[[], float]] = {"ours": ours.step}
        try:
            if args.rival_path:
                expected = ours.gradients()
                for name in (PADDED, PACKED):
                    rivals.append(Rival(folder, name, args.rival_path, args.threads))
                    sides[name] = rivals[-1].step
                    rivals[-1].step()
                    compare(expected, rivals[-1].gradients(), name)
            ours.step()
            best = {name: step() for name, step in sides.items()}
            for _ in range(args.rounds - 1):
                for name, step in sides.items():
                    best[name] = min(best[name], step())
        finally:
            for rival in rivals:
                rival.end()
    tokens = sum(len(prompt) + len(response) for prompt, response, _ in taught)
    print(f"{tokens} tokens in {args.rows} rows, {args.threads} thread(s) each")
    for name, seconds in best.items():
        ratio = "" if name == "ours" else f"   ours is {seconds / best['ours']:.2f}x as fast (wanted: 1.5)"
        print(f"{name:12} {seconds:8.2f} s/step {tokens / seconds:10.0f} tokens/s{ratio}")


if __name__ == "__main__":
    main()
