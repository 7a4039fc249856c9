#!/usr/bin/env bash
# datasets 5.2.0: select_columns([]) of a table with rows has length 0.
#
# A reader that asks a Parquet file for those of some columns that it has, and gets none of them, is told that the file
# has no rows; a loop over the rows, and each check in it, is then silently skipped. pyarrow keeps the number of rows
# of a table without columns.
#
# Seen on Python 3.12 with datasets 5.2.0: rows 3, with one column 3, without columns 0; pyarrow 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0
"$folder/venv/bin/python" - "$folder/rows.parquet" <<'PYTHON'
import sys

import datasets
import pyarrow.parquet as pq

datasets.Dataset.from_list([{"a": 1, "b": 2}] * 3).to_parquet(sys.argv[1])
table = datasets.Dataset.from_parquet(sys.argv[1])
seen = [len(table), len(table.select_columns(["a"])), len(table.select_columns([])), pq.read_table(sys.argv[1]).select([]).num_rows]
print("rows, with one column, without columns, pyarrow without columns:", seen)
assert seen == [3, 3, 0, 3], "this has changed"
PYTHON
