#!/usr/bin/env bash
# Rehearse the first GPU hour on this machine: the bundle and the ladder as on a bare GPU machine, without its GPU.
#   launch/gpu_rehearsal.sh [--folder DIR] [--bundle DIR] [arguments of launch/gpu_hour.sh]
# DIR (build/rehearsal) gets the packages of a bare machine (torch 2.11, transformers 5.17; launch/requirements/bare.in),
# the bundle that launch/gpu_bundle.sh makes, unless --bundle has one, a copy of the files that git tracks, and results in
# DIR/gpu_hour. Install and ladder then run in a network namespace without a route. Needs launch/setup.sh, unshare and 8 GiB.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
case ${1:-} in -h|--help) sed -n '2,6s/^# //p' "$0"; exit 0 ;; esac
folder=$here/build/rehearsal bundle=''
while [ $# -gt 0 ]; do
  case $1 in
    --folder) folder=$(realpath -m "$2"); shift 2 ;;
    --bundle) bundle=$(realpath "$2"); shift 2 ;;
    *) break ;;
  esac
done
tools=$here/.venv/tools/bin
[ -x "$tools/uv" ] || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$("$tools/pip" config get global.index-url 2>/dev/null); then
  export UV_DEFAULT_INDEX=$index
fi
mkdir -p "$folder"
began=$(date +%s)
phase() { echo "rehearsal: $1 ($(( $(date +%s) - began )) s)"; }

bare=$folder/bare
if [ "$(cat "$bare/.made-of" 2>/dev/null)" != "$(sha256sum <"$here/launch/requirements/bare.in")" ]; then
  rm -rf "$bare"
  "$tools/uv" venv --quiet --python "$here/.venv/bin/python" "$bare"
  "$tools/uv" pip install --quiet --python "$bare/bin/python" -r "$here/launch/requirements/bare.in"
  sha256sum <"$here/launch/requirements/bare.in" >"$bare/.made-of"
fi
phase "bare machine: $("$bare/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)')"
if [ -z "$bundle" ]; then
  bundle=$folder/bundle
  "$here/launch/gpu_bundle.sh" --out "$bundle"
  phase "bundle: $(du -sh "$bundle" | cut -f1)"
fi

tree=$folder/tree
rm -rf "$tree" "$folder/site"
mkdir -p "$tree"
git -C "$here" ls-files -z | tar c -C "$here" --null -T - | tar x -C "$tree"
cat >"$folder/there.sh" <<'END'
# On the machine: nothing but the loopback interface, the packages of the image, the bundle and the tree.
set -euo pipefail
folder=$1 bundle=$2; shift 2
ip link set lo up 2>/dev/null || python3 - <<'UP'
import fcntl, socket, struct
with socket.socket() as s:  # IFF_UP of lo
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 1))
UP
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
export PATH=$folder/bare/bin:$PATH CUDA_VISIBLE_DEVICES= PYTHON=$folder/bare/bin/python
bash "$bundle/install.sh" "$folder/site"
# shellcheck disable=SC1091
source "$folder/site/environment.sh"
cd "$folder/tree"
exec launch/gpu_hour.sh --smoke --out "$folder/gpu_hour" "$@"
END
phase "starts on the bare machine"
unshare --net --map-root-user bash "$folder/there.sh" "$folder" "$bundle" "$@"
phase "ended"
