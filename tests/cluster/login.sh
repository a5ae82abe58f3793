#!/usr/bin/env bash
# The login host of the test cluster, and the first process of its PID namespace; started by up.sh.
set -Eeuo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"
trap 'echo "login.sh: line $LINENO failed: $BASH_COMMAND"; touch "$state/failed"' ERR

count=$(printf '%02d' "$hosts")
nodes=()
declare -A address=([login]=10.77.0.1)
for ((number = 1; number <= hosts; number++)); do
  nodes+=("$(printf 'a100-%02d' "$number")")
  address[${nodes[-1]}]=10.77.0.$((10 + number))
done

network() {
  hostname login
  ip link set lo up
  ip link add name cluster0 address 02:00:00:00:00:01 type bridge # its own address, not a port's: see link_down in faults.py
  ip addr add "${address[login]}/24" dev cluster0
  ip link set cluster0 up
}

# Makes separate copies of /etc, /run and root's home. ssh finds root's home in /etc/passwd.
own_files() {
  mkdir -p "$state"/{home/.ssh,slurmctld}
  cp -a /etc "$state/etc"
  mount --bind "$state/etc" /etc
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/{munge,sshd,lock}
  local host
  for host in "${!address[@]}"; do echo "${address[$host]} $host"; done >>/etc/hosts
  sed -i "s|^\(root:[^:]*:[^:]*:[^:]*:[^:]*\):[^:]*:|\1:$state/home:|" /etc/passwd
  mkdir -p /etc/slurm /etc/munge
  dd if=/dev/urandom of=/etc/munge/munge.key bs=128 count=1 status=none
  chown root:root /etc/munge /etc/munge/munge.key
  chmod 700 /etc/munge
  chmod 600 /etc/munge/munge.key
}

ssh_files() {
  local ssh=$state/home/.ssh host
  chmod 700 "$ssh"
  ssh-keygen -q -t ed25519 -N '' -f "$ssh/id_ed25519"
  cp "$ssh/id_ed25519.pub" "$ssh/authorized_keys"
  for host in "${nodes[@]}"; do
    mkdir -p "$state/nodes/$host"/{spool,tmp,local}
    ssh-keygen -q -t ed25519 -N '' -f "$state/nodes/$host/host_key"
    echo "$host,${address[$host]} $(cut -d ' ' -f 1,2 "$state/nodes/$host/host_key.pub")" >>"$ssh/known_hosts"
  done
  # Clients without the right key are asked for a password, as by most servers.
  cat >"$state/sshd_config" <<END
AuthorizedKeysFile $ssh/authorized_keys
PermitRootLogin yes
PasswordAuthentication yes
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PrintMotd no
PidFile none
END
}

slurm_files() {
  touch "$state"/gpu{0..7} # stand-ins for /dev/nvidia0 to /dev/nvidia7
  mkdir -p "$state/local"
  cat >/etc/slurm/slurm.conf <<END
ClusterName=hvdbert
SlurmctldHost=login(${address[login]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000
GresTypes=gpu
ReturnToService=2
KillWait=5
MinJobAge=3600
MailProg=/bin/true
StateSaveLocation=$state/slurmctld
SlurmdSpoolDir=$state/nodes/%n/spool
TmpFS=$state/nodes/%n/tmp
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd-%n.log
END
  local host
  for host in "${nodes[@]}"; do
    echo "NodeName=$host NodeAddr=${address[$host]} CPUs=64 Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1" \
      "Gres=gpu:a100:8 State=UNKNOWN"
  done >>/etc/slurm/slurm.conf
  echo "PartitionName=gpu Nodes=a100-[01-$count] Default=YES MaxTime=INFINITE State=UP" >>/etc/slurm/slurm.conf
  echo "NodeName=a100-[01-$count] Name=gpu Type=a100 File=$state/gpu[0-7]" >/etc/slurm/gres.conf
  printf 'CgroupAutomount=no\n' >/etc/slurm/cgroup.conf
}

start_node() {
  local host=$1 ip=$2 link=veth${1#a100-} interface=eth0 pid
  [ -z "$own_interfaces" ] || interface=eth$((10#${1#a100-}))
  HVD_BERT_CLUSTER=$state unshare --net --uts --mount bash "$here/node.sh" "$host" "$ip" "$interface" \
    >"$state/log/$host.log" 2>&1 &
  pid=$!
  has_namespace() { [ "$(readlink "/proc/$pid/ns/net")" != "$(readlink /proc/$$/ns/net)" ]; }
  wait_for 10 "$host's namespace" has_namespace
  ip link add name "$link" type veth peer name "$interface" netns "$pid"
  ip link set "$link" master cluster0 up
  echo "$pid" >"$state/nodes/$host/pid"
}

idle() { [ "$(sinfo --noheader --Node --format=%T | sort -u)" = idle ]; }

network
own_files
ssh_files
slurm_files
munged --foreground --seed-file=/run/munge/seed --log-file=/run/munge/munged.log &
wait_for 10 munged munge --no-input --output=/dev/null
slurmctld -D >/dev/null 2>&1 &
for host in "${nodes[@]}"; do start_node "$host" "${address[$host]}"; done
wait_for 30 slurmctld sh -c 'scontrol ping | grep -q UP'
export HOME=$state/home
for host in "${nodes[@]}"; do wait_for 20 "sshd of $host" ssh -o BatchMode=yes -o ConnectTimeout=2 "$host" true; done
wait_for $((20 + 5 * ${#nodes[@]})) "slurmd of all nodes" idle
touch "$state/ready"
trap - ERR
set +e
wait
sleep infinity # keep the namespaces after the daemons have ended
