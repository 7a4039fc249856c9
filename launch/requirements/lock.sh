#!/usr/bin/env bash
# Re-resolve the locked requirement files from pyproject.toml. Needs uv on PATH or in .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv || command -v .venv/bin/uv)
common=(--quiet --no-header --universal --python-version 3.12 --upgrade)
"$uv" pip compile "${common[@]}" --override launch/requirements/cpu-overrides.in pyproject.toml --extra dev \
  --extra cpu -o launch/requirements/cpu.txt
"$uv" pip compile "${common[@]}" -c launch/requirements/cuda.in pyproject.toml --extra dev --extra gpu -o launch/requirements/gpu.txt
"$uv" pip compile "${common[@]}" launch/requirements/docs.in -o launch/requirements/docs.txt
"$uv" pip compile "${common[@]}" -c launch/requirements/cpu.txt -c launch/requirements/cuda.in launch/requirements/te.in -o launch/requirements/te.txt
# What dashboard.in adds to both environments; installed without looking at what these packages need, as that is there.
"$uv" pip compile "${common[@]}" --no-annotate -c launch/requirements/gpu.txt launch/requirements/dashboard.in |
  awk -F== 'NR == FNR { locked[$1]; next } !($1 in locked)' launch/requirements/cpu.txt - >launch/requirements/dashboard.txt
# Trackers, in an environment of their own.
"$uv" pip compile "${common[@]}" launch/requirements/trackers.in -o launch/requirements/trackers.txt
