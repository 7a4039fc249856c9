#!/usr/bin/env bash
# Set up the environment if needed, then run the test suite.   launch/run_tests.sh [pytest arguments]
# --layouts=all adds the full layout matrix.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest "$@"
