#!/usr/bin/env bash
# Pack what a GPU machine without network lacks into small files.
#   launch/gpu_bundle.sh [--out DIR] [--arch 90] [--part-mib 50] [--only packages,ray,te,vllm]
# There: bash DIR/install.sh [TARGET] && source TARGET/environment.sh && launch/gpu_hour.sh. Needs launch/setup.sh here.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
tools=$here/.venv/tools/bin
[ -x "$tools/python" ] || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$("$tools/pip" config get global.index-url 2>/dev/null); then
  export UV_DEFAULT_INDEX=$index
fi
exec "$tools/python" "$here/launch/requirements/bundle.py" "$@"
