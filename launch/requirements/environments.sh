#!/usr/bin/env bash
# Make .venv-environments, in which environments and agents of other packages are tested: several virtual
# environments, as the packages want different versions of openai and pydantic.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
venv=.venv-environments
wanted=launch/requirements/environments.in
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$(.venv/tools/bin/pip config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi
if cat "$wanted" "$0" | cmp -s - "$venv/installed.txt"; then exit 0; fi
rm -rf "$venv"
"$uv" venv --quiet --python .venv/bin/python "$venv/texts"
"$uv" pip install --quiet --python "$venv/texts/bin/python" -r "$wanted"
"$uv" venv --quiet --python .venv/bin/python "$venv/nemo-gym"
"$uv" pip install --quiet --python "$venv/nemo-gym/bin/python" nemo-gym==0.4.0
"$uv" venv --quiet --python .venv/bin/python "$venv/harbor"
"$uv" pip install --quiet --python "$venv/harbor/bin/python" harbor==0.26.0 dockerfile-parse "omegaconf>=2.4,<2.5"
"$uv" venv --quiet --python .venv/bin/python "$venv/mini-swe-agent"
# Compiled, as sandboxes write no bytecode and each attempt imports it.
"$uv" pip install --quiet --compile-bytecode --python "$venv/mini-swe-agent/bin/python" mini-swe-agent==2.4.6
cat "$wanted" "$0" > "$venv/installed.txt"   # last: an environment without it is incomplete
