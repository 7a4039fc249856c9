"""``skyrl-megatron prepare NAME [--output-dir DIR] …``: write a dataset of prompts.

Each dataset is ``train.parquet`` and ``validation.parquet`` in the format of :mod:`skyrl_megatron.data.prompts`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from skyrl_megatron.data.row_files import DatasetRow, load_source
from skyrl_megatron.errors import DataError, SkyRLMegatronError

GSM8K = "openai/gsm8k"
AIME = {"train": "BytedTsinghua-SIA/DAPO-Math-17k", "validation": "BytedTsinghua-SIA/AIME-2024"}
STEP_BY_STEP = 'Reason step by step, then give the final answer after "####".'


def make_row(
    source: str, prompt: str, env_class: str, answer: str, extra: DatasetRow, *, system: str | None = None
) -> DatasetRow:
    """Return a row: question, grading environment, reference answer, and ``extra_info``."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": source,
        "prompt": [*messages, {"role": "user", "content": prompt}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": answer},
        "extra_info": extra,
    }


def gsm8k(args: argparse.Namespace) -> Iterator[tuple[str, list[DatasetRow]]]:
    """Yield grade-school maths, from the Hub or from ``--source``, a folder with train and test files."""
    env_class = "gsm8k_multi_turn" if args.name == "gsm8k_multi_turn" else "gsm8k"
    for split, original in (("train", "train"), ("validation", "test")):
        rows = []
        for index, record in enumerate(_records(args.source, GSM8K, "main", original)):
            solution, marker, answer = record["answer"].rpartition("#### ")
            if not marker:
                raise DataError(
                    f"{GSM8K} {original}, row {index}: the answer holds no '#### ': download the data set again"
                )
            extra = {"split": split, "index": index, "answer": record["answer"], "question": record["question"]}
            if env_class == "gsm8k_multi_turn":
                extra["max_turns"] = args.max_turns
            question = f"{record['question']} {STEP_BY_STEP}"
            rows.append(make_row(GSM8K, question, env_class, answer.strip().replace(",", ""), extra))
        yield split, rows


def multiply(args: argparse.Namespace) -> Iterator[tuple[str, list[DatasetRow]]]:
    """Yield products of two numbers of ``--num-digits`` digits; the answer is in \\boxed{}."""
    system = "Multiply the two numbers. Give the product alone in this form: \\boxed{answer}."
    for split, pairs in _operands(args):
        yield (
            split,
            [
                make_row(
                    "synthetic_multiply",
                    f"{a} * {b}",
                    "multiply",
                    str(a * b),
                    {"num_digits": args.num_digits, "split": split},
                    system=system,
                )
                for a, b in pairs
            ],
        )


def addition(args: argparse.Namespace) -> Iterator[tuple[str, list[DatasetRow]]]:
    """Yield sums of two numbers of ``--num-digits`` digits; the response must be only the sum."""
    for split, pairs in _operands(args):
        yield split, addition_rows(split, pairs)


def addition_rows(split: str, pairs: Iterable[tuple[int, int]]) -> list[DatasetRow]:
    """Return a row for each pair of operands, in order."""
    return [
        make_row("synthetic_addition", f"{a}+{b}=", "addition", str(a + b), {"split": split, "operands": [a, b]})
        for a, b in pairs
    ]


def aime(args: argparse.Namespace) -> Iterator[tuple[str, list[DatasetRow]]]:
    """Yield competition maths: DAPO-Math-17k to train on, AIME 2024 to validate, from the Hub or from ``--source``."""
    for split, name in AIME.items():
        rows, seen = [], set()
        for index, record in enumerate(_records(args.source, name, None, "train", stem=split)):
            question = record["prompt"][-1]["content"]
            if split == "train" and question in seen:  # the published file repeats every problem a hundred times
                continue
            seen.add(question)
            answer = str(record["reward_model"]["ground_truth"])
            rows.append(make_row(name, question, "aime", answer, {"split": split, "index": index}))
        yield split, rows


DATASETS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, list[DatasetRow]]]]] = {
    "addition": addition,
    "aime": aime,
    "gsm8k": gsm8k,
    "gsm8k_multi_turn": gsm8k,
    "multiply": multiply,
}


def _operands(args: argparse.Namespace) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Draw distinct problems; no unordered pair is in both splits. Raises DataError if there are too few pairs."""
    low, high = 10 ** (args.num_digits - 1), 10**args.num_digits - 1
    count = high - low + 1
    available, wanted = count * (count + 1) // 2, args.train_size + args.test_size
    if args.num_digits < 1 or args.test_size < 1 or args.train_size < 1:
        raise DataError("--num-digits, --train-size and --test-size must be at least 1")
    if wanted > available:
        raise DataError(
            f"there are only {available} pairs of numbers with {args.num_digits} digits, not {wanted}: lower"
            " --train-size and --test-size, or raise --num-digits"
        )
    rng, chosen = random.Random(args.seed), {}
    if 2 * wanted > available:  # more than half of the pairs: sample from a list of all
        everything = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
        chosen = dict.fromkeys(rng.sample(everything, wanted))
    while len(chosen) < wanted:
        a, b = rng.randint(low, high), rng.randint(low, high)
        chosen[min(a, b), max(a, b)] = None
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in chosen]
    yield "train", pairs[: args.train_size]
    yield "validation", pairs[args.train_size :]


def _records(source: Path | None, name: str, config: str | None, split: str, stem: str = "") -> Iterable[DatasetRow]:
    """Read a published dataset, or the file ``{stem or split}`` (.parquet, .jsonl, .json) in ``source``."""
    if source is None:
        from datasets import load_dataset

        try:
            published: Iterable[DatasetRow] = load_dataset(name, config, split=split)
            return published
        except Exception as error:
            raise DataError(f"{name} cannot be loaded: {error}; pass a folder with its files as --source") from error
    for path in (source / f"{stem or split}{suffix}" for suffix in (".parquet", ".jsonl", ".json")):
        if path.is_file():
            return load_source(str(path))
    raise DataError(f"{source} has no file {stem or split}.parquet, .jsonl or .json: pass a folder that has one")


def write(rows: list[DatasetRow], path: Path) -> None:
    """Write rows as a parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="skyrl-megatron prepare", description="Write a dataset of prompts.")
    parser.add_argument("name", choices=sorted(DATASETS))
    parser.add_argument("--output-dir", "--output_dir", type=Path, help="folder to write to (default ~/data/NAME)")
    parser.add_argument("--source", type=Path, help="folder with the original files, instead of a download")
    parser.add_argument("--num-digits", "--num_digits", type=int, default=2, help="of each operand (default 2)")
    parser.add_argument("--train-size", "--train_size", type=int, default=3000, help="problems (default 3000)")
    parser.add_argument("--test-size", "--test_size", type=int, default=600, help="held out (default 600)")
    parser.add_argument("--max-turns", "--max_turns", type=int, default=5, help="of gsm8k_multi_turn (default 5)")
    parser.add_argument("--seed", type=int, default=42, help="of generated problems (default 42)")
    args = parser.parse_args(argv)
    folder = args.output_dir or Path.home() / "data" / args.name
    try:
        for split, rows in DATASETS[args.name](args):
            path = folder.expanduser() / f"{split}.parquet"
            write(rows, path)
            print(f"{path}: {len(rows)} rows")
    except SkyRLMegatronError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
