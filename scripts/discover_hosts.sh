#!/usr/bin/env bash
# Prints the hosts that Horovod elastic may use, one HOST:SLOTS per line. horovodrun calls it about once a second:
#   HVD_BERT_HOSTFILE=hosts horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script scripts/discover_hosts.sh \
#       python -m hvd_bert.train --elastic --output_dir runs/elastic
# HVD_BERT_HOSTFILE (default: hosts) has lines of HOST:SLOTS, or HOST slots=N as for mpirun. Add and remove lines during
# the training. Without this file, prints the nodes of a Slurm job, with SLURM_NTASKS_PER_NODE slots each.
set -euo pipefail

file=${HVD_BERT_HOSTFILE:-hosts}
if [ -f "$file" ]; then
  sed -E 's/#.*//; s/[[:space:]]+slots=([0-9]+).*/:\1/; s/[[:space:]]//g; /^$/d; /:/!s/$/:1/' "$file"
elif [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:${SLURM_NTASKS_PER_NODE:-1}/"
else
  echo "discover_hosts.sh: no file '$file' and not in a Slurm job. Set HVD_BERT_HOSTFILE to a file with lines of HOST:SLOTS" >&2
  exit 2
fi
