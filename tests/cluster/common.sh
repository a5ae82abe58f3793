# shellcheck shell=bash
# What the scripts of the test cluster share; read by them.
state=${HVD_BERT_CLUSTER:-/tmp/hvd_bert_cluster} # its folder, removed by down.sh
export state
PATH=$PATH:/usr/sbin:/sbin
export PATH

# wait_for SECONDS WHAT COMMAND...: until the command succeeds; false, and says so, when the time is over.
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge "$deadline" ]; then
      echo "no answer in time from $what" >&2
      return 1
    fi
    read -r -t 0.1 <> <(:) || true # between two looks, without a process
  done
}

command_line() { { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null; }

# The first process of the cluster's PID namespace, as this machine sees it.
first_process() {
  local pid
  pid=$(cat "$state/unshare.pid" 2>/dev/null) || return 1
  # A number may have been given to another process since.
  command_line "$pid" | grep -q cluster/login.sh || return 1
  pgrep -P "$pid"
}

is_up() { first_process >/dev/null; }
