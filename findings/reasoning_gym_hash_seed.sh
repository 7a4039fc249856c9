#!/usr/bin/env bash
# reasoning-gym 0.1.25: five data sets depend on PYTHONHASHSEED, although size and seed are given.
#
# They iterate over sets of strings, whose order Python draws anew in each process. The question is another one in
# isomorphic_strings, polynomial_multiplication and ransom_note, the reference answer in polynomial_multiplication, and in
# knight_swap and word_ladder, which have several right ones. A program that stores (data set, seed, index) and makes the
# row again in another process, to score an answer, scores it against another question.
#
# Seen on Python 3.12 with reasoning-gym 0.1.25, hash seeds 0 and 1; basic_arithmetic and chain_sum do not differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cat > "$folder/rows.py" <<'PYTHON'
import sys

import reasoning_gym

name, field = sys.argv[1:]
print([row[field] for row in reasoning_gym.create_dataset(name, size=60, seed=7)])
PYTHON
sets="isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder basic_arithmetic chain_sum"
seen=""
for field in question answer; do
  differ=""
  for name in $sets; do
    for seed in 0 1; do
      PYTHONHASHSEED=$seed "$folder/venv/bin/python" "$folder/rows.py" "$name" "$field" > "$folder/$seed"
    done
    cmp -s "$folder/0" "$folder/1" || differ="$differ $name"
  done
  echo "$field differs:$differ"
  seen="$seen$field:$differ;"
done
questions=" isomorphic_strings polynomial_multiplication ransom_note"
answers=" knight_swap polynomial_multiplication word_ladder"
[ "$seen" = "question:$questions;answer:$answers;" ] || { echo "this has changed" >&2; exit 1; }
