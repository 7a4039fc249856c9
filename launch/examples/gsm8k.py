"""Train on GSM8K (arXiv:2110.14168) as it is published, columns ``question`` and ``answer``, converted before the run.

    python launch/examples/gsm8k.py [--published FOLDER] [--rows FOLDER] [key=value …]

takes the keys of ``skyrl_megatron.entrypoints.main_base``. ``--published``: a folder with ``train.parquet`` and
``test.parquet``, in place of ``openai/gsm8k`` on the Hugging Face hub; ``--rows``: where the rows that the run reads
are kept (``~/data/gsm8k``). Any data set with columns other than those of docs/guides/data.md is read this way; for
this one ``skyrl-megatron prepare gsm8k`` does the same.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from skyrl_megatron.data import prepare
from skyrl_megatron.data.row_files import load_source
from skyrl_megatron.errors import DataError, SkyRLMegatronError


def row(record: dict[str, Any]) -> dict[str, Any]:
    """Make a row for the environment ``gsm8k`` of a published one. Raises DataError where the answer has no number."""
    _, marker, answer = record["answer"].rpartition("#### ")
    if not marker:
        raise DataError(f"the answer holds no '#### ': {record['answer'][-80:]!r}")
    question = f"{record['question']} {prepare.STEP_BY_STEP}"
    return prepare.make_row("gsm8k", question, "gsm8k", answer.replace(",", ""), {"answer": record["answer"]})


def converted(published: Path | None, split: str, rows: Path) -> Path:
    """Write a split as the run reads it; returns the file. Raises DataError for data that are missing or different."""
    source = f"openai/gsm8k:main:{split}" if published is None else str(published / f"{split}.parquet")
    file = rows.expanduser() / f"{split}.parquet"
    prepare.write([row(record) for record in load_source(source)], file)
    return file


def main(arguments: list[str]) -> int:
    """Convert and train; returns the exit code."""
    from skyrl_megatron.entrypoints.main_base import main as train

    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip(), allow_abbrev=False)
    parser.add_argument("--published", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("--rows", type=Path, default=Path("~/data/gsm8k"), help="where rows are kept (~/data/gsm8k)")
    given, keys = parser.parse_known_args(arguments)
    try:
        files = [converted(given.published, split, given.rows) for split in ("train", "test")]
    except SkyRLMegatronError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return train([*keys, f"data.train_data=['{files[0]}']", f"data.val_data=['{files[1]}']"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
