#!/usr/bin/env bash
# What works on this machine and what does not, each with its fix; exit code 1 when a run could not start.
#   launch/doctor.sh [--cpu|--gpu] [--self-test|--no-self-test] [--config run.yaml] [key=value ...]
# On a machine with GPUs it ends with a self-test of about a minute. Installs nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=$here/.venv/bin/python
if ! "$python" -c 'import omegaconf, skyrl_megatron' 2>/dev/null; then
  case ${1:-} in -h|--help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
  printf '  FAIL  %-20s  %s\n%30sfix: %s\n' environment "$here/.venv is missing or broken" '' "$here/launch/setup.sh" >&2
  exit 1
fi
exec "$python" -m skyrl_megatron_tools.doctor "$@"
