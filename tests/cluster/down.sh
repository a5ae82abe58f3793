#!/usr/bin/env bash
# Takes the test cluster down, also one that is half up, and checks that nothing is left.
#   bash tests/cluster/down.sh [--quiet]
set -euo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quiet=${1:-}
if [ ! -e "$state" ]; then
  [ -n "$quiet" ] || echo "tests/cluster/down.sh: nothing is up"
  exit 0
fi

# With the first process of a PID namespace the kernel ends all others, and with the last one go networks and mounts.
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
