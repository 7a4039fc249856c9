"""Train an agent that nobody changed for it: ``agent.py`` repairs tiny repositories in sandboxes, on two CPU cores.

    python launch/examples/tiny_repos/train.py [--seed N] [key=value …]

makes ``tiny_repos/`` in the current folder: twenty repositories to train on and twenty others to evaluate on, and a
model of a million parameters that was taught the form of answers, of which few are right. Then it trains with
``train.yaml``; keys are those of every run. The agent calls OpenAI's API, its tokens are taken from the run's gateway,
and hidden tests in a second sandbox decide.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COUNT, TAUGHT, RIGHT = 20, 60, 0.25
"""Repositories to train on and to evaluate on; those that the model was taught with; share of right answers there."""
STEPS = 200
Talk = list[dict[str, str]]


def write_rows(file: Path, repositories: list[Any], make: dict[str, Any]) -> None:
    """Write repositories, and their rows."""
    from skyrl_megatron.data import prepare

    rows = []
    for each in repositories:
        make["write"](each, file.parent / each.name)
        row = prepare.make_row("tiny_repos", each.text, "task", "", {"name": each.name})
        del row["reward_spec"]
        rows.append(row | {"task": str((file.parent / each.name).absolute())})
    prepare.write(rows, file)


def talks(repositories: list[Any], make: dict[str, Any], rng: random.Random) -> Iterator[Talk]:
    """Yield conversations of the agent for ever. Answers are lines of such repositories, a quarter of them right."""
    agent = runpy.run_path(str(HERE / "agent.py"), run_name="agent")
    kinds = {kind.name: kind for kind in make["KINDS"]}
    while True:
        each = rng.choice(repositories)
        name, module = agent["TASK"].search(each.text).groups()
        kind = kinds[each.name.partition("-")[2]]
        right = each.solution[f"{module}.py"].partition(f"def {name}(")[2].splitlines()[1].strip()
        alike = [one.right for one in kinds.values() if one.parameters == kind.parameters and one is not kind]
        other = rng.choice([kind.wrong or "return values", *alike]).replace("{n}", str(rng.randint(3, 7)))
        asked = each.text + agent["shown"](each.files[f"{module}.py"], name)
        answer = right if rng.random() < RIGHT else other
        yield [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def warm_up(folder: Path, repositories: list[Any], make: dict[str, Any]) -> None:
    """Write a model that answers in the form of the conversations above."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_megatron.tiny_model import write_embedded_model

    tiny = runpy.run_path(str(HERE.parent / "tiny.py"))
    seeded = write_embedded_model(folder.with_name("seeded"))
    tokenizer = AutoTokenizer.from_pretrained(seeded)
    tokenizer.add_tokens(["_", "[", "]", "<", ">"])
    model = AutoModelForCausalLM.from_pretrained(seeded, dtype=torch.float32)
    torch.manual_seed(0)
    tiny["teach"](model, tokenizer, talks(repositories, make, random.Random(0)), STEPS)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main(words: list[str]) -> int:
    """Make what is missing, and train."""
    seed = int(words.pop(words.index("--seed") + 1)) if "--seed" in words else 0
    words = [word for word in words if word != "--seed"]
    folder, make = Path("tiny_repos"), runpy.run_path(str(HERE / "make.py"))
    made = make["repositories"](seed, 2 * COUNT + TAUGHT)
    model = folder / "model"
    if not (model / "config.json").exists():
        warm_up(model, made[2 * COUNT :], make)
    write_rows(folder / "train" / "rows.parquet", made[:COUNT], make)
    write_rows(folder / "held_out" / "rows.parquet", made[COUNT : 2 * COUNT], make)
    from skyrl_megatron.entrypoints.main_base import main as train

    program = "['python3', '/opt/agent/agent.py', '{text}']"
    agent = [f"generator.agent.command={program}", f"generator.agent.mounts={{/opt/agent: '{HERE}'}}"]
    return train([f"--config={HERE / 'train.yaml'}", f"trainer.seed={seed}", *agent, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
