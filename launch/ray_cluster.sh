#!/usr/bin/env bash
# A Ray cluster of this host, of hosts reached by ssh, or of a SLURM job.   launch/ray_cluster.sh {up,down,status,run} --help
#   eval "$(launch/ray_cluster.sh up --hosts hosts.txt)"       Ray on every host of the file; this shell's runs join it
#   launch/ray_cluster.sh status; launch/ray_cluster.sh down   'down' ends what 'up' started and nothing else
#   launch/ray_cluster.sh run --hosts hosts.txt -- COMMAND     up, COMMAND, down
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
[ -x "$root/.venv/bin/python" ] || { echo "$(hostname): $root/.venv is missing: run $root/launch/setup.sh there" >&2; exit 1; }
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
[ -n "${OMP_NUM_THREADS:-}" ] || export OMP_NUM_THREADS=1 SKYRL_DEFAULT_THREADS=1   # as in run_moe.sh
exec "$root/.venv/bin/python" -P -m skyrl_megatron_tools.cluster "$@"
