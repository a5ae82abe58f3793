# shellcheck shell=bash
# Site settings for Slurm jobs. Copy to env/site.sh (ignored by git) and adapt. scripts/hvd.slurm and scaling.slurm read
# it on the first node before anything else, and the ranks inherit its environment.

# The modules that were loaded for env/setup.sh. Names differ between sites: see `module avail`.
module purge
module load gcc/12 openmpi/4.1 cuda/12.8

# The network interface for ranks on different hosts, if there are several (`ip -br addr`): its name on
# all of them, or a subnet such as 10.1.0.0/16. Checked on each node.
# export HVD_BERT_INTERFACE=ib0

# A local disk of the nodes for the tokenized windows. The default is ~/.cache, shared by all nodes.
# export HVD_BERT_CACHE=/local/$USER/hvd_bert

# Compute nodes without access to the hub: use what the login node has downloaded.
# export HF_HOME=/scratch/$USER/huggingface HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
