#!/usr/bin/env bash
# Fine-tunes BERT on hosts reached over ssh, without Slurm. Checks each host before it starts anything there.
# See --help.
set -euo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
usage: scripts/horovodrun.sh (-H HOST:SLOTS,... | --hostfile FILE) [option...] [-- trainer's arguments...]

  scripts/horovodrun.sh -H a100-01:2,a100-02:2 -- --config squad_v2 --output_dir runs/v2

  -H, --hosts LIST       hosts, each with the number of its GPUs: a100-01:2,a100-02:2
  --hostfile FILE        the same with one host per line: 'a100-01 slots=2' (or 'a100-01:2'; # starts a comment)
  -np N                  number of ranks (default: all slots)
  --interface NAME       network interface for the ranks (ip -br addr): its name on all hosts, or a subnet
                         (10.1.0.0/16)
  -p, --ssh-port PORT    port of ssh on the hosts
  -i, --ssh-identity-file FILE    private key for ssh
  --mpi, --gloo          how the ranks communicate (default: MPI if Horovod was built with it)
  --check-only           only check the hosts
  -h, --help             print this help

The clone must have the same path on every host, and ssh must work without a password.
With Gloo, start on one of the hosts or on another one with this interface. Exit status: 2 if a host fails its check.
END
}

die() {
  printf 'horovodrun.sh: %s\n' "$@" >&2
  exit 2
}

parse_arguments() {
  hosts='' ranks='' interface='' port='' key='' controller='' check_only=no
  while [ $# -gt 0 ]; do
    case $1 in
      -H | --hosts | --hostfile | -np | --interface | -p | --ssh-port | -i | --ssh-identity-file)
        [ $# -ge 2 ] || die "$1 needs a value (see --help)"
        case $1 in
          -H | --hosts) hosts=$2 ;;
          --hostfile) hosts=$(read_hostfile "$2") || exit 2 ;;
          -np) ranks=$2 ;;
          --interface) interface=$2 ;;
          -p | --ssh-port) port=$2 ;;
          *) key=$2 ;;
        esac
        shift
        ;;
      --mpi | --gloo) controller=$1 ;;
      --check-only) check_only=yes ;;
      -h | --help) usage && exit 0 ;;
      --)
        shift
        break
        ;;
      *) die "unknown argument $1: put the trainer's arguments after -- (see --help)" ;;
    esac
    shift
  done
  trainer_arguments=("$@")
  [ -n "$hosts" ] || die "no hosts given: use -H a100-01:2,a100-02:2 or --hostfile FILE (see --help)"
}

read_hostfile() {
  [ -r "$1" ] || die "--hostfile $1: no such file, or not readable"
  sed -e 's/#.*//' -e 's/[[:space:]]*slots[[:space:]]*=[[:space:]]*/:/' -e 's/[[:space:]]//g' -e '/^$/d' "$1" | paste -sd ,
}

# Sets names, slots (total) and hosts (each with its slots).
split_hosts() {
  local entry entries
  names=() slots=0
  IFS=, read -ra entries <<<"$hosts"
  hosts=''
  for entry in "${entries[@]}"; do
    [[ $entry =~ ^([A-Za-z0-9_.-]+)(:([1-9][0-9]*))?$ ]] || die "hosts: '$entry' is not HOST:SLOTS"
    names+=("${BASH_REMATCH[1]}")
    slots=$((slots + ${BASH_REMATCH[3]:-1}))
    hosts+=${hosts:+,}${BASH_REMATCH[1]}:${BASH_REMATCH[3]:-1}
  done
  ranks=${ranks:-$slots}
  [[ $ranks =~ ^[1-9][0-9]*$ ]] || die "-np $ranks: must be a positive number"
  [ "$ranks" -le "$slots" ] || die "-np $ranks, but the hosts have only $slots slots: $hosts"
}

host_of_each_rank() {
  local entry slot
  for entry in ${hosts//,/ }; do
    for ((slot = 0; slot < ${entry#*:}; slot++)); do printf '%s ' "${entry%:*}"; done
  done
}

# Runs on every host, over ssh except on this one. Arguments: CLONE FOLDER INTERFACE. Prints the name of the interface
# there, or fails and prints what is wrong.
# shellcheck disable=SC2016
host_check='
  if ! [ -x "$2/python" ]; then echo "no $2/python: the clone and its .venv must have the same path on all hosts"; exit 1; fi
  [ -z "$3" ] || { cd "$1" && "$2/python" -m hvd_bert.distributed.interfaces "$3" 2>&1; } || { echo "(--interface $3)"; exit 1; }'

is_here() { [ "$1" = localhost ] || [ "$1" = 127.0.0.1 ] || [ "$1" = "$(hostname)" ] || [ "$1" = "$(hostname -s)" ]; }

# check_host NAME: prints the name of its interface, or fails and prints what is wrong.
check_host() {
  local output
  if is_here "$1"; then
    output=$(bash -c "$host_check" bash "$home" "$bin" "$interface" 2>&1) || {
      echo "$output"
      return 1
    }
    tail -n 1 <<<"$output"
    return
  fi
  timeout 20 getent hosts "$1" >/dev/null || {
    echo "this name does not resolve (getent hosts $1): check its spelling, DNS and /etc/hosts"
    return 1
  }
  # A host whose key has changed is refused. horovodrun itself connects with StrictHostKeyChecking=no.
  local options=(-o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=5 -o ConnectionAttempts=1)
  [ -z "$port" ] || options+=(-p "$port")
  [ -z "$key" ] || options+=(-i "$key")
  output=$(timeout 30 ssh "${options[@]}" "$1" "sh -s $(printf '%q ' "$home" "$bin" "$interface")" 2>&1 <<<"$host_check") || {
    case $? in
      255) echo "ssh failed: $(tail -n 1 <<<"$output" | tr -d '\r') (it must work without a password: ssh-copy-id $1; then test: ssh ${port:+-p $port }$1 true)" ;;
      124) echo "ssh did not finish within 30 s" ;;
      *) echo "$output" ;;
    esac
    return 1
  }
  tail -n 1 <<<"$output" # after ssh's own lines
}

# Sets network_interface, for horovodrun itself.
check_hosts() {
  local name folder wrong=()
  folder=$(mktemp -d)
  for name in "${names[@]}"; do { check_host "$name" >"$folder/$name" 2>&1 || touch "$folder/$name failed"; } & done
  wait
  for name in "${names[@]}"; do
    if [ -e "$folder/$name failed" ]; then wrong+=("$name: $(cat "$folder/$name")"); fi
  done
  network_interface=$(cat "$folder/${names[0]}")
  rm -r "$folder"
  [ ${#wrong[@]} -eq 0 ] || die "${wrong[@]}"
  if [ "$controller" = --gloo ] && [ -n "$interface" ]; then
    network_interface=$(check_host localhost 2>&1) ||
      die "$(hostname), this host, has no interface $interface, which Gloo's launcher needs: start on ${names[0]}"
  fi
}

parse_arguments "$@"
if [ "${SLURM_STEP_NUM_TASKS:-1}" != 1 ] && [ -z "${SLURM_PTY_PORT:-}" ]; then # srun --pty has one terminal
  [ "${SLURM_PROCID:-0}" = 0 ] || exit 2
  die "started by each of srun's $SLURM_STEP_NUM_TASKS tasks: use sbatch scripts/hvd.slurm, or start it once per job, without srun"
fi
split_hosts
bin=${HVD_BERT_VENV:-$home/.venv}/bin
[ -x "$bin/horovodrun" ] || die "no $bin/horovodrun: run 'bash env/setup.sh' in $home once"
check_hosts
if [ "$check_only" = yes ]; then
  echo "All hosts passed the check: $hosts"
  exit 0
fi
export PATH=$bin:$PATH
if [ "$(id -u)" -eq 0 ]; then # Open MPI refuses to run as root otherwise
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
command=(horovodrun -np "$ranks" -H "$hosts")
[ -z "$controller" ] || command+=("$controller")
if [ -n "$interface" ]; then
  export HVD_BERT_INTERFACE=$interface # each rank looks up its host's own
  command+=(--network-interfaces "$network_interface")
fi
# horovodrun fails where it cannot write its cache of checked hosts.
{ mkdir -p ~/.horovod && [ -w ~/.horovod ]; } 2>/dev/null || command+=(--disable-cache)
[ -z "$port" ] || command+=(--ssh-port "$port")
[ -z "$key" ] || command+=(--ssh-identity-file "$key")
command+=(python -m hvd_bert.train "${trainer_arguments[@]}")
printf '$ %s\n' "$(printf '%q ' "${command[@]}")"

# The launcher prints more after the first failure. Keep a copy of the output to print that failure again at the end.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
exec {out}> >(trap '' INT TERM; exec tee -a "$log")
copiers=($!)
exec {err}> >(trap '' INT TERM; exec tee -a "$log" >&2)
copiers+=($!)
"${command[@]}" >&"$out" 2>&"$err" {out}>&- {err}>&- &
exec {out}>&- {err}>&-
# In the background, because bash handles signals only between commands or in `wait`. A background job ignores SIGINT.
# At SIGTERM horovodrun lets its ranks save. If env/build_horovod.sh did not build it, it becomes mpirun, which would
# give them a second, or a shell that keeps signals from mpirun. At USR1 mpirun lets them save.
run=$!
trap 'signalled=yes; pkill -USR1 -x -P "$run,$$" mpirun || kill -TERM "$run" 2>/dev/null || true' INT TERM
signalled=yes
while [ "$signalled" = yes ]; do # a signal also ends `wait`
  signalled=no status=0
  wait "$run" || status=$?
done
wait "${copiers[@]}" || true
if [ "$status" -ne 0 ]; then
  [ -z "$(tail -c 1 "$log")" ] || echo >&2 # a progress bar that was cut off
  echo "horovodrun.sh: first failure: $(awk -v hosts="$(host_of_each_rank)" -f "$home/scripts/first_failure.awk" "$log")" >&2
fi
exit "$status"
