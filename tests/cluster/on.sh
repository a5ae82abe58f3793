#!/usr/bin/env bash
# Runs a command, or a shell, on a host of the test cluster: bash tests/cluster/on.sh login|a100-01|a100-02 [COMMAND...]
set -euo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

host=${1:?which host: login, a100-01 or a100-02}
shift
first=$(first_process) || {
  echo "tests/cluster/on.sh: no cluster is up; 'bash tests/cluster/up.sh' brings it up" >&2
  exit 1
}
[ $# -gt 0 ] || set -- bash
# Not --wd, which opens the folder outside: what is named from there would lie on another mount than the same by its full path.
# shellcheck disable=SC2016  # the inner shell's
here=(sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD")
enter=(nsenter --target "$first" --net --uts --mount --pid)
export HOME=$state/home
export OMPI_MCA_orte_tmpdir_base=$state/local # Open MPI's session folders, which ranks that are killed leave behind
if [ "$host" = login ]; then exec "${enter[@]}" "${here[@]}" "$@"; fi
pid=$(cat "$state/nodes/$host/pid" 2>/dev/null) || {
  echo "tests/cluster/on.sh: no host '$host': login, a100-01 or a100-02" >&2
  exit 1
}
exec "${enter[@]}" nsenter --target "$pid" --net --uts --mount "${here[@]}" "$@"
