#!/usr/bin/env bash
# Tries locks, atomic writes and a training of two hosts on a real NFS export (docs/evidence/failing-clusters.md).
#   bash benchmarks/nfs/nfs.sh FOLDER           as root on Debian; FOLDER: for packages and logs, about 250 MB
#   bash benchmarks/nfs/nfs.sh FOLDER judge     only judges the logs that are there
# Three user-mode Linux kernels share this machine's file system: a server with the kernel's nfsd, and two clients that
# mount its export with NFSv4.2 as their home. So it needs no kernel with NFS, and nothing on the machine changes.
# Exit status: 1 if a check is WRONG, a training failed or a host did not complete its part.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=(user-mode-linux nfs-kernel-server nfs-common rpcbind kmod libtirpc3 libevent-core-2.1-7 libkeyutils1 libnfsidmap1 libwrap0)

# complain FOLDER: prints what the logs of the hosts have or miss, if it is wrong. Fails then.
complain() {
  local host expected wrong=0
  while IFS=: read -r host expected; do
    grep -aq "^$host: $expected" "$1/run/$host.log" 2>/dev/null || {
      echo "nfs.sh: error: $1/run/$host.log has no line '$expected'" >&2
      wrong=1
    }
  done <<'END'
c1:training ended with status 0
c2:training ended with status 0
c2:took the lock .* host was gone
END
  ! grep -a 'WRONG' "$1"/run/c[12].log >&2 || wrong=1
  return $wrong
}
if [ "${2:-}" = judge ]; then
  complain "$1" || exit 1
  exit
fi

if [ "${2:-}" != inside ]; then
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
  if [ ! -e "$folder/root/usr/bin/linux.uml" ]; then
    (cd "$folder" && apt-get download "${packages[@]}" && for package in ./*.deb; do dpkg -x "$package" root; done)
  fi
  exec unshare --net --pid --mount --fork --mount-proc --kill-child bash "$here/nfs.sh" "$folder" inside
fi

folder=$1
rm -rf "$folder/run" "$folder/disk"
mkdir "$folder/run"
truncate -s 400M "$folder/disk"
mkfs.ext4 -q "$folder/disk"
ip link add nfs0 type bridge
ip link set nfs0 up

# start NAME ADDRESS MEMORY [ARGUMENTS...]
start() {
  local name=$1 address=$2 memory=$3
  shift 3
  ip tuntap add dev "tap$name" mode tap
  ip link set "tap$name" master nfs0 up
  "$folder/root/usr/bin/linux.uml" "mem=$memory" rootfstype=hostfs rootflags=/ rw "init=$here/guest.sh" quiet \
    con=null con0=null,fd:1 con1=null ssl=null "vec0:transport=tap,ifname=tap$name,depth=128" \
    "FOLDER=$folder" "ROLE=$name" "ADDRESS=$address" "PYTHON=$(command -v python)" "$@" </dev/null \
    >"$folder/run/$name.log" 2>&1 &
  started=$!
}
start server 10.78.0.10 512M "ubd0=$folder/disk"
start c1 10.78.0.11 1500M
first=$started
start c2 10.78.0.12 1500M
# Each wait of the hosts has a limit of 600 s; this one is for a kernel that hangs.
timeout 3600 tail --pid="$started" -f /dev/null || echo "nfs.sh: error: c2 did not end in 3600 s" >&2
kill "$first" || true # its kernel restarts at the end of its part
grep -ah '^c[12]: ' "$folder"/run/c[12].log || true
complain "$folder" || exit 1
