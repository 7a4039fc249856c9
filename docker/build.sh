#!/usr/bin/env bash
# Build an image of this checkout with docker, podman or buildah, whichever is there.
#   docker/build.sh cpu|cuda [--name NAME] [--engine docker|podman|buildah] [OPTION ...]
# NAME is skyrl-megatron:VERSION-cpu or -cuda unless given. Any other OPTION is one of the engine's build command:
#   --build-arg BASE=IMAGE   Debian or Ubuntu with Python 3.12 or 3.13; docker/base.sh makes one without a registry
#   --build-arg NIXL='nixl[cu13]==VERSION'   (cuda) what pip installs it from, likewise APEX and DEEPEP; default: left out
#   --build-arg MAX_JOBS=N   (cuda) compilers at a time for Transformer Engine's torch extension
#   -v /etc/apt:/etc/apt:ro  (podman, buildah) a mirror for apt and, likewise, for pip
# docs/guides/images.md says how the images are run.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
die() { printf 'docker/build.sh: %s\n' "$*" >&2; exit 2; }

flavour='' name='' engine='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    cpu|cuda) [ -z "$flavour" ] || die "$flavour and $1: give one"; flavour=$1 ;;
    --name|--engine|--build-arg|-v|--volume|--label|--target|--platform)   # options with a value of their own
      [ $# -gt 1 ] || die "$1: give a value"
      case $1 in --name) name=$2 ;; --engine) engine=$2 ;; *) options+=("$1" "$2") ;; esac
      shift ;;
    -*) options+=("$1") ;;
    *) die "unknown argument '$1': give cpu or cuda, then options" ;;
  esac
  shift
done
[ -n "$flavour" ] || die "give cpu or cuda"
if [ -z "$engine" ]; then
  for candidate in docker podman buildah; do
    if command -v "$candidate" >/dev/null; then engine=$candidate; break; fi
  done
  [ -n "$engine" ] || die "no docker, podman or buildah: install one (apt install buildah)"
fi
case $engine in
  docker) build=(docker build) ;;
  podman|buildah) build=("$engine" build --format docker) ;;   # the format that knows health checks
  *) die "--engine $engine: give docker, podman or buildah" ;;
esac
command -v "$engine" >/dev/null || die "--engine $engine: no such command here"

if [ "$engine" = docker ] && ! timeout 60 docker version >/dev/null 2>&1; then   # podman and buildah need no daemon
  die "docker's daemon does not answer: start it (systemctl start docker), or install buildah and give --engine buildah"
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
revision=$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git -C "$root" status --porcelain 2>/dev/null)" ] || revision+=-modified
name=${name:-skyrl-megatron:$version-$flavour}
started=$SECONDS
"${build[@]}" -f "$root/docker/Dockerfile.$flavour" -t "$name" \
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "${options[@]}" "$root"
echo "image: $name, built with $engine in $(( (SECONDS - started) / 60 )) min $(( (SECONDS - started) % 60 )) s"
