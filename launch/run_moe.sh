#!/usr/bin/env bash
# Train a Mixture-of-Experts model with RL.
#   launch/run_moe.sh [key=value ...]                          the embedded run: two-digit sums on two CPU cores
#   launch/run_moe.sh model=PATH_OR_NAME [key=value ...]       that model
#   launch/run_moe.sh --recipe NAME [key=value ...]            launch/recipes/NAME.yaml
# --check shows what a configuration comes to and starts nothing. A Ray cluster is joined when RAY_ADDRESS names one or
# this machine belongs to one that 'ray start' made; otherwise Ray is started here and ends with the run.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -z "${RAY_ADDRESS:-}" ] && [ -s /tmp/ray/ray_current_cluster ]; then export RAY_ADDRESS=auto; fi

entrypoint=embedded
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --recipe|--recipe=*)
      if [ "$1" = --recipe ]; then shift; name=${1:-}; else name=${1#--recipe=}; fi
      [ -f "launch/recipes/$name.yaml" ] || {
        echo "no recipe '$name'; there are: $(cd launch/recipes && ls -- *.yaml | sed 's/\.yaml$//' | tr '\n' ' ')" >&2; exit 2; }
      if [ "$name" != embedded ]; then entrypoint=main_base; arguments+=(--config "launch/recipes/$name.yaml"); fi ;;
    model=*) entrypoint=main_base; arguments+=("trainer.policy.model.path=${1#model=}") ;;
    trainer.policy.model.path=*) entrypoint=main_base; arguments+=("$1") ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  if [ $# -gt 0 ]; then shift; fi
done
exec .venv/bin/python -m "skyrl_megatron.entrypoints.$entrypoint" ${arguments[@]+"${arguments[@]}"}
