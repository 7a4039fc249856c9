#!/usr/bin/env bash
# Make .venv-environments, in which the environments of other packages are tested: two environments, as nemo-gym and
# verifiers want different versions of openai.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
venv=.venv-environments
wanted=launch/requirements/environments.in
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$(.venv/tools/bin/pip config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi
if cmp -s "$wanted" "$venv/installed.txt"; then exit 0; fi
rm -rf "$venv"
"$uv" venv --quiet --python .venv/bin/python "$venv/texts"
"$uv" pip install --quiet --python "$venv/texts/bin/python" -r "$wanted"
"$uv" venv --quiet --python .venv/bin/python "$venv/nemo-gym"
"$uv" pip install --quiet --python "$venv/nemo-gym/bin/python" nemo-gym==0.4.0
cp "$wanted" "$venv/installed.txt"   # last: an environment without it is incomplete
