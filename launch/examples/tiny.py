"""Write what the examples run on: a model of a million parameters that knows the form of answers, and their data.

    python launch/examples/tiny.py [FOLDER]

``FOLDER`` (default ``tiny``) gets ``student``, which was taught the form of answers but few right ones, ``model`` and
``teacher``, which were taught for longer, and a folder with ``train.parquet`` and ``validation.parquet`` for each
environment. It takes a few minutes on two CPU cores.
"""

import random
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_megatron.data import prepare

NAMES, THINGS = ("Ann", "Ben", "Eva", "Joe", "Kim", "Tom"), ("pens", "cups", "nuts", "eggs", "keys", "hats")
TAGS = "#### <think> </think> <sql> </sql> <solution> </solution> <observation> </observation> <reminder> </reminder>"
TAGS += " <calc> </calc> <result> </result> _ "
STEPS = 200
Row = dict[str, Any]
Talk = list[dict[str, str]]
"""A conversation that the model imitates; the assistant's messages are learned."""


def word_problems() -> list[tuple[str, str, int]]:
    """Return (question, solution, answer) of all, in the columns' form of GSM8K."""
    made = []
    for name in NAMES:
        for thing in THINGS:
            for first in range(1, 10):
                for second in range(1, 10):
                    question = f"{name} has {first} {thing} and gets {second} more. How many {thing} has {name} now?"
                    made.append((question, f"{first}+{second}={first + second}", first + second))
    random.Random(0).shuffle(made)
    return made


def gsm8k_rows(split: str, problems: list[tuple[str, str, int]], env_class: str | None = "gsm8k") -> list[Row]:
    """Return rows of an environment; None: the rows leave it to the run."""
    rows = []
    for question, solution, answer in problems:
        asked = f"{question} {prepare.STEP_BY_STEP}"
        extra = {"split": split, "answer": f"{solution}\n#### {answer}"}
        rows.append(prepare.make_row("tiny", asked, env_class or "", str(answer), extra))
        if env_class is None:
            del rows[-1]["env_class"]
    return rows


def products(split: str) -> list[Row]:
    """Return rows for a calculator."""
    pairs = [(a, b) for a in range(2, 13) for b in range(2, 10)]
    random.Random(1).shuffle(pairs)
    chosen = pairs[:64] if split == "train" else pairs[64:]
    return [prepare.make_row("products", f"{a}*{b}=", "calculator", str(a * b), {"split": split}) for a, b in chosen]


def shop(folder: Path) -> list[Row]:
    """Write the data base of a shop where ``text2sql`` looks for it; return rows with questions about it."""
    file = folder / "databases" / "spider" / "database" / "shop" / "shop.sqlite"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE stock (item TEXT, amount INTEGER, price INTEGER)")
        numbers = random.Random(2)
        for thing in THINGS:
            values = (thing, numbers.randint(10, 99), numbers.randint(1, 9))
            connection.execute("INSERT INTO stock VALUES (?, ?, ?)", values)
    rows = []
    for thing in THINGS:
        for column, question in (("amount", f"How many {thing} are there?"), ("price", f"What do {thing} cost?")):
            query = f"SELECT {column} FROM stock WHERE item='{thing}'"
            row = prepare.make_row("shop", question, "text2sql", query, {"column": column})
            rows.append(row | {"db_id": "shop", "data": "spider"})
    return rows


def sql_talk(row: Row, databases: Path) -> Talk:
    """Look, then submit: the observation is what the environment says."""
    from skyrl_megatron.config import Text2SQLEnvConfig
    from skyrl_megatron.envs import make

    query = row["reward_spec"]["ground_truth"]
    env = make("text2sql", Text2SQLEnvConfig(db_path=str(databases)), {**row, "max_turns": 3})
    look, submit = f"<think>look</think><sql>{query}</sql>", f"<think>done</think><solution>{query}</solution>"
    (seen,) = env.step(look)["observations"]
    return [row["prompt"][-1], {"role": "assistant", "content": look}, seen, {"role": "assistant", "content": submit}]


def product_talk(row: Row) -> Talk:
    """Call the calculator, then answer."""
    question, answer = row["prompt"][-1], row["reward_spec"]["ground_truth"]
    call = f"<calc>{question['content'].rstrip('=')}</calc>"
    result = {"role": "user", "content": f"<result>{answer}</result>"}
    said = [{"role": "assistant", "content": text} for text in (call, answer)]
    return [question, said[0], result, said[1]]


def judge_talk(rng: random.Random) -> Talk:
    """Compare an answer with a key, as ``llm_judge.py`` asks for it."""
    key = rng.randint(2, 18)
    answer = key if rng.random() < 0.5 else rng.randint(2, 18)
    question = f"Key: {key}\nAnswer: {answer}\nIs the answer right? Say 1 or 0."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": str(int(answer == key))}]


def talks(folder: Path, train: list[Row], rng: random.Random) -> Iterator[Talk]:
    """Yield demonstrations for ever, word problems most often."""
    databases = folder / "databases"
    others = [product_talk(row) for row in products("train")]
    queries = [sql_talk(row, databases) for row in shop(folder)]
    while True:
        for row in rng.sample(train, 4):
            yield [row["prompt"][-1], {"role": "assistant", "content": row["extra_info"]["answer"]}]
        yield from rng.sample(others, 2)
        yield rng.choice(queries)
        yield judge_talk(rng)


def teach(model: Any, tokenizer: Any, demonstrations: Iterator[Talk], steps: int, rows: int = 32) -> float:
    """Imitate; returns the last loss, nats a token."""
    import torch

    loss = torch.tensor(float("nan"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        batch = [encoded(tokenizer, next(demonstrations)) for _ in range(rows)]
        longest = max(len(tokens) for tokens, _ in batch)
        padding = [longest - len(tokens) for tokens, _ in batch]
        tokens = torch.tensor([row + [0] * more for (row, _), more in zip(batch, padding, strict=True)])
        labels = torch.tensor([row + [-100] * more for (_, row), more in zip(batch, padding, strict=True)])
        loss = model(input_ids=tokens, labels=labels).loss  # padding stands behind: causal attention sees none of it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"imitation step {step + 1} · loss {loss.item():.3f}", flush=True)
    return loss.item()


def encoded(tokenizer: Any, talk: Talk) -> tuple[list[int], list[int]]:
    """Return token ids by the chat template, and labels: the assistant's words and their end."""
    tokens, labels = [], []
    for message in talk:
        head = tokenizer.encode(f"<|{message['role']}|>", add_special_tokens=False)
        words = tokenizer.encode(f"{message['content']}<|end|>", add_special_tokens=False)
        tokens += head + words
        labels += [-100] * len(head) + (words if message["role"] == "assistant" else [-100] * len(words))
    return tokens, labels


def main(folder: Path, steps: int = STEPS) -> None:
    """Write everything. The model is taught for ``steps``, the teacher for half as many more."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_megatron.tiny_model import write_embedded_model

    problems = word_problems()
    train, held_out = problems[:2000], problems[2000:2064]
    for split, some in (("train", train), ("validation", held_out)):
        for env_class in ("gsm8k", "calculator", "text2sql"):
            rows = gsm8k_rows(split, some) if env_class == "gsm8k" else products(split)
            rows = shop(folder) * 4 if env_class == "text2sql" else rows  # a batch takes more rows than there are
            prepare.write(rows, folder / env_class / f"{split}.parquet")
        for env_class in ("nearness", "judged"):  # of own_environment.py and llm_judge.py
            prepare.write(gsm8k_rows(split, some, None), folder / env_class / f"{split}.parquet")
    write_published(folder / "published", train, held_out)

    seeded = write_embedded_model(folder / "seeded")
    tokenizer = AutoTokenizer.from_pretrained(seeded)
    tokenizer.add_tokens([*TAGS.split(), "<", ">", "/", "#"])
    model = AutoModelForCausalLM.from_pretrained(seeded, dtype=torch.float32)
    torch.manual_seed(0)
    demonstrations = talks(folder, gsm8k_rows("train", train), random.Random(0))
    few = 3 * steps // 10
    for name, more in (("student", few), ("model", steps - few), ("teacher", steps // 2)):
        loss = teach(model, tokenizer, demonstrations, more)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(f"{folder / name}: loss {loss:.3f}", flush=True)


def write_published(folder: Path, train: list[tuple[str, str, int]], test: list[tuple[str, str, int]]) -> None:
    """Write the problems as GSM8K is published: columns ``question`` and ``answer``, splits ``train`` and ``test``."""
    for split, problems in (("train", train), ("test", test)):
        rows = [
            {"question": question, "answer": f"{solution}\n#### {answer}"} for question, solution, answer in problems
        ]
        prepare.write(rows, folder / f"{split}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tiny"))
