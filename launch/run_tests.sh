#!/usr/bin/env bash
# Set up the environment if needed, then run the test suite.   launch/run_tests.sh [--fast|--te] [pytest arguments]
# --fast: only what starts no process and is not slow, about two minutes on two cores; -m 'not fast': the rest.
# --layouts=all adds the full layout matrix. --te: what needs Transformer Engine and no GPU (tests/te), in an environment
# of its own (launch/setup.sh te). Two workers share the tests (-n 2), unless the arguments name files: then there is one.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h|--help) sed -n '2,5s/^# //p' "$0"; exit 0 ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Images and CI machines set it. The tests start hundreds of processes, each of which would compile the project anew, and
# every worker of every run would rewrite the asserts of all test modules, which takes four times as long as collecting.
unset PYTHONDONTWRITEBYTECODE
if [ "${1:-}" = --te ]; then
  shift
  launch/setup.sh --quiet te
  exec .venv-te/bin/python -m pytest tests/te "$@"
fi
launch/setup.sh --quiet
workers=(-n 2)
for argument in "$@"; do
  case $argument in
    -n*|--numprocesses*|--dist*|-s|--capture=no|--pdb|--co|--collect-only) workers=() ;;
    *) if [ -e "${argument%%::*}" ]; then workers=(); fi ;;
  esac
done
exec .venv/bin/python -m pytest "${workers[@]}" "$@"
