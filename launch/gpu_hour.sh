#!/usr/bin/env bash
# The first hour on a GPU: a ladder of checks and measurements, each with a time limit; resumable.
#   launch/gpu_hour.sh [--minutes N] [--without te,vllm,ray] [--only RUNG,...] [--out DIR] [--again] [--list]
# Uses .venv where launch/setup.sh made one, else python3 (or PYTHON) with what it can import. Installs nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}") || { echo "no Python: run launch/setup.sh" >&2; exit 1; }
cd "$here"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
exec "$python" -m tests.gpu.ladder "$@"
