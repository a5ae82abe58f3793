#!/usr/bin/env bash
# Installs the system packages of the two-host test cluster (tests/cluster): Slurm, munge, PMIx, sshd, ip and tc. Needs
# root on Debian or Ubuntu. Starts and enables no service. Safe to repeat.
#   bash env/cluster_packages.sh [--no-apt]    --no-apt: install nothing, only print what is missing
# Exit status: 0 all packages are installed, 3 some are missing and cannot be installed here; they are printed.
set -euo pipefail
# shellcheck source=env/apt.sh
. "$(dirname "${BASH_SOURCE[0]}")/apt.sh"
case ${1:-} in
  '') ;;
  --no-apt) use_apt=no ;;
  *) echo "env/cluster_packages.sh: unknown argument $1 (only --no-apt)" >&2 && exit 1 ;;
esac

services=(ssh munge slurmctld slurmd)
packages=(slurmctld slurmd slurm-client munge libpmix-dev openssh-server openssh-client iproute2 procps)

PATH=$PATH:/usr/sbin:/sbin

missing() {
  local program
  for program in munged slurmctld slurmd srun sbatch scontrol sshd ssh ssh-keygen ip tc pgrep unshare nsenter; do
    command -v "$program" >/dev/null || printf '%s ' "$program"
  done
  # Slurm's PMIx plugin loads libpmix.
  find /usr/lib /usr/lib64 -name 'libpmix.so*' -print -quit 2>/dev/null | grep -q . || printf 'libpmix '
}

not_installed() {
  local package
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || printf '%s\n' "$package"
  done
}

enabled() { systemctl is-enabled "$1.service" 2>/dev/null | grep -qx enabled; }

# $1: log file
install_packages() {
  local policy=/usr/sbin/policy-rc.d service newcomers=() wanted=()
  mapfile -t wanted < <(not_installed)
  for service in "${services[@]}"; do
    enabled "$service" || newcomers+=("$service")
  done
  if [ ! -e "$policy" ]; then # with this file, Debian starts no services
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  apt_install "$1" "${wanted[@]}"
  for service in "${newcomers[@]}"; do
    if enabled "$service"; then systemctl disable "$service.service" >>"$1" 2>&1; fi
  done
}

absent=$(missing)
[ -n "$absent" ] || exit 0
if can_apt; then
  log=$(mktemp "${TMPDIR:-/tmp}/hvd_bert_cluster_packages.XXXXXX")
  (install_packages "$log") </dev/null || tail -n 5 "$log" >&2
  absent=$(missing)
  if [ -z "$absent" ]; then
    rm -f "$log"
    exit 0
  fi
fi
echo "env/cluster_packages.sh: missing: $absent" >&2
echo "  Debian or Ubuntu, as root: apt-get install ${packages[*]}" >&2
exit 3
