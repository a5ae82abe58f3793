#!/usr/bin/env bash
# Starts a cluster of three hosts on this machine: login, a100-01 and a100-02, with sshd, Slurm, munge and PMIx. With
# HVD_BERT_CLUSTER_HOSTS=8 there are a100-01 to a100-08. With HVD_BERT_CLUSTER_OWN_INTERFACES=yes their interfaces are
# eth1, eth2, ... instead of eth0. With HVD_BERT_CLUSTER_OWN_TMP=yes they have no common /tmp.
#   bash tests/cluster/up.sh [--owner PID]     --owner: the cluster stops when process PID ends
#   bash tests/cluster/on.sh login             a shell on the login host (or: on.sh a100-01 COMMAND...)
#   bash tests/cluster/down.sh                 stops the cluster
# The hosts are namespaces inside a PID namespace. Their networks, mounts and processes end with its first process, and
# nothing on this machine changes. Needs root. Exit status: 0 up, 1 failed, 3 cannot run on this machine.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"

cannot() {
  echo "tests/cluster/up.sh: cannot run here: $*" >&2
  exit 3
}

check_machine() {
  [[ $hosts =~ ^[1-9][0-9]?$ ]] || cannot "HVD_BERT_CLUSTER_HOSTS=$hosts: must be from 1 to 99"
  [ ${#state} -le 36 ] || cannot "$state is too long a path for the sockets of Slurm and PMIx (HVD_BERT_CLUSTER)"
  [ "$(id -u)" -eq 0 ] || cannot "needs root (network namespaces, sshd, slurmd)"
  local program
  for program in munged slurmctld slurmd srun sshd ssh ip pgrep unshare nsenter; do
    command -v "$program" >/dev/null || cannot "$program is missing; 'bash env/cluster_packages.sh' installs it"
  done
  unshare --net --uts --mount --pid --fork --mount-proc sh -c \
    'ip link add name br0 type bridge && ip link add name v0 type veth peer name v1 && mount -t tmpfs tmpfs /run' >/dev/null 2>&1 ||
    cannot "no permission for namespaces, a bridge or mounts (in a container: --privileged)"
  munged --version >/dev/null
}

owner=''
if [ "${1:-}" = --owner ]; then owner=$2; fi
check_machine
if is_up; then
  echo "tests/cluster/up.sh: already running; 'bash tests/cluster/down.sh' stops it" >&2
  exit 1
fi
start=$(date +%s%N)
bash "$here/down.sh" --quiet # leftovers of a killed cluster
mkdir -m 700 "$state"
mkdir "$state/log"

# setsid: Ctrl-C in the terminal must not end the cluster.
HVD_BERT_CLUSTER=$state setsid unshare --net --uts --mount --pid --fork --kill-child --mount-proc \
  bash "$here/login.sh" </dev/null >"$state/log/login.log" 2>&1 &
echo $! >"$state/unshare.pid"
if [ -n "$owner" ]; then
  # shellcheck disable=SC2016
  setsid bash -c 'tail --pid="$1" -f /dev/null; exec bash "$2" --quiet' bash "$owner" "$here/down.sh" \
    </dev/null >/dev/null 2>&1 &
  echo $! >"$state/watch.pid"
fi
if ! wait_for $((50 + 5 * hosts)) "the cluster" test -e "$state/ready" -o -e "$state/failed" || [ -e "$state/failed" ]; then
  echo "tests/cluster/up.sh: failed:" >&2
  tail -n 30 "$state"/log/*.log >&2 || true
  bash "$here/down.sh" --quiet
  exit 1
fi
echo "Up in $((($(date +%s%N) - start) / 1000000)) ms: login and $((hosts)) node(s), a100-01 and up. bash tests/cluster/on.sh login"
