#!/usr/bin/env bash
# Make a base image where no registry can be reached: Debian by debootstrap, and this machine's Python in /usr/local.
#   docker/base.sh [NAME] [SUITE] [MIRROR]   localhost/python:3.12-bookworm bookworm http://deb.debian.org/debian
# Needs root, debootstrap and buildah, and a Python 3.12 (PYTHON, default python3.12) built on that Debian or an older one.
set -euo pipefail
case ${1:-} in -h|--help) sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
name=${1:-localhost/python:3.12-bookworm} suite=${2:-bookworm} mirror=${3:-http://deb.debian.org/debian}
prefix=$("${PYTHON:-python3.12}" -c 'import sys; print(sys.base_prefix)')
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
libraries=ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,netbase
debootstrap --variant=minbase "--include=$libraries" "$suite" "$folder/root" "$mirror"
rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
# its own packages stay behind, and so do tests; only what an official image of Python has goes along
tar -C "$prefix" -c --exclude=site-packages --exclude=__pycache__ --exclude=test --exclude='*.a' \
  bin/python3.12 lib include/python3.12 | tar -C "$folder/root/usr/local" -x --no-same-owner
ln -s python3.12 "$folder/root/usr/local/bin/python3"
mkdir -p "$folder/root/usr/local/lib/python3.12/site-packages"
chroot "$folder/root" ldconfig
chroot "$folder/root" python3.12 -c 'import bz2, ctypes, ensurepip, lzma, sqlite3, ssl, venv'
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root" / >/dev/null
buildah config --cmd python3 "$container"
buildah commit --quiet --rm "$container" "$name" >/dev/null
echo "base: $name, $(du -sh "$folder/root" | cut -f1)"
