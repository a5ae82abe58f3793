# Shared by hvd.slurm and scaling.slurm. They set script, home and without_slurm, and define `progress`, which prints
# the progress of the job.
# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034  # variables of these scripts

say() { printf '%s: %s\n' "$script" "$*"; }
die() {
  printf '%s: %s\n' "$script" "$*" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || die "not in a Slurm job: use sbatch scripts/$script (without Slurm: $without_slurm)"
# In an array the plain number of the last task would mean all tasks.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
warned=${warned:-no} ranks='' launcher='' status=0
warn() {
  warned=yes interrupted=yes
  say "warning: the time limit is near (signal $1): saving and stopping"
  [ -z "$ranks" ] || kill -USR1 "$ranks" 2>/dev/null || true
}
trap 'warn USR1' USR1
trap 'warn USR2' USR2
trap 'warn TERM' TERM # of sites that send nothing else before a job is preempted

# Prints a field of this job in Slurm.
show() { scontrol show job "$job_id" 2>/dev/null | sed -n "s/^ *$1=//p"; }

# Prints the value of a flag in the arguments, which may be written with hyphens (--output-dir).
value_of() {
  local flag=$1 previous='' value='' word name
  shift
  for word in "$@"; do
    [ "$previous" != "$flag" ] || value=$word
    name=${word%%=*}
    case $name in --*) name=--$(tr - _ <<<"${name#--}") ;; esac
    previous=$name
    if [ "$name" = "$flag" ] && [ "$word" != "${word%%=*}" ]; then value=${word#*=} previous=''; fi
  done
  printf '%s\n' "$value"
}

# Loads the environment and announces the job. $1: its results. Sets venv, attempt and began_with.
begin() {
  load_environment
  attempt=$((${SLURM_RESTART_COUNT:-0} + 1))
  say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, attempt $attempt, $home, results in $1"
  began_with=$(progress)
}

# Sets launcher.
prepare() {
  set_threads_and_interface
  choose_launcher
  check_nodes
}

# Requeues the job, except after a later attempt without progress, because the next would make none either. $1: what to
# print then. $2: what the next attempt does. $3: the flag with which the same command resumes.
requeue() {
  if [ "$attempt" -gt 1 ] && [ "$(progress)" = "$began_with" ]; then
    say "not requeued: $1"
  elif [[ $(show JobState) == RUNNING\ * ]]; then # not if it was cancelled
    say "requeueing: the next attempt $2" # ends this script
    scontrol requeue "$job_id" && return
    say "requeueing is not allowed here: submit the same command again, with $3, to resume"
  fi
}

# Loads the site's modules, then the environment's programs. Sets venv.
load_environment() {
  local site=${HVD_BERT_SITE:-$home/env/site.sh}
  if [ -f "$site" ]; then
    say "site: $site"
    set +eu # module commands do not work with these
    # shellcheck source=/dev/null
    . "$site"
    set -eu
  elif [ -n "${HVD_BERT_SITE:-}" ]; then
    die "HVD_BERT_SITE: no such file: $site"
  fi
  venv=${HVD_BERT_VENV:-$home/.venv}
  [ -x "$venv/bin/python" ] || die "no environment in $venv: run 'bash env/setup.sh' in $home once"
  export PATH=$venv/bin:$PATH
}

set_threads_and_interface() {
  # Threads per rank: the CPUs per task, if the node has as many.
  local threads
  threads=$(($(env -u OMP_NUM_THREADS nproc) / ${SLURM_NTASKS_PER_NODE:-1}))
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ] && [ "$threads" -gt "$SLURM_CPUS_PER_TASK" ]; then threads=$SLURM_CPUS_PER_TASK; fi
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
  export HVD_BERT_INTERFACE=${HVD_BERT_INTERFACE:-} # each rank looks up its node's own
}

# Sets launcher. pmix: srun starts the ranks. pmi2: the same, for an MPI with PMI-2. mpirun: Open MPI's daemons do.
choose_launcher() {
  launcher=${HVD_BERT_LAUNCHER:-}
  case $launcher in pmix | pmi2 | mpirun) return ;; '') ;; *) die "HVD_BERT_LAUNCHER=$launcher: must be pmix, pmi2 or mpirun" ;; esac
  local offered
  offered=$(srun --mpi=list 2>&1) || true
  launcher=pmix
  if grep -qwE 'pmix(_v[0-9]+)?' <<<"$offered"; then return; fi
  # Open MPI has a component "s2" if it was built with Slurm's PMI-2. MPICH and MVAPICH always support PMI-2.
  if grep -qw pmi2 <<<"$offered" && { ! command -v ompi_info >/dev/null || ompi_info --parsable | grep -q '^mca:pmix:s2:'; }; then
    launcher=pmi2
  elif command -v mpirun >/dev/null; then
    launcher=mpirun
  else
    die "this Slurm has no PMIx (srun --mpi=list: $(tr -s '[:space:]' ' ' <<<"$offered")) and mpirun is not on PATH:" \
      "load an MPI module in env/site.sh, or ask for Slurm's PMIx plugin"
  fi
  say "this Slurm has no PMIx: starting with $launcher"
}

# Whether tasks can be bound to cores. With TaskPlugin=task/none they cannot, and srun prints so every time.
binds() { scontrol show config | grep -qE '^TaskPlugin.*(affinity|cgroup)'; }

# Checks the environment (on a shared file system) and the interface on each node, and logs the GPUs.
check_nodes() {
  # shellcheck disable=SC2016  # expanded by the shell on each node
  local check='
  script=$3; say() { echo "$script: $(hostname): $1" >&2; }
  [ -x "$1/bin/python" ] || { say "no $1/bin/python: the clone and its .venv must be on a shared file system"; exit 2; }
  [ -z "$2" ] || found=$(cd "$4" && "$1/bin/python" -m hvd_bert.distributed.interfaces "$2" 2>&1) || {
    say "HVD_BERT_INTERFACE=$2: $found"
    exit 2
  }
  if command -v nvidia-smi >/dev/null; then hostname; nvidia-smi; fi'
  # --overlap: otherwise Slurm may refuse the ranks' step while it still counts the GPUs as this step's.
  srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 --mpi=none \
    bash -c "$check" bash "$venv" "$HVD_BERT_INTERFACE" "$script" "$home"
}

# Runs a command, and forwards the warning before the time limit as USR1. Sets status.
run_and_wait() {
  # In the background, because bash handles signals only between commands or in `wait`, which a signal ends.
  "$@" &
  ranks=$! interrupted=yes
  [ "$warned" = no ] || kill -USR1 "$ranks" # the warning came before the ranks started
  while [ "$interrupted" = yes ]; do
    interrupted=no status=0
    wait "$ranks" || status=$?
  done
  ranks=''
}
