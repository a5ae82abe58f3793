#!/bin/sh
# The first process of a user-mode Linux kernel, started by nfs.sh with FOLDER, ROLE, ADDRESS and PYTHON: the server of
# the export, or one of two clients, which run checks.py on it.
root=$FOLDER/root
repository=$(dirname "$0")/../..
PATH=$root/sbin:$root/usr/sbin:$(dirname "$PYTHON"):/usr/sbin:/usr/bin:/sbin:/bin
export PATH
libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu

mount -t proc proc /proc
mount -t sysfs sys /sys
for place in /run /mnt /tmp /dev/shm /var/lib; do mount -t tmpfs tmpfs "$place"; done
hostname "$ROLE"
ip link set lo up
ip addr add "$ADDRESS/24" dev vec0
ip link set vec0 up
mkdir -p /mnt/modules/lib/modules /mnt/home /mnt/export
ln -s "$root/usr/lib/uml/modules/$(uname -r)" /mnt/modules/lib/modules
ln -s "$root/bin/kmod" /run/modprobe
LD_LIBRARY_PATH=$libraries /run/modprobe -d /mnt/modules -a nfsv4 nfsd

if [ "$ROLE" = server ]; then
  mount -t nfsd nfsd /proc/fs/nfsd
  mkdir -p /var/lib/nfs/v4recovery
  touch /var/lib/nfs/etab /var/lib/nfs/rmtab
  mount -t ext4 /dev/ubda /mnt/export
  export LD_LIBRARY_PATH="$libraries"
  exportfs -o rw,no_root_squash,sync,fsid=0,no_subtree_check 10.78.0.0/24:/mnt/export
  echo 10 >/proc/fs/nfsd/nfsv4leasetime # default: 90 s until the locks of a lost host are free
  echo 10 >/proc/fs/nfsd/nfsv4gracetime
  rpc.mountd
  rpc.nfsd -N 3 8
  touch "$FOLDER/run/ready"
  exec sleep infinity
fi

waited=0
until [ -e "$FOLDER/run/ready" ]; do
  if [ "$waited" -ge 600 ]; then
    echo "$ROLE: WRONG: the server exported nothing in 600 s"
    echo o >/proc/sysrq-trigger
    sleep 5
  fi
  sleep 1
  waited=$((waited + 1))
done
mount -i -t nfs4 -o "vers=4.2,addr=10.78.0.10,clientaddr=$ADDRESS,hard" 10.78.0.10:/ /mnt/home
printf '127.0.0.1 localhost\n10.78.0.11 c1\n10.78.0.12 c2\n' >/run/hosts
mount --bind /run/hosts /etc/hosts
cd /mnt/home || exit
export HOME=/mnt/home HVD_BERT_CACHE=/mnt/home/cache HF_HOME=/mnt/home/hf HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
export PYTHONPATH="$repository" HVD_BERT_INTERFACE=10.78.0.0/24
# This kernel does not save the registers of AVX-512 when it changes between processes.
export GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX ATEN_CPU_CAPABILITY=default
export ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
grep ' /mnt/home ' /proc/mounts | sed "s/^/$ROLE: /"
python -u "$repository/benchmarks/nfs/checks.py" "$ROLE" 2>&1
sync
echo o >/proc/sysrq-trigger
sleep 5
