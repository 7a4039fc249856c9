#!/usr/bin/env bash
# Make .venv-trackers, in which the clients of wandb, mlflow and swanlab are tested. .ci/run calls it.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
venv=.venv-trackers
lock=launch/requirements/trackers.txt
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$(.venv/tools/bin/pip config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi
if cmp -s "$lock" "$venv/installed.txt"; then exit 0; fi
rm -rf "$venv"
"$uv" venv --quiet --python .venv/bin/python "$venv"
"$uv" pip install --quiet --python "$venv/bin/python" -r "$lock"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable .
cp "$lock" "$venv/installed.txt"   # last: an environment without it is incomplete
