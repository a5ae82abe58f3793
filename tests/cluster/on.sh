#!/usr/bin/env bash
# Runs a command, or a shell, on a host of the test cluster: bash tests/cluster/on.sh login|a100-NN [COMMAND...]
set -euo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

host=${1:?which host: login, a100-01, ...}
shift
first=$(first_process) || {
  echo "tests/cluster/on.sh: no cluster is running; 'bash tests/cluster/up.sh' starts it" >&2
  exit 1
}
[ $# -gt 0 ] || set -- bash
# Not --wd, which opens the folder outside: relative paths would be on another mount than absolute paths.
# shellcheck disable=SC2016  # expanded by the inner shell
here=(sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD")
enter=(nsenter --target "$first" --net --uts --mount --pid)
export HOME=$state/home
export OMPI_MCA_orte_tmpdir_base=$state/local # for Open MPI's session folders, which killed ranks leave behind
if [ "$host" = login ]; then exec "${enter[@]}" "${here[@]}" "$@"; fi
pid=$(cat "$state/nodes/$host/pid" 2>/dev/null) || {
  echo "tests/cluster/on.sh: no host '$host': login, a100-01, ..." >&2
  exit 1
}
exec "${enter[@]}" nsenter --target "$pid" --net --uts --mount "${here[@]}" "$@"
