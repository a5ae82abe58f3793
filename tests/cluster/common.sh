# shellcheck shell=bash
# Shared by the scripts of the test cluster, which source it.
state=${HVD_BERT_CLUSTER:-/tmp/hvd_bert_cluster} # the cluster's folder, removed by down.sh
export state
hosts=${HVD_BERT_CLUSTER_HOSTS:-2}                  # number of nodes, at most 99
own_interfaces=${HVD_BERT_CLUSTER_OWN_INTERFACES:-} # if not empty, the nodes' interfaces are eth1, eth2, ... instead of eth0
own_tmp=${HVD_BERT_CLUSTER_OWN_TMP:-}               # if not empty, each node has a separate /tmp, which contains only $state
export hosts own_interfaces own_tmp
PATH=$PATH:/usr/sbin:/sbin
export PATH

# wait_for SECONDS WHAT COMMAND...: waits until COMMAND succeeds. Fails with a message after SECONDS.
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge "$deadline" ]; then
      echo "timed out waiting for $what" >&2
      return 1
    fi
    read -r -t 0.1 <> <(:) || true # waits without starting a process
  done
}

command_line() { { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null; }

# Prints the id, as seen from this machine, of the first process in the cluster's PID namespace.
first_process() {
  local pid
  pid=$(cat "$state/unshare.pid" 2>/dev/null) || return 1
  # The file may be old, and another process may have this id by now.
  command_line "$pid" | grep -q cluster/login.sh || return 1
  pgrep -P "$pid"
}

is_up() { first_process >/dev/null; }
