# shellcheck shell=bash
# Installs all system packages, with a reason for each. Sourced by env/setup.sh and env/cluster_packages.sh, which set
# use_apt=no for --no-apt, and by scripts/demo.sh to find the driver.

use_apt=yes

has_nvidia_driver() {
  [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null || [[ $(PATH=$PATH:/sbin ldconfig -p 2>/dev/null) == *libcuda.so* ]]
}

can_apt() { [ "$use_apt" = yes ] && [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; }

# $1: a Debian package
apt_reason() {
  case $1 in
    python3) echo "Python for the environment" ;;
    python3*-venv) echo "Python's module that creates the environment" ;;
    python3*-dev) echo "Python's headers, to build Horovod" ;;
    g++ | make | patch) echo "builds Horovod" ;;
    openmpi-bin) echo "mpirun, which starts ranks over MPI" ;;
    libopenmpi-dev) echo "MPI's compiler and libraries, to build Horovod and mpi4py" ;;
    openssh-client) echo "ssh, by which launchers reach other hosts" ;;
    chromium | chromium-driver) echo "opens HTML pages in the tests" ;;
    slurmctld | slurmd | slurm-client) echo "Slurm of the test cluster" ;;
    munge) echo "Slurm's authentication" ;;
    libpmix-dev) echo "srun --mpi=pmix" ;;
    openssh-server) echo "sshd of the test cluster's hosts" ;;
    iproute2) echo "ip and tc: the test cluster's network" ;;
    procps) echo "pgrep: the test cluster's processes" ;;
    *) echo "env/apt.sh: no reason for $1" >&2 && return 1 ;;
  esac
}

# Prints packages with their reasons, then installs them. $1: log file; then packages.
apt_install() {
  local log=$1 package reason
  shift
  echo "As root on Debian: installing with apt (--no-apt prevents this; details: $log)"
  for package in "$@"; do
    reason=$(apt_reason "$package") || return 1
    printf '  %-16s %s\n' "$package" "$reason"
  done
  {
    export DEBIAN_FRONTEND=noninteractive
    apt-get -o DPkg::Lock::Timeout=300 update
    apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
  } </dev/null >>"$log" 2>&1
}
