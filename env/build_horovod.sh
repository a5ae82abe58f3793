#!/usr/bin/env bash
# Builds Horovod for the torch of a Python environment, and installs it there, by build_horovod.py next to it. See --help.
set -euo pipefail
python=python3 previous=''
for word in "$@"; do
  [ "$previous" != --python ] || python=$word
  case $word in --python=*) python=${word#--python=} ;; esac
  previous=$word
done
command -v "$python" >/dev/null || { echo "build_horovod: error: no such Python: $python" >&2 && exit 1; }
exec "$python" -W ignore "$(dirname "${BASH_SOURCE[0]}")/build_horovod.py" "$@"
