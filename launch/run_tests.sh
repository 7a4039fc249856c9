#!/usr/bin/env bash
# Set up the environment if needed, then run the test suite.   launch/run_tests.sh [--fast|--te] [pytest arguments]
# --fast: only what starts no process of its own, in two halves side by side, about a minute on two cores; --slow: the rest.
# --te: what needs Transformer Engine and no GPU (tests/te), in an environment of its own (launch/setup.sh te).
# --layouts=all adds the full layout matrix.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h|--help) sed -n '2,5s/^# //p' "$0"; exit 0 ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = --te ]; then
  shift
  launch/setup.sh te
  exec .venv-te/bin/python -m pytest tests/te "$@"
fi
launch/setup.sh
case " $* " in
  *" --fast "*) ;;
  *) exec .venv/bin/python -m pytest "$@" ;;
esac

# pytest says 5 where it finds no test: all chosen tests may lie in the other half
log=$(mktemp)
.venv/bin/python -m pytest --part=2/2 -p no:cacheprovider "$@" >"$log" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null || true; rm -f "$log"' EXIT
first_code=0 second_code=0
.venv/bin/python -m pytest --part=1/2 "$@" || first_code=$?
wait "$second" || second_code=$?
cat "$log"
if [ "$first_code" = 5 ]; then first_code=$second_code; elif [ "$second_code" = 5 ]; then second_code=0; fi
exit $(( first_code ? first_code : second_code ))
