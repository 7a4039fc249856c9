#!/usr/bin/env bash
# A small run under random faults, with what must hold behind each.   launch/soak.sh MINUTES SEED
# Faults are those of docs/faults.md that tests/faults/injection.py can make; the same seed chooses the same ones.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h|--help|"") sed -n '2,3s/^# //p' "$0"; exit 0 ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
launch/setup.sh --quiet cpu >&2
exec .venv/bin/python -m tests.faults.soak "$@"
