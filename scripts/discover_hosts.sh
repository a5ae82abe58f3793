#!/usr/bin/env bash
# The hosts that Horovod elastic may use now, one HOST:SLOTS a line. horovodrun asks about once a second:
#   HVD_BERT_HOSTFILE=hosts horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script scripts/discover_hosts.sh \
#       python -m hvd_bert.train --elastic --output_dir runs/elastic
# HVD_BERT_HOSTFILE (default: hosts): lines of HOST:SLOTS, or of HOST slots=N as mpirun has them; add and remove lines while
# the training runs. Without such a file, in a Slurm job: its nodes, with SLURM_NTASKS_PER_NODE slots each.
set -euo pipefail

file=${HVD_BERT_HOSTFILE:-hosts}
if [ -f "$file" ]; then
  sed -E 's/#.*//; s/[[:space:]]+slots=([0-9]+).*/:\1/; s/[[:space:]]//g; /^$/d; /:/!s/$/:1/' "$file"
elif [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:${SLURM_NTASKS_PER_NODE:-1}/"
else
  echo "discover_hosts.sh: no file '$file' and not in a Slurm job: name a file of HOST:SLOTS lines in HVD_BERT_HOSTFILE" >&2
  exit 2
fi
