#!/usr/bin/env bash
# Install the linters of scripts and Dockerfiles into .venv; images and runs do not need them. .ci/run calls it.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
exec "$uv" pip install --quiet --python .venv/bin/python -r launch/requirements/lint.txt
