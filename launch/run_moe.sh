#!/usr/bin/env bash
# Train a Mixture-of-Experts model with RL.
#   launch/run_moe.sh [key=value ...]                          the embedded run: two-digit sums on two CPU cores
#   launch/run_moe.sh model=PATH_OR_NAME [key=value ...]       that model, a folder or a name on the Hugging Face hub
#   launch/run_moe.sh --config FILE.yaml [key=value ...]       the keys of that file; may be repeated
#   launch/run_moe.sh --recipe NAME [model=...] [key=value ...]  a recipe by its name, or a YAML file of your own;
#                                                              model= takes the place of the recipe's model
# --check shows what any of these comes to and starts nothing; --check=2x8 does it for 2 nodes of 8 GPUs.
# Relative paths are those of the folder that the command is typed in. All keys: CONFIG.md.
# A Ray cluster is joined when RAY_ADDRESS names one or this machine belongs to one that 'ray start' made. Inside a
# SLURM job of several hosts (salloc; for sbatch see launch/slurm/run_moe.sbatch), and with --hosts FILE (a host name a
# line, reached by ssh), Ray is started on all of them, otherwise here; it ends with the run.
set -euo pipefail
export SKYRL_STARTED=${SKYRL_STARTED:-begin@$(date +%s.%N)}   # skyrl_megatron/progress.py
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
for argument in "$@"; do
  case $argument in -h|--help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
done
hosts='' check='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --hosts)
      [ $# -gt 1 ] || { echo "--hosts: give a file with one host name per line" >&2; exit 2; }
      hosts=$2; shift ;;
    --hosts=*) hosts=${1#--hosts=} ;;
    --check|--check=*) check=1; rest+=("$1") ;;
    *) rest+=("$1") ;;
  esac
  shift
done
set -- "${rest[@]}"
if [ -z "$check" ] && [ -n "$hosts" ]; then
  "$root/launch/setup.sh" --quiet
  exec "$root/launch/ray_cluster.sh" run --hosts "$hosts" -- "$root/launch/run_moe.sh" "$@"
elif [ -z "$check" ] && [ -z "${RAY_ADDRESS:-}" ] && [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
  exec "$root/launch/slurm/run_moe.sbatch" "$@"
fi
"$root/launch/setup.sh" --quiet
[ -n "${OMP_NUM_THREADS:-}" ] || export OMP_NUM_THREADS=1 SKYRL_DEFAULT_THREADS=1   # ranks on GPUs get more
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [ -z "${RAY_ADDRESS:-}" ] && [ -s /tmp/ray/ray_current_cluster ]; then export RAY_ADDRESS=auto; fi
exec "$root/.venv/bin/python" -P -m skyrl_megatron_tools.embedded.run_moe "$@"   # -P: a file of the folder hides no package
