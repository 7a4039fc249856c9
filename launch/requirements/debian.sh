#!/usr/bin/env bash
# Install the packages of debian.txt that are missing. launch/setup.sh ci calls it; dpkg knows when there is nothing to do.
set -euo pipefail
cd "$(dirname "$0")"
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

missing=()
while read -r package; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done < <(grep -v '^#' debian.txt)
if [ "${#missing[@]}" = 0 ]; then exit 0; fi

command -v apt-get >/dev/null || die "no apt-get: install by hand what 'launch/setup.sh ci' adds (${missing[*]})"
if [ "$(id -u)" = 0 ]; then root=()
elif sudo -n true 2>/dev/null; then root=(sudo)
else die "installing ${missing[*]} needs root: run as root, or with a sudo that asks for no password"; fi

started=$SECONDS
log=$(mktemp); trap 'rm -f "$log"' EXIT
apt() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1; }
{ apt update && apt install --no-install-recommends -y "${missing[@]}"; } || {
  tail -5 "$log" >&2; die "apt-get could not install ${missing[*]} (output above)"; }
printf 'setup: %-52s %6.1f s\n' "Debian packages: ${missing[*]}" "$(( SECONDS - started ))"
