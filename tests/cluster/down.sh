#!/usr/bin/env bash
# Stops the test cluster, even if it has started only in part, and checks that no process remains.
#   bash tests/cluster/down.sh [--quiet]
set -euo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quiet=${1:-}
if [ ! -e "$state" ]; then
  [ -n "$quiet" ] || echo "tests/cluster/down.sh: no cluster is running"
  exit 0
fi

# When the first process of a PID namespace ends, the kernel kills all others in it, and then removes networks and
# mounts.
first=$(first_process) || first=''
namespace=''
if [ -n "$first" ]; then
  namespace=$(readlink "/proc/$first/ns/pid")
  kill -KILL "$first"
  wait_for 20 "the end of process $first" test ! -e "/proc/$first"
fi
gone() { [ -z "$(find /proc -mindepth 3 -maxdepth 3 -path '/proc/[0-9]*/ns/pid' -lname "${namespace//[/\\[}" 2>/dev/null)" ]; }
[ -z "$namespace" ] || wait_for 20 "the end of the cluster's processes" gone

watch=$(cat "$state/watch.pid" 2>/dev/null) || watch=''
if [ -n "$watch" ] && [ "$watch" != $$ ] && command_line "$watch" | grep -q cluster/down.sh; then
  kill -- "-$watch" || true
fi
rm -rf --one-file-system "$state"
[ -n "$quiet" ] || echo "Down."
