#!/usr/bin/env bash
# Installs the system packages of the two-host test cluster (tests/cluster): Slurm, munge, PMIx, sshd, ip and tc. Needs
# root on Debian or Ubuntu. Starts and enables no service. Safe to repeat.
# Exit status: 0 all packages are installed, 3 some are missing and cannot be installed here (it prints which).
set -euo pipefail

services=(ssh munge slurmctld slurmd)
packages=(slurmctld slurmd slurm-client munge libpmix-dev openssh-server openssh-client iproute2 procps)

PATH=$PATH:/usr/sbin:/sbin

missing() {
  local program
  for program in munged slurmctld slurmd srun sbatch scontrol sshd ssh ssh-keygen ip tc pgrep unshare nsenter; do
    command -v "$program" >/dev/null || printf '%s ' "$program"
  done
  # Slurm's PMIx plugin loads it.
  find /usr/lib /usr/lib64 -name 'libpmix.so*' -print -quit 2>/dev/null | grep -q . || printf 'libpmix '
}

enabled() { systemctl is-enabled "$1.service" 2>/dev/null | grep -qx enabled; }

install_packages() {
  local policy=/usr/sbin/policy-rc.d service newcomers=()
  for service in "${services[@]}"; do
    enabled "$service" || newcomers+=("$service")
  done
  if [ ! -e "$policy" ]; then # Debian's way to start no services
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get -o DPkg::Lock::Timeout=300 update
  apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${packages[@]}"
  for service in "${newcomers[@]}"; do
    if enabled "$service"; then systemctl disable "$service.service"; fi
  done
}

absent=$(missing)
[ -n "$absent" ] || exit 0
if [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then
  log=$(mktemp "${TMPDIR:-/tmp}/hvd_bert_cluster_packages.XXXXXX")
  echo "Installing the packages of the test cluster: ${packages[*]} (details: $log)"
  (install_packages) </dev/null >"$log" 2>&1 || tail -n 5 "$log" >&2
  absent=$(missing)
  if [ -z "$absent" ]; then
    rm -f "$log"
    exit 0
  fi
fi
echo "env/cluster_packages.sh: missing: $absent" >&2
echo "  Debian or Ubuntu, as root: apt-get install ${packages[*]}" >&2
exit 3
