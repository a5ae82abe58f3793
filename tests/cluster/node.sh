#!/usr/bin/env bash
# A node of the test cluster, in separate namespaces; started by login.sh: node.sh NAME ADDRESS INTERFACE
set -Eeuo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
trap 'echo "node.sh $host: line $LINENO failed: $BASH_COMMAND"; touch "$state/failed"' ERR

# Mounts a separate /tmp, as with Slurm's job_container/tmpfs or a local disk. The nodes share only $state.
separate_tmp() {
  local new=$state/nodes/$host/new_tmp
  mkdir "$new"
  mount -t tmpfs -o mode=1777 tmpfs "$new"
  case $state in /tmp/*)
    mkdir -p "$new/${state#/tmp/}"
    mount --bind "$state" "$new/${state#/tmp/}"
    ;;
  esac
  mount --move "$new" /tmp
}

host=$1 address=$2 interface=$3
hostname "$host"
[ -z "$own_tmp" ] || separate_tmp
ip link set lo up
wait_for 10 "the network link" ip link show dev "$interface"
ip addr add "$address/24" dev "$interface"
ip link set "$interface" up
ip link add name docker0 type bridge # like Docker's bridge, which has the same address on each host
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
# A separate disk under the same path on each node, and separate shared memory.
mount --bind "$state/nodes/$host/local" "$state/local"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
"$(command -v sshd)" -f "$state/sshd_config" -h "$state/nodes/$host/host_key" -E "$state/log/sshd-$host.log"
slurmd -D -N "$host" >/dev/null &
wait
exec sleep infinity # on.sh enters the node through this process, even after slurmd has ended
