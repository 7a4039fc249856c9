#!/usr/bin/env bash
# Build the documentation site into build/site. Warnings (broken links, pages without a place in the navigation) are errors.
#   launch/docs.sh [--quiet] [mkdocs options]      --quiet: print only errors and the warnings that cause them
# First it writes the pages that the code determines and git ignores: docs/{answers,errors,families,faults,options}.md.
# To read the site: python -m http.server --directory build/site (search needs a server, the rest is plain files).
# mkdocs is in a separate environment, .venv-docs (launch/requirements/docs.txt). Run launch/setup.sh before.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h|--help) sed -n '2,6s/^# //p' "$0"; exit 0 ;; esac
uv=$(command -v uv || command -v .venv/tools/bin/uv) || { echo "no environment: run launch/setup.sh" >&2; exit 1; }
venv=.venv-docs
want=$(sha256sum launch/requirements/docs.txt)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$want" ]; then
  rm -rf "$venv"
  "$uv" venv --quiet --python .venv/bin/python "$venv"
  if [ -z "${UV_DEFAULT_INDEX:-}" ] && index=$(.venv/tools/bin/pip config get global.index-url 2>/dev/null); then
    export UV_DEFAULT_INDEX=$index
  fi
  "$uv" pip install --quiet --python "$venv/bin/python" -r launch/requirements/docs.txt
  printf '%s' "$want" >"$venv/.installed"
fi
.venv/bin/python launch/site/errors.py
.venv/bin/python launch/site/answers.py
.venv/bin/python -m bridges.catalog
.venv/bin/python -m tests.faults.matrix >docs/faults.md
.venv/bin/python -m skyrl_megatron.config.document docs/options.md
export NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true
build() { "$venv/bin/mkdocs" build --strict --config-file launch/site/mkdocs.yml "$@"; }
case ${1:-} in
  -q|--quiet)   # not mkdocs' own option: it drops warnings before --strict counts them
    shift
    log=$(mktemp); trap 'rm -f "$log"' EXIT
    build "$@" >"$log" 2>&1 || { code=$?; cat "$log" >&2; exit "$code"; } ;;
  *) build "$@" ;;
esac
found=0
grep -rEl --include='*.html' '<(script|link|img)[^>]*(src|href)="?(https?:)?//' build/site || found=$?
case $found in
  0) echo "these pages load something from elsewhere" >&2; exit 1 ;;
  1) ;;   # no such page
  *) exit "$found" ;;
esac
