#!/usr/bin/env bash
# What a container of this project runs.   docker run IMAGE [COMMAND]
#   (nothing), key=value, --option   launch/run_moe.sh with these arguments
#   COMMAND ...                      that command
#   health                           exit code 0 while this host's part of its cluster runs, or there is no cluster
# With more than one host each container is a host of one Ray cluster, and the first one runs the command:
#   SKYRL_HOSTS=N       hosts of the cluster (default: SLURM_NTASKS, where srun starts the containers; else 1)
#   SKYRL_HOST=NUMBER   this one, from 0 (default: SLURM_PROCID)
#   SKYRL_CLUSTER=DIR   folder of the cluster, shared by all hosts, which the first one starts before the others
#   SKYRL_INTERFACE=NAME, SKYRL_PORT=PORT   as in launch/slurm/run_moe.sbatch
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
hosts=${SKYRL_HOSTS:-${SLURM_NTASKS:-1}}
host=${SKYRL_HOST:-${SLURM_PROCID:-0}}
case ${1:-} in
  -h|--help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  health)
    if [ "$hosts" -gt 1 ]; then "$root/launch/ray_cluster.sh" status "--dir=$SKYRL_CLUSTER" | grep -q "^  $host .* process "; fi
    exit ;;
  ""|-*|*=*) set -- "$root/launch/run_moe.sh" "$@" ;;
esac
[ "$hosts" -gt 1 ] || exec "$@"

[ -n "${SKYRL_CLUSTER:-}" ] || { echo "entrypoint: SKYRL_HOSTS=$hosts: set SKYRL_CLUSTER to a folder that all hosts share" >&2; exit 2; }
if [ "$host" = 0 ] && [ -e "$SKYRL_CLUSTER/ended" ]; then rm -rf "$SKYRL_CLUSTER"; fi   # of an earlier start
mkdir -p "$SKYRL_CLUSTER" || { echo "entrypoint: SKYRL_CLUSTER=$SKYRL_CLUSTER cannot be made: mount a folder that $(id -un) may write" >&2; exit 2; }
options=("--dir=$SKYRL_CLUSTER" "--number=$host" "--of=$hosts")
[ -z "${SKYRL_INTERFACE:-}" ] || options+=("--interface=$SKYRL_INTERFACE")
[ -z "${SKYRL_PORT:-}" ] || options+=("--port=$SKYRL_PORT")
exec "$root/launch/ray_cluster.sh" member "${options[@]}" -- "$@"
