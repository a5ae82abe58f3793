#!/usr/bin/env bash
# Writes env/locked/: all packages of the requirements files and their dependencies, each with version and hashes, for
# Linux and Python 3.10 to 3.13. env/setup.sh --locked installs them. Run it after a change of a requirements file; it
# needs uv (pip install uv) and the package index.
#   bash env/lock.sh [--upgrade]    --upgrade: also take newer versions of packages that no requirements file pins
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p locked
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/pyproject.toml" <<END
[project]
name = "locked"
version = "0"
requires-python = ">=3.10"
[tool.uv]
environments = ["sys_platform == 'linux' and python_version < '3.14'"]
END
# torch is installed first and separately (env/setup.sh --torch), so no other file may list it.
printf "%s; sys_platform == 'never'\n" torch >"$work/without.txt"

# $1: name of the file in locked/; then requirements files and options
lock() {
  local out=$PWD/locked/$1.txt
  shift
  (cd "$work" && uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
    ${upgrade[@]+"${upgrade[@]}"} "$@" --output-file "$out" >/dev/null)
}
names() { grep -oE '^[A-Za-z0-9._-]+==' "$1" | tr -d '=' | sort -u; }

upgrade=("$@")
grep -E '^torch==' ../requirements.txt >"$work/torch.txt"
grep -vE '^(torch|horovod)\b' ../requirements.txt >"$work/base.txt" # env/build_horovod.sh checks Horovod's hash
lock torch "$work/torch.txt"
lock base "$work/base.txt" --constraints "$PWD/locked/torch.txt"
known=(--constraints "$PWD/locked/base.txt")
mapfile -t in_base < <(names locked/base.txt)
for extra in dev deepspeed bench; do
  lock "$extra" "$PWD/requirements-$extra.txt" "${known[@]}" --overrides "$work/without.txt" \
    "${in_base[@]/#/--no-emit-package=}"
  known+=(--constraints "$PWD/locked/$extra.txt")
done
